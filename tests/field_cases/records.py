"""Output lines to what the cases compare. Native records and OpenAI Batch answers end in the same `Answer`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COMPARED = ("text", "texts", "finish", "prompt_tokens", "completion_tokens", "custom_id")


@dataclass(frozen=True, slots=True)
class Answer:
    """One output line.

    Attributes:
        raw: the line itself, parsed.
        texts: of a row with several samples, or of a Batch answer; else None.
        message: the whole error as JSON text; empty without one.
    """

    raw: dict[str, Any]
    custom_id: Any
    ok: bool
    text: str | None
    texts: list[str | None] | None
    finish: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    message: str


def read_answers(path: Path) -> list[Answer]:
    """All lines of an output.

    Raises:
        ValueError: a line is not strict JSON, or the last one has no line end.
    """
    *lines, rest = path.read_bytes().split(b"\n")
    if rest:
        raise ValueError("no final newline")
    return [parse_answer(line) for line in lines]


def parse_answer(line: bytes) -> Answer:
    """One line; NaN and Infinity are refused.

    Raises:
        ValueError: not strict JSON.
    """
    record = json.loads(line, parse_constant=_refuse_constant)
    error = _first(record, "error", "response.body.error")
    texts = _texts(record)
    text = record["completion"] if isinstance(record.get("completion"), str) else (texts[0] if texts else None)
    finish = _first(record, "finish_reason", "response.body.choices.0.finish_reason")
    return Answer(
        raw=record,
        custom_id=record.get("custom_id"),
        ok=not error,
        text=text,
        texts=texts,
        finish=finish[0] if isinstance(finish, list) and finish else finish,
        prompt_tokens=_first(record, "usage.prompt_tokens", "response.body.usage.prompt_tokens"),
        completion_tokens=_first(record, "usage.completion_tokens", "response.body.usage.completion_tokens"),
        message=json.dumps(error, ensure_ascii=False) if error else "",
    )


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"bare {name} in the output")


def _texts(record: dict[str, Any]) -> list[str | None] | None:
    if "completion" in record:
        return record["completion"] if isinstance(record["completion"], list) else None
    choices = _first(record, "response.body.choices") or []
    return [_first(choice, "text", "message.content") for choice in choices]


def _first(value: Any, *paths: str) -> Any:
    """The value under the first dotted path that leads somewhere; None when none does."""
    return next((found for path in paths if (found := _at(value, path.split("."))) is not None), None)


def _at(value: Any, keys: list[str]) -> Any:
    for key in keys:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def difference(expected: dict[str, Any], answer: Answer) -> str | None:
    """In what an answer differs from one of its allowed forms; None when it does not."""
    if expected["ok"] != answer.ok:
        wanted = "an answer" if expected["ok"] else f"error {expected['code']}"
        return f"expected {wanted}, got {answer.message or repr(answer.text)}"
    says = expected.get("says") if not expected["ok"] else None
    if says and not any(part.lower() in answer.message.lower() for part in says):
        return f"the error says none of {says}: {answer.message}"
    for name in _COMPARED:
        if name in expected and getattr(answer, name) != expected[name]:
            return f"{name}: expected {expected[name]!r}, got {getattr(answer, name)!r}"
    for name, value in expected.get("keep", {}).items():
        found = answer.raw.get(name)
        if found != value or type(found) is not type(value):
            return f"column {name}: expected {value!r}, got {found!r}"
    return None
