"""Bytes to lines to JSON and back: the one splitter and the one codec that every reader and writer uses.

A line ends at LF and nowhere else: U+2028, U+0085 and a bare CR are content. One CR before the LF belongs to the line
end. UTF-8 byte order marks at the start of a line are not content: files that have one were put together. Lines of
blanks are no rows, but they count as lines.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 64 << 20
_BLANK = b" \t\r\n\v\f"
_MAX_DEPTH = 250  # what orjson can write
_LONG_NUMBER = re.compile(rb"\d{16}")  # orjson turns integers beyond 64 bits into floats, silently


@dataclass(slots=True)
class Line:
    """One non-blank line. `number` is physical, from 1; `end` is the byte offset just past its line end.

    Attributes:
        num_dropped: bytes of a line that is too long; its `data` is empty.
        checksum: CRC-32 of what was dropped.
    """

    data: bytes
    number: int
    end: int
    terminated: bool
    num_dropped: int = 0
    checksum: int = 0


def split_lines(
    blocks: Iterable[bytes], offset: int = 0, number: int = 0, max_bytes: int = MAX_LINE_BYTES
) -> Iterator[Line]:
    """Cut blocks of any size into lines.

    Args:
        blocks: consecutive bytes of a file, from `offset` on.
        offset: bytes of the file before the first block.
        number: lines before the first block.
        max_bytes: the content of a longer line is not kept.
    """
    begun = _Begun(max_bytes)
    for block in blocks:
        first, *others = block.split(b"\n")
        begun.add(first)
        for following in others:
            number += 1
            offset += begun.size + 1
            line = begun.end(number, offset, terminated=True)
            if line is not None:
                yield line
            begun.restart(following)
    line = begun.end(number + 1, offset + begun.size, terminated=False)
    if line is not None:
        yield line


class _Begun:
    """A line whose end is not read yet. Past the limit, only what is needed to report it."""

    __slots__ = ("_checksum", "_is_blank", "_max_bytes", "_parts", "size")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.restart(b"")

    def restart(self, data: bytes) -> None:
        self.size = len(data)
        self._parts = [data]
        self._checksum = 0
        self._is_blank = True
        if self.size > self._max_bytes:
            self._drop()

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self._parts.append(data)
        if self.size > self._max_bytes:
            self._drop()

    def _drop(self) -> None:
        for part in self._parts:
            self._checksum = zlib.crc32(part, self._checksum)
            self._is_blank = self._is_blank and not part.strip(_BLANK)
        self._parts = []

    def end(self, number: int, end: int, *, terminated: bool) -> Line | None:
        """The line up to byte `end`; None if it is blank."""
        if self.size > self._max_bytes:
            return None if self._is_blank else Line(b"", number, end, terminated, self.size, self._checksum)
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        content = without_marks(data).removesuffix(b"\r")
        return Line(content, number, end, terminated) if content.strip(_BLANK) else None


def without_marks(data: bytes) -> bytes:
    """The data from behind the byte order marks that it begins with."""
    while data.startswith(BYTE_ORDER_MARK):
        data = data[len(BYTE_ORDER_MARK) :]
    return data


def loads(data: bytes) -> Any:
    """Strict JSON; integers of any size stay exact, the last of duplicate keys wins.

    Raises:
        ValueError: not valid JSON (NaN and Infinity are not), not UTF-8, or nested too deeply to be written again.
    """
    value = orjson.loads(data)
    if data.count(b"[") + data.count(b"{") > _MAX_DEPTH and _depth(value) > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
    if _LONG_NUMBER.search(data):
        value = json.loads(data)
    return value


def dumps(value: Any) -> bytes:
    """One line of compact JSON, UTF-8, without line end; NaN and Infinity become null.

    Types that JSON lacks are written as strings: decimals in digits, bytes in base64, durations in their usual form.
    """
    try:
        return orjson.dumps(value, default=_as_json, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # an integer beyond 64 bits
        return orjson.dumps(_spelled_out(value), default=_as_json, option=orjson.OPT_NON_STR_KEYS)


def _depth(value: Any) -> int:
    """How deeply objects and arrays are nested; without recursion, which is what deep values break."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def _spelled_out(value: Any) -> Any:
    """The same value with integers beyond 64 bits as ready-made digits."""
    if isinstance(value, dict):
        return {key: _spelled_out(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled_out(item) for item in value]
    if type(value) is int and not -(2**63) <= value < 2**64:
        return orjson.Fragment(str(value))
    return value


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")
