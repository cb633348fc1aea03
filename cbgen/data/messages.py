"""Chats as templates want them: messages checked and cleaned, tools, and text that Parquet keeps as bytes or as JSON.

Enters: values of a row's columns. Leaves: the same in plain JSON types, or a `RowFailure` that names the column and
the item in it. Arrow gives every object every key that one of them has; null ones are dropped, whatever their depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cbgen.data.lines import loads
from cbgen.errors import RowFailure

_TYPE_NAMES = {
    "str": "text", "bytes": "bytes", "dict": "an object", "list": "a list", "bool": "a boolean",
    "int": "a number", "float": "a number with a point", "NoneType": "null",
}  # fmt: skip


def check_messages(value: Any, column: str, place: str) -> list[dict[str, Any]]:
    """A chat, cleaned: null keys dropped, text parts joined by newlines.

    Raises:
        RowFailure: not a non-empty list of {role, content} objects.
    """

    chat = _Chat(column, place)
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else type(value).__name__
        raise chat.failure(f"must be a non-empty list of messages, not {kind}")
    return [chat.message(message, number) for number, message in enumerate(value)]


def check_tools(value: Any, place: str) -> list[dict[str, Any]]:
    """The tools that a chat may use, cleaned: a list of objects, or JSON text of one.

    Raises:
        RowFailure: it is neither.
    """
    tools = _from_json(value)
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        kind = _not_json_name(tools)
        if isinstance(tools, list):
            kind = f"a list that holds {type_name(next(tool for tool in tools if not isinstance(tool, dict)))}"
        message = f"{place}: tools of a chat must be a list of objects, or JSON text of one, not {kind}"
        raise RowFailure("invalid_params", message)
    return list(decoded(without_nulls(tools), "tools", place))


def check_template_variables(value: Any, place: str) -> dict[str, Any]:
    """A row's own variables for the chat template: an object, or JSON text of one; null ones are dropped.

    Raises:
        RowFailure: it is neither.
    """
    variables = _from_json(value)
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        message = "chat_template_kwargs must be an object, or JSON text of one"
        raise RowFailure("invalid_params", f"{place}: {message}, not {_not_json_name(variables)}")
    given = {name: item for name, item in variables.items() if item is not None}
    return dict(decoded(given, "chat_template_kwargs", place))


def without_nulls(value: Any) -> Any:
    """A value whose objects, at any depth, have no null items; lists keep theirs."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def decoded(value: Any, column: str, place: str) -> Any:
    """A value with text in place of bytes, at any depth: some writers of Parquet mark no column as text.

    Raises:
        RowFailure: bytes are no text.
    """

    def refuse(error: UnicodeDecodeError) -> Any:
        message = f"{place}: {column!r} holds bytes that are not valid UTF-8 (at byte {error.start + 1})"
        raise RowFailure("invalid_utf8", message) from error

    return decode_bytes(value, refuse)


def decode_bytes(value: Any, instead: Callable[[UnicodeDecodeError], Any]) -> Any:
    """A value with text in place of bytes, at any depth, and `instead` of those that are no text."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            return instead(error)
    if isinstance(value, dict):
        return {key: decode_bytes(item, instead) for key, item in value.items()}
    return [decode_bytes(item, instead) for item in value] if isinstance(value, list) else value


def type_name(value: Any) -> str:
    """What a value is, in words for people who write JSON."""
    kind = type(value).__name__
    return _TYPE_NAMES.get(kind, kind)


@dataclass(frozen=True, slots=True)
class _Chat:
    """Checks the messages of one row."""

    column: str
    place: str

    def failure(self, problem: str) -> RowFailure:
        return RowFailure("invalid_messages", f"{self.place}: {self.column!r} {problem}")

    def message(self, message: Any, number: int) -> dict[str, Any]:
        if not isinstance(message, dict):
            kind = type(message).__name__
            raise self.failure(f"item {number} must be an object with role and content, not {kind}")
        kept = without_nulls({key: item for key, item in message.items() if key != "content"})
        kept = decoded(kept, self.column, self.place)
        if not isinstance(kept.get("role"), str):
            raise self.failure(f"item {number} has no role")
        content = message.get("content")
        if content is None and "tool_calls" not in kept:
            raise self.failure(f"item {number} has no content")
        kept["content"] = "" if content is None else self._content(content, number)
        return dict(kept)

    def _content(self, content: Any, number: int) -> str:
        if isinstance(content, str | bytes):
            return str(decoded(content, self.column, self.place))
        if not isinstance(content, list):
            raise self.failure(f"item {number} has content of type {type(content).__name__}; it must be text")
        return "\n".join(self._part(part, number) for part in content)

    def _part(self, part: Any, number: int) -> str:
        kind, text = type(part).__name__, part
        if isinstance(part, dict):
            text = part.get("text")
            kind = decoded(part.get("type"), self.column, self.place)
            if kind not in ("text", None):
                text = None
        if not isinstance(text, str | bytes):
            raise self.failure(f"item {number} has a content part of type {kind!r}; only text parts can be used")
        return str(decoded(text, self.column, self.place))


def _from_json(value: Any) -> Any:
    """What JSON text holds, since Parquet has no type for objects of any keys; other values as they are."""
    if not isinstance(value, str | bytes):
        return value
    try:
        return loads(value if isinstance(value, bytes) else value.encode("utf-8"))
    except ValueError:
        return value


def _not_json_name(value: Any) -> str:
    return "other text" if isinstance(value, str | bytes) else type_name(value)
