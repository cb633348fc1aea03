"""Rows and their outcomes to output records: flat native ones, or OpenAI Batch answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cbgen.config import OutputConfig
from cbgen.data.journal import Record
from cbgen.data.lines import dumps
from cbgen.data.openai import batch_record
from cbgen.errors import RowError
from cbgen.records import Completion, Row


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """How a record looks.

    Attributes:
        config: the output's settings.
        model: its name, for records that tell it.
        messages_column: where `append_message` adds the answer.
        continues_message: the answer continues the last message instead of being one of its own.
        is_table: the output has columns of fixed types: Batch lines are answered in them too, and rows may not have
            more samples than the run.
        num_samples: of the run.
        carries_columns: whether the input's columns are part of a record; in some outputs they are added later.
    """

    config: OutputConfig
    model: str = ""
    messages_column: str = "messages"
    continues_message: bool = False
    is_table: bool = False
    num_samples: int = 1
    carries_columns: bool = True

    def record(self, row: Row, outcome: Completion | RowError) -> Record:
        """The output line of a row, and what the journal needs of it."""
        if self.is_table and isinstance(outcome, Completion) and len(outcome.samples) > self.num_samples == 1:
            message = f"{row.place}: n={len(outcome.samples)} in a row needs --n above 1, or JSONL output"
            outcome = RowError("invalid_params", message)
        if row.form != "native" and not self.is_table:
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
        if self.carries_columns:
            keep = self.config.keep
            carried = dict(row.columns) if keep is None else {name: row.columns.get(name) for name in keep}
        messages = row.columns.get(self.messages_column)
        if self.config.append_message and isinstance(messages, list):
            if isinstance(outcome, Completion):
                carried[self.messages_column] = self._with_answer(messages, outcome.samples[0].text)
            elif self.carries_columns:
                carried[self.messages_column] = messages
        return carried

    def _with_answer(self, messages: list[Any], text: str) -> list[Any]:
        if self.continues_message and messages and isinstance(messages[-1].get("content"), str):
            return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + text}]
        return [*messages, {"role": "assistant", "content": text}]

    def _results(self, row: Row, outcome: Completion | RowError) -> dict[str, Any]:
        """Always the same keys, so that every record of a file has the same shape."""
        config = self.config
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
                "completion": _one_or_list([sample.text for sample in samples]),
                "finish_reason": _one_or_list([sample.finish_reason for sample in samples]),
                "usage": {
                    "prompt_tokens": outcome.num_prompt_tokens,
                    "completion_tokens": outcome.num_completion_tokens,
                    "cached_tokens": 0,
                },
                "error": None,
            }
        if config.token_ids:
            fields["token_ids"] = _one_or_list([sample.token_ids for sample in samples])
        if config.source:
            file, _, line = row.place.rpartition(" ")
            fields["source"] = {"file": file.removesuffix(" line").removesuffix(" row"), "line": int(line)}
        if config.result_prefix:
            fields = {config.field(name): value for name, value in fields.items()}
        return fields


def _one_or_list(values: list[Any]) -> Any:
    """What a row of one sample holds plain, a row of several holds as a list; null when there is none."""
    return values[0] if len(values) == 1 else values or None
