"""Rows and their outcomes to output records: flat native ones, or OpenAI Batch answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cbgen.config import OutputConfig
from cbgen.data.lines import dumps
from cbgen.data.openai import batch_record
from cbgen.errors import RowError
from cbgen.output.journal import Record
from cbgen.records import Completion, Row


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """How a record looks.

    Attributes:
        config: the output's settings.
        model: its name, for records that tell it.
        continues_message: the answer continues the last message instead of being one of its own.
        is_table: the output has columns of fixed types: Batch lines are answered in them too, and rows may not have
            more samples than the run.
        is_batch_file: the input is an OpenAI Batch file: also lines that are no requests fail in the Batch form.
        num_samples: of the run.
        carries_columns: whether the input's columns are part of a record; in some outputs they are added later.
    """

    config: OutputConfig
    model: str = ""
    continues_message: bool = False
    is_table: bool = False
    is_batch_file: bool = False
    num_samples: int = 1
    carries_columns: bool = True

    def record(self, row: Row, outcome: Completion | RowError) -> Record:
        """The output line of a row, and what the journal needs of it."""
        if self.is_table and isinstance(outcome, Completion) and len(outcome.samples) > self.num_samples == 1:
            message = f"{row.place}: n={len(outcome.samples)} in a row needs --n above 1, or JSONL output"
            outcome = RowError("invalid_params", message)
        is_batch_line = row.form != "native" or (self.is_batch_file and isinstance(outcome, RowError))
        if is_batch_line and not self.is_table:
            value = batch_record(row, outcome, self.model)
        elif self.carries_columns and self.config.keep is None and not self.config.append_message:
            value = row.columns | self._results(row, outcome)
        else:
            value = self._carried(row, outcome) | self._results(row, outcome)
        if isinstance(outcome, RowError):
            return Record(row.index, row.checksum, outcome.code, 0, 0, dumps(value))
        num_prompt, num_completion = outcome.num_prompt_tokens, outcome.num_completion_tokens
        return Record(row.index, row.checksum, None, num_prompt, num_completion, dumps(value))

    def _carried(self, row: Row, outcome: Completion | RowError) -> dict[str, Any]:
        """The input's columns that are kept; every record has the same ones."""
        carried: dict[str, Any] = {}
        config = self.config
        if self.carries_columns:
            names = config.carried
            carried = dict(row.columns) if names is None else {name: row.columns.get(name) for name in names}
        messages: Any = row.columns.get(config.messages_column)
        if config.append_message and isinstance(outcome, Completion) and _is_chat(messages):
            carried[config.messages_column] = self._with_answer(messages, outcome.samples[0].text)
        return carried

    def _with_answer(self, messages: list[Any], text: str) -> list[Any]:
        """The chat with the answer, whose content has the form that the chat's own has: text, or parts."""
        *before, last = messages
        content = last.get("content")
        if self.continues_message:
            return [*before, {**last, "content": _extended(content, text)}]
        answer: Any = text
        if isinstance(content, list):
            answer = [text] if content and isinstance(content[0], str) else [{"type": "text", "text": text}]
        return [*messages, {"role": "assistant", "content": answer}]

    def _results(self, row: Row, outcome: Completion | RowError) -> dict[str, Any]:
        """Always the same keys, so that every record of a file has the same shape."""
        config, listed = self.config, self.is_table and self.num_samples > 1
        if isinstance(outcome, RowError):
            fields: dict[str, Any] = {
                "completion": None,
                "finish_reason": None,
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0},
                "error": {"code": outcome.code, "message": outcome.message},
            }
            samples = []
        else:
            samples = outcome.samples
            fields = {
                "completion": _one_or_list([sample.text for sample in samples], listed=listed),
                "finish_reason": _one_or_list([sample.finish_reason for sample in samples], listed=listed),
                "usage": {
                    "prompt_tokens": outcome.num_prompt_tokens,
                    "completion_tokens": outcome.num_completion_tokens,
                    "cached_tokens": outcome.num_cached_tokens,
                },
                "error": None,
            }
        if config.token_ids:
            fields["token_ids"] = _one_or_list([sample.token_ids for sample in samples], listed=listed)
        if config.source:
            file, _, line = row.place.rsplit(" ", 2)
            fields["source"] = {"file": file, "line": int(line)}
        if config.result_prefix:
            fields = {config.field(name): value for name, value in fields.items()}
        return fields


def _is_chat(value: Any) -> bool:
    """Whether an answer can be added; the prompt may have come from a template over other columns."""
    return isinstance(value, list) and bool(value) and isinstance(value[-1], dict)


def _extended(content: Any, text: str) -> Any:
    """A message's content that goes on with this text."""
    if not isinstance(content, list) or not content:
        return f"{content or ''}{text}"
    *before, last = content
    if isinstance(last, str):
        return [*before, last + text]
    if isinstance(last, dict) and isinstance(last.get("text"), str):
        return [*before, {**last, "text": last["text"] + text}]
    return [*content, {"type": "text", "text": text}]


def _one_or_list(values: list[Any], *, listed: bool) -> Any:
    """What a row of one sample holds plain (unless all are `listed`), a row of several as a list; null for none."""
    return values[0] if len(values) == 1 and not listed else values or None
