"""Bytes to lines to JSON and back: the one splitter and the one codec that every reader and writer uses.

A line ends at LF and nowhere else: U+2028, U+0085 and a bare CR are content. One CR before the LF belongs to the line
end. A UTF-8 byte order mark at the start of a file is not content. Lines of blanks are no rows, but they count as
lines.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n\v\f"
_LONG_NUMBER = re.compile(rb"\d{16}")  # orjson turns integers beyond 64 bits into floats, silently


@dataclass(slots=True)
class Line:
    """One non-blank line. `number` is physical, from 1; `end` is the byte offset just past its line end."""

    data: bytes
    number: int
    end: int
    terminated: bool


def split_lines(blocks: Iterable[bytes], offset: int = 0, number: int = 0) -> Iterator[Line]:
    """Cut blocks of any size into lines.

    Args:
        blocks: consecutive bytes of a file, from `offset` on.
        offset: bytes of the file before the first block.
        number: lines before the first block.
    """
    parts: list[bytes] = []  # of the line begun in earlier blocks
    for block in blocks:
        parts.append(block)
        if b"\n" not in block:
            continue
        *complete, rest = b"".join(parts).split(b"\n")
        parts = [rest]
        for data in complete:
            number += 1
            start, offset = offset, offset + len(data) + 1
            content = _content(data, start)
            if content.strip(_BLANK):
                yield Line(content, number, offset, True)
    rest = b"".join(parts)
    content = _content(rest, offset)
    if content.strip(_BLANK):
        yield Line(content, number + 1, offset + len(rest), False)


def _content(data: bytes, offset: int) -> bytes:
    if offset == 0 and data.startswith(BYTE_ORDER_MARK):
        data = data[len(BYTE_ORDER_MARK) :]
    return data.removesuffix(b"\r")


def loads(data: bytes) -> Any:
    """Strict JSON; integers of any size stay exact, the last of duplicate keys wins.

    Raises:
        ValueError: not valid JSON (NaN and Infinity are not), or not valid UTF-8.
    """
    value = orjson.loads(data)
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
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_as_json).encode()


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, decimal.Decimal | datetime.timedelta | datetime.date | datetime.time):
        return str(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")
