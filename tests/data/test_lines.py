"""Splitting bytes into lines against a naive twin, and the JSON codec's promises."""

import base64
import datetime
import decimal
import itertools
import json
import math
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.data.lines import BYTE_ORDER_MARK, Line, dumps, loads, split_lines
from tests.fuzzing import fuzz

_PIECES = [
    b"a",
    b"\xef\xbb\xbf",
    "\u2028".encode(),
    "\u0085".encode(),
    b"\r",
    b"\n",
    b"\r\n",
    b" ",
    b"\t",
    b"{}",
    b"\v",
]


def random_bytes(seed: int) -> bytes:
    rng = random.Random(seed)
    mark = BYTE_ORDER_MARK if rng.random() < 0.3 else b""
    return mark + b"".join(rng.choices(_PIECES, k=rng.randrange(40)))


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    """The data in blocks of random sizes, empty ones among them."""
    blocks = []
    while data:
        size = rng.randrange(6)
        blocks.append(data[:size])
        data = data[size:]
    return blocks


def naive_lines(data: bytes) -> list[Line]:
    """Byte by byte, with nothing clever."""
    lines: list[Line] = []
    start, number = 0, 0
    while start < len(data):
        end = start
        while end < len(data) and data[end] != 0x0A:
            end += 1
        terminated = end < len(data)
        content = data[start:end]
        while content[:3] == BYTE_ORDER_MARK:
            content = content[3:]
        if content[-1:] == b"\r":
            content = content[:-1]
        number += 1
        start = end + terminated
        if any(byte not in b" \t\r\n\v\f" for byte in content):
            lines.append(Line(content, number, start, terminated))
    return lines


@pytest.mark.parametrize("seed", range(300))
def test_split_lines_equals_the_naive_twin_however_the_blocks_are_cut(seed: int) -> None:
    data = random_bytes(seed)
    blocks = cut(data, random.Random(seed + 1))

    assert list(split_lines(blocks)) == naive_lines(data)


@pytest.mark.parametrize("seed", range(100))
def test_splitting_from_the_end_of_any_row_gives_the_rest_identically(seed: int) -> None:
    data = random_bytes(seed)
    lines = list(split_lines([data]))

    for k, line in enumerate(lines):
        rest = split_lines(cut(data[line.end :], random.Random(seed)), line.end, line.number)
        assert list(rest) == lines[k + 1 :]


@given(st.lists(st.one_of(st.binary(max_size=8), st.sampled_from(_PIECES)), max_size=30).map(b"".join), st.data())
@fuzz(2000)
def test_any_bytes_in_any_blocks_are_split_like_the_naive_twin(data: bytes, draw: st.DataObject) -> None:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=8)))
    blocks = [data[start:end] for start, end in itertools.pairwise([0, *cuts, len(data)])]

    assert list(split_lines(blocks)) == naive_lines(data)


@pytest.mark.parametrize("seed", range(100))
def test_lines_past_the_limit_are_dropped_however_the_blocks_are_cut(seed: int) -> None:
    data = random_bytes(seed).replace(BYTE_ORDER_MARK, b"")
    limit = 6
    expected = []
    for line in naive_lines(data):
        raw = data[: line.end].removesuffix(b"\n") if line.terminated else data[: line.end]
        raw = raw[raw.rfind(b"\n") + 1 :]
        too_long = Line(b"", line.number, line.end, line.terminated, len(raw), zlib.crc32(raw))
        expected.append(too_long if len(raw) > limit else line)

    assert list(split_lines(cut(data, random.Random(seed)), max_bytes=limit)) == expected
    assert list(split_lines([data], max_bytes=limit)) == expected


def test_crlf_belongs_to_the_line_end() -> None:
    lines = list(split_lines([b'{"a":1}\r\n{"a":2}\r\n']))

    assert [line.data for line in lines] == [b'{"a":1}', b'{"a":2}']


def test_only_one_carriage_return_belongs_to_the_line_end() -> None:
    assert next(split_lines([b"a\r\r\n"])).data == b"a\r"


def test_byte_order_marks_are_dropped_at_the_start_of_any_line_only() -> None:
    mark = BYTE_ORDER_MARK
    lines = list(split_lines([mark + b"1\n" + 2 * mark + b"2" + mark + b"\n" + mark + b" \r\n" + 2 * mark]))

    assert [(line.data, line.number) for line in lines] == [(b"1", 1), (b"2" + mark, 2)]


def test_byte_order_mark_that_is_cut_over_blocks_is_dropped() -> None:
    assert next(split_lines([b"\xef", b"\xbb", b"\xbf1\n"])).data == b"1"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\r", "\v", "\f", "\x1c"])
def test_other_separators_are_content(separator: str) -> None:
    data = f'{{"a":"x{separator}y"}}'.encode()

    assert [line.data for line in split_lines([data + b"\n"])] == [data]


def test_blank_lines_are_counted_but_are_no_rows() -> None:
    lines = list(split_lines([b"\n1\n \t\r\n\n2\n\n"]))

    assert [(line.data, line.number) for line in lines] == [(b"1", 2), (b"2", 5)]


def test_last_line_without_line_end_is_a_row_and_says_so() -> None:
    lines = list(split_lines([b"1\n2"]))

    assert [line.terminated for line in lines] == [True, False]
    assert lines[-1].end == 3


def test_no_bytes_are_no_lines() -> None:
    assert list(split_lines([])) == []
    assert list(split_lines([b"", b""])) == []


# -- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**40, 123456789012345678])
def test_integers_of_any_size_survive_a_round_trip(number: int) -> None:
    value = loads(b'{"a":%d}' % number)

    assert value == {"a": number}
    assert type(value["a"]) is int
    assert dumps(value) == b'{"a":%d}' % number


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_written_as_null(number: float) -> None:
    assert dumps({"a": [number]}) == b'{"a":[null]}'


def test_nan_is_null_beside_an_integer_beyond_64_bits_too() -> None:
    assert dumps({"a": 2**70, "b": math.nan}) == b'{"a":%d,"b":null}' % 2**70


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"[-Infinity,12345678901234567890]", b"[1e999]"])
def test_nan_and_infinity_are_not_read(text: bytes) -> None:
    with pytest.raises(ValueError, match="line 1 column"):
        loads(text)


@pytest.mark.parametrize("other", [b"1", b"12345678901234567890123"])
def test_last_of_duplicate_keys_wins(other: bytes) -> None:
    assert loads(b'{"a":%b,"a":2}' % other) == {"a": 2}


@pytest.mark.parametrize("tail", [b"", b",12345678901234567890123"])
@pytest.mark.parametrize("escape", [b"\\ud800", b"\\udc00", b"\\ud800x", b"\\ud800\\ud800"])
def test_lone_surrogate_is_refused(escape: bytes, tail: bytes) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        loads(b'["%b"%b]' % (escape, tail))


def test_surrogate_pair_is_one_character() -> None:
    assert loads(b'"\\ud83d\\ude00"') == "\U0001f600"


@pytest.mark.parametrize("text", [b'"\xff"', b'["\xc3", 12345678901234567890]', b"\xff"])
def test_invalid_utf8_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"UTF-8|utf-8"):
        loads(text)


@pytest.mark.parametrize("depth", [100, 500, 900, 1000, 1020, 5000])
@pytest.mark.parametrize("core", [b"1", b"12345678901234567890"])
def test_deep_nesting_is_read_or_is_a_value_error(depth: int, core: bytes) -> None:
    try:
        value = loads(b"[" * depth + core + b"]" * depth)
    except ValueError:
        return
    for _ in range(depth):
        value = value[0]
    assert value == int(core)


@pytest.mark.parametrize("depth", [100, 300, 900, 1000])
def test_whatever_nesting_is_read_can_be_written(depth: int) -> None:
    data = b"[" * depth + b"1" + b"]" * depth
    try:
        value = loads(data)
    except ValueError:
        return

    assert dumps(value) == data


@pytest.mark.parametrize("neighbour", [1, 2**70])
def test_types_that_json_lacks_are_written_as_strings(neighbour: int) -> None:
    value = {
        "decimal": decimal.Decimal("1.20"),
        "bytes": b"\xff\x00",
        "duration": datetime.timedelta(days=1, seconds=2),
        "date": datetime.date(2024, 1, 2),
        "time": datetime.time(3, 4, 5),
        "neighbour": neighbour,
    }

    written = json.loads(dumps(value))

    assert written["decimal"] == "1.20"
    assert base64.b64decode(written["bytes"]) == b"\xff\x00"
    assert written["duration"] == "1 day, 0:00:02"
    assert (written["date"], written["time"]) == ("2024-01-02", "03:04:05")


@pytest.mark.parametrize("neighbour", [1, 2**70])
def test_a_moment_is_written_the_same_whatever_stands_beside_it(neighbour: int) -> None:
    moment = datetime.datetime(2024, 1, 2, 3, 4, 5)

    assert json.loads(dumps([moment, neighbour]))[0] == "2024-01-02T03:04:05"


def test_unknown_types_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="object"):
        dumps({"a": object()})


def test_text_is_written_as_utf8_on_one_line() -> None:
    assert dumps({"a": "é\u2028\n"}) == '{"a":"é\u2028\\n"}'.encode()
