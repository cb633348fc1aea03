"""Rows and their outcomes to output records: flat native ones, or OpenAI Batch answers."""

from __future__ import annotations

from typing import Any

from cbgen.config import OutputConfig
from cbgen.data.journal import Record
from cbgen.data.lines import dumps
from cbgen.data.openai import batch_record
from cbgen.errors import RowError
from cbgen.records import Completion, Row


def format_record(row: Row, outcome: Completion | RowError, config: OutputConfig, model: str) -> Record:
    """The output line of a row: its own columns, then the result fields; or an OpenAI Batch answer."""
    completion = outcome if isinstance(outcome, Completion) else None
    num_prompt = completion.num_prompt_tokens if completion else 0
    num_completion = completion.num_completion_tokens if completion else 0
    if row.form == "native":
        value = {**row.columns, **_result_fields(outcome, completion, config)}
    else:
        value = batch_record(row, outcome, model)
    code = None if completion else outcome.code  # type: ignore[union-attr]
    return Record(row.index, row.checksum, code, num_prompt, num_completion, dumps(value))


def _result_fields(
    outcome: Completion | RowError, completion: Completion | None, config: OutputConfig
) -> dict[str, Any]:
    """Always the same keys, so that every record of a file has the same shape."""
    samples = completion.samples if completion else []
    fields: dict[str, Any] = {
        "completion": _one_or_list([sample.text for sample in samples]),
        "finish_reason": _one_or_list([sample.finish_reason for sample in samples]),
        "usage": {
            "prompt_tokens": completion.num_prompt_tokens if completion else 0,
            "completion_tokens": completion.num_completion_tokens if completion else 0,
            "cached_tokens": 0,
        },
        "error": {"code": outcome.code, "message": outcome.message} if isinstance(outcome, RowError) else None,
    }
    if config.token_ids:
        fields["token_ids"] = _one_or_list([sample.token_ids for sample in samples])
    return {config.field(name): value for name, value in fields.items()}


def _one_or_list(values: list[Any]) -> Any:
    """What a row of one sample holds plain, a row of several holds as a list; null when there is none."""
    return values if len(values) > 1 else next(iter(values), None)
