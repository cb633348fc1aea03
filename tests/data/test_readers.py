"""Files to rows: forms and compression, positions to resume from, bad rows in their place, whole files refused."""

import contextlib
import gzip
import io
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.data.lines import MAX_LINE_BYTES
from cbgen.data.readers import STDIN, Source, check_inputs, input_fraction, read_rows
from cbgen.errors import BrokenInputError, InputError
from cbgen.records import Position, Row
from tests.fuzzing import fuzz


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def jsonl(first: int, count: int) -> bytes:
    return b"".join(b'{"prompt":"row %d"}\n' % number for number in range(first, first + count))


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def write_parquet(path: Path, count: int, group: int) -> str:
    pq.write_table(pa.table({"prompt": [f"row {number}" for number in range(count)]}), path, row_group_size=group)
    return str(path)


def read(*paths: str, start: Position = Position(), first_index: int = 0) -> list[Row]:
    return list(read_rows(check_inputs(paths), start, first_index))


def rows_before_the_fault(path: str) -> list[Row]:
    """The rows of a file that cannot be read to its end."""
    rows: list[Row] = []

    def keep() -> None:
        for row in read_rows(check_inputs((path,))):
            rows.append(row)

    with pytest.raises(BrokenInputError, match="cannot be read past row"):
        keep()
    return rows


def prompts(rows: list[Row]) -> list[Any]:
    return [row.columns.get("prompt") for row in rows]


def expected(count: int) -> list[str]:
    return [f"row {number}" for number in range(count)]


def parquet_bytes(count: int) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"prompt": [f"row {number}" for number in range(count)]}), buffer, row_group_size=20)
    return buffer.getvalue()


_WHOLE_FILES = {"gz": gzip.compress(jsonl(0, 100)), "zst": zstd(jsonl(0, 100)), "parquet": parquet_bytes(100)}
_PIECES = [
    b"\n",
    b"\r\n",
    b" ",
    b"{}",
    b'{"prompt": "a"}',
    b"[1]",
    b"null",
    b"\xef\xbb\xbf",
    b"PAR1",
    b"\x1f\x8b",
    b"\0",
]


def put_on_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(data))))


# -- forms ------------------------------------------------------------------------------------------------------------


def test_jsonl_gives_one_row_per_line(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "in.jsonl", jsonl(0, 3)))

    assert prompts(rows) == expected(3)
    assert [row.index for row in rows] == [0, 1, 2]
    assert [row.place for row in rows] == [f"in.jsonl line {number}" for number in (1, 2, 3)]


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_compressed_file_of_several_frames_is_read_whole(tmp_path: Path, compress: Any) -> None:
    data = jsonl(0, 100)
    frames = [compress(data[:777]), compress(data[777:1500]), compress(data[1500:])]

    assert prompts(read(write(tmp_path / "in", b"".join(frames)))) == expected(100)


def test_parquet_of_several_row_groups_is_read_in_order(tmp_path: Path) -> None:
    rows = read(write_parquet(tmp_path / "in.parquet", 1000, 300))

    assert prompts(rows) == expected(1000)
    assert rows[-1].place == "in.parquet row 1000"


@pytest.mark.parametrize("name", ["in.jsonl", "in.gz", "in.zst", "in.parquet", "in.txt"])
def test_first_bytes_decide_what_a_file_is_not_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name

    assert prompts(read(write(path, jsonl(0, 3)))) == expected(3)
    assert prompts(read(write(path, gzip.compress(jsonl(0, 3))))) == expected(3)
    assert prompts(read(write(path, zstd(jsonl(0, 3))))) == expected(3)
    assert prompts(read(write_parquet(path, 3, 2))) == expected(3)


@pytest.mark.parametrize("data", [b"", b"\n\n", gzip.compress(b""), b"\xef\xbb\xbf"])
def test_file_without_rows_gives_none(tmp_path: Path, data: bytes) -> None:
    assert read(write(tmp_path / "in", data)) == []


@pytest.mark.parametrize(
    ("name", "what"),
    [("b.parquet", "a Parquet file"), ("b.PQ", "a Parquet file"), ("b.jsonl.gz", "a compressed file"),
     ("b.zst", "a compressed file")],
)  # fmt: skip
@pytest.mark.parametrize("among_shards", [False, True])
def test_file_of_no_bytes_is_refused_where_its_name_says_that_it_has_some(
    tmp_path: Path, name: str, what: str, among_shards: bool
) -> None:
    paths = [write(tmp_path / "a.jsonl", jsonl(0, 2))] * among_shards + [write(tmp_path / name, b"")]

    with pytest.raises(InputError, match=rf"/{name} is empty, not {what}; write or copy it anew"):
        check_inputs(tuple(paths))


def test_files_with_byte_order_marks_that_were_put_together_are_read(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"

    rows = read(write(tmp_path / "in.jsonl", mark * 2 + jsonl(0, 1) + mark + jsonl(1, 1) + mark + b" \n" + mark))

    assert prompts(rows) == expected(2)
    assert [row.checksum for row in rows] == [zlib.crc32(line) for line in jsonl(0, 2).splitlines()]


def test_empty_parquet_gives_no_rows(tmp_path: Path) -> None:
    assert read(write_parquet(tmp_path / "in", 0, 5)) == []


def test_several_files_are_numbered_through(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a.jsonl", jsonl(0, 2)),
        write(tmp_path / "b.jsonl", b"\n"),
        write(tmp_path / "c.gz", gzip.compress(jsonl(2, 2))),
        write(tmp_path / "d.jsonl", jsonl(4, 1)),
    ]

    rows = read(*paths)

    assert prompts(rows) == expected(5)
    assert [row.index for row in rows] == list(range(5))
    assert [row.place for row in rows][2:] == ["c.gz line 1", "c.gz line 2", "d.jsonl line 1"]


def test_row_longer_than_a_block_is_read_whole(tmp_path: Path) -> None:
    long = "x" * (3 << 20)

    rows = read(write(tmp_path / "in.jsonl", json.dumps({"prompt": long}).encode() + b"\n" + jsonl(1, 1)))

    assert prompts(rows) == [long, "row 1"]


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "gzip", "zstd", "parquet"])
def test_reading_from_any_position_gives_the_same_tail(tmp_path: Path, kind: str) -> None:
    data = b"\xef\xbb\xbf\n" + jsonl(0, 3) + b"\r\n \n[1]\n" + jsonl(3, 8).replace(b"\n", b"\r\n") + b'{"prompt": 1}'
    encoders: dict[str, Any] = {"jsonl": bytes, "gzip": gzip.compress, "zstd": zstd}
    paths = []
    for name in ("a", "b"):
        path = tmp_path / name
        paths.append(write_parquet(path, 17, 5) if kind == "parquet" else write(path, encoders[kind](data)))
    rows = read(*paths)

    for k, row in enumerate(rows):
        assert read(*paths, start=row.next_position, first_index=k + 1) == rows[k + 1 :]
    assert len(rows) > 20


def test_parquet_batches_that_straddle_row_groups_resume_exactly(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "in", 1500, 700)
    rows = read(path)
    rng = random.Random(0)

    for k in [0, 255, 256, 699, 700, 701, 1398, 1399, 1400, 1499, *rng.sample(range(1500), 5)]:
        assert read(path, start=rows[k].next_position, first_index=k + 1) == rows[k + 1 :]


def test_position_counts_physical_lines(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "in.jsonl", b"\n\n" + jsonl(0, 1) + b"\n" + jsonl(1, 1)))

    assert [row.next_position.line for row in rows] == [3, 5]


def test_checksum_is_of_the_line_and_changes_with_it(tmp_path: Path) -> None:
    (row,) = read(write(tmp_path / "in.jsonl", b'{"prompt": "a"}\r\n'))
    (same,) = read(write(tmp_path / "in.gz", gzip.compress(b'\n{"prompt": "a"}')))
    (other,) = read(write(tmp_path / "in.jsonl", b'{"prompt": "b"}\n'))

    assert row.checksum == same.checksum == zlib.crc32(b'{"prompt": "a"}')
    assert row.checksum != other.checksum


def test_checksum_of_a_parquet_row_changes_with_any_of_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", "a"], "other": [1, 2]}), path)

    first, second = read(str(path))

    assert first.checksum != second.checksum


# -- bad rows ---------------------------------------------------------------------------------------------------------


def test_bad_rows_become_errors_in_their_place_with_physical_line_numbers(tmp_path: Path) -> None:
    lines = [
        b"",
        b'{"prompt":"row 0"}',
        b"",
        b"{oops}",
        b'{"a":"\xff"}',
        b"[1]",
        b"null",
        b'"x"',
        b'{"prompt":"row 1"}',
    ]

    rows = read(write(tmp_path / "in.jsonl", b"\n".join(lines)))

    assert [row.error and row.error.code for row in rows] == [
        None, "invalid_json", "invalid_utf8", "not_an_object", "not_an_object", "not_an_object", None,
    ]  # fmt: skip
    assert [row.index for row in rows] == list(range(7))
    messages = [row.error.message for row in rows if row.error]
    assert [message.split(": ")[0] for message in messages] == [f"in.jsonl line {n}" for n in (4, 5, 6, 7, 8)]


def test_invalid_utf8_message_names_the_byte(tmp_path: Path) -> None:
    (row,) = read(write(tmp_path / "in.jsonl", b'{"a":"\xff"}\n'))

    assert row.error is not None
    assert "byte 7" in row.error.message


@pytest.mark.parametrize(
    ("end", "says_cut"),
    [(b"\xe4", True), (b"\xe4\xbb", True), (b"\xe4\xbb\n", False), (b"\xe4x", False), (b"\xff", False)],
)
def test_file_that_ends_within_a_character_is_called_cut_off(tmp_path: Path, end: bytes, says_cut: bool) -> None:
    (row,) = read(write(tmp_path / "in.jsonl", b'{"a":"' + end))

    assert row.error is not None
    assert row.error.code == "invalid_utf8"
    assert ("cut off" in row.error.message) is says_cut
    assert ("convert the file" in row.error.message) is not says_cut


def test_not_an_object_message_names_the_kind(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "in.jsonl", b"3\nnull\n"))

    assert [row.error and row.error.message.rsplit(" ", 1)[1] for row in rows] == ["int", "null"]


@pytest.mark.parametrize(("end", "says_cut"), [(b"", True), (b"\n", False)])
def test_bad_last_line_is_called_cut_off_only_without_a_line_end(tmp_path: Path, end: bytes, says_cut: bool) -> None:
    rows = read(write(tmp_path / "in.jsonl", jsonl(0, 1) + b'{"prompt": "a' + end))

    assert rows[1].error is not None
    assert ("cut off" in rows[1].error.message) is says_cut


def test_deeply_nested_row_does_not_end_the_run(tmp_path: Path) -> None:
    deep = b'{"a":' + b"[" * 1010 + b"12345678901234567890" + b"]" * 1010 + b"}\n"

    rows = read(write(tmp_path / "in.jsonl", jsonl(0, 1) + deep + jsonl(1, 1)))

    assert [rows[0].columns["prompt"], rows[2].columns["prompt"]] == expected(2)


def test_parquet_text_that_is_not_utf8_fails_its_row_only(tmp_path: Path) -> None:
    offsets = pa.py_buffer(b"".join(number.to_bytes(4, "little") for number in (0, 1, 2, 3)))
    table = pa.table({"prompt": pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"a\xffc"))})
    pq.write_table(table, tmp_path / "in.parquet")

    rows = read(str(tmp_path / "in.parquet"))

    assert [row.columns.get("prompt") for row in rows] == ["a", None, "c"]
    assert [row.error and row.error.code for row in rows] == [None, "invalid_utf8", None]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")),
        pa.array([1_700_000_000_123_456_789], pa.timestamp("ns", "UTC")),
        pa.array([[1_700_000_000_123_456_789]], pa.list_(pa.timestamp("ns"))),
        pa.array([{"t": 1_700_000_000_123_456_789}], pa.struct([("t", pa.timestamp("ns"))])),
        pa.array([1], pa.duration("ns")),
        pa.array([1], pa.time64("ns")),
        pa.array([10**18], pa.timestamp("us")),  # year 33658
    ],
    ids=lambda array: str(array.type),
)
def test_parquet_value_that_python_has_no_type_for_does_not_end_the_run(tmp_path: Path, array: pa.Array) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "extra": array}), tmp_path / "in.parquet")

    (row,) = read(str(tmp_path / "in.parquet"))

    assert row.columns["prompt"] == "a"


# -- whole files refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
@pytest.mark.parametrize("keep", [0.3, 0.7, 0.98])
def test_torn_compressed_file_is_an_input_error_not_a_short_input(tmp_path: Path, compress: Any, keep: float) -> None:
    whole = compress(jsonl(0, 50)) + compress(jsonl(50, 50))
    path = write(tmp_path / "in", whole[: int(len(whole) * keep)])

    with pytest.raises(InputError, match=r"in: cannot be read past row \d+"):
        read(path)


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_every_cut_of_a_compressed_file_is_noticed(tmp_path: Path, compress: Any) -> None:
    whole = compress(jsonl(0, 20)) + compress(jsonl(20, 20))
    seam = len(compress(jsonl(0, 20)))

    unnoticed = []
    for size in range(2, len(whole)):
        with contextlib.suppress(InputError):
            read(write(tmp_path / "in", whole[:size]))
            unnoticed.append(size)

    assert unnoticed == [seam]


_ZEROS = [bytes(1), bytes(100), bytes(100_000)]


@pytest.mark.parametrize(
    ("compress", "tail"),
    [
        *itertools.product([gzip.compress, zstd], [b"x", b"\n", b"garbage", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\0x"]),
        *itertools.product([zstd], _ZEROS),
    ],
)
def test_anything_behind_a_compressed_file_is_noticed(tmp_path: Path, compress: Any, tail: bytes) -> None:
    path = write(tmp_path / "in", compress(jsonl(0, 2000)) + tail)

    assert prompts(rows_before_the_fault(path)) == expected(2000)


@pytest.mark.parametrize("tail", _ZEROS)
@pytest.mark.parametrize("piped", [False, True])
def test_zero_bytes_behind_gzip_are_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: bytes, piped: bool
) -> None:
    data = gzip.compress(jsonl(0, 2000)) + tail
    put_on_stdin(monkeypatch, data)

    assert prompts(read(STDIN if piped else write(tmp_path / "in", data))) == expected(2000)


@pytest.mark.parametrize(("compress", "margin"), [(gzip.compress, 0), (zstd, 128 << 10)])  # zstd decodes by the block
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize(
    ("count", "split", "lost"), [(2, 1, 4), (50, 4, 6), (40_000, 8, 6000), (40_000, 8, 60_000), (40_000, 39_990, 5)]
)
def test_rows_before_a_tear_are_read_and_the_rest_once_the_file_is_whole(
    tmp_path: Path, compress: Any, margin: int, filled: bool, count: int, split: int, lost: int
) -> None:
    rng = random.Random(count)
    lines = [b'{"prompt":"%b"}\n' % rng.randbytes(9).hex().encode() for _ in range(count)]
    first, second = compress(b"".join(lines[:split])), compress(b"".join(lines[split:]))
    path = write(tmp_path / "in", first + second)
    all_rows = read(path)
    torn = (first + second)[:-lost]
    write(tmp_path / "in", torn.ljust(len(torn) + filled * 100_000, b"\0"))
    left = (len(second) - lost) / len(second) * sum(map(len, lines[split:])) - margin

    found = rows_before_the_fault(path)

    assert found == all_rows[: len(found)]
    assert len(found) >= split + max(0, int(left * 0.98) // len(lines[0]) - 1)
    write(tmp_path / "in", first + second)
    assert read(path, start=found[-1].next_position, first_index=len(found)) == all_rows[len(found) :]


@pytest.mark.parametrize("filled", [False, True])
def test_gzip_that_lost_only_its_checksum_has_all_its_rows(tmp_path: Path, filled: bool) -> None:
    data = gzip.compress(jsonl(0, 1)) + gzip.compress(jsonl(1, 1))

    path = write(tmp_path / "in", data[:-4] + b"\0" * (100 * filled))

    assert prompts(rows_before_the_fault(path)) == expected(2)


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_what_can_be_kept_of_a_torn_pipe_is_kept(monkeypatch: pytest.MonkeyPatch, compress: Any) -> None:
    put_on_stdin(monkeypatch, compress(jsonl(0, 2000)) + compress(jsonl(2000, 1000))[:-1])

    found = rows_before_the_fault(STDIN)

    assert prompts(found) == expected(len(found))
    assert len(found) >= (3000 if compress is gzip.compress else 1750)


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_compressed_file_whose_end_is_zero_bytes_is_noticed(tmp_path: Path, compress: Any) -> None:
    whole = compress(jsonl(0, 2000))

    with pytest.raises(InputError, match="cannot be read past row"):
        read(write(tmp_path / "in", whole[: len(whole) // 2].ljust(len(whole), b"\0")))


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_empty_members_are_no_end(tmp_path: Path, compress: Any) -> None:
    empty = compress(b"")

    assert read(write(tmp_path / "a", empty)) == []
    data = empty + compress(jsonl(0, 3)) + empty + empty + compress(jsonl(3, 3)) + empty
    assert prompts(read(write(tmp_path / "b", data))) == expected(6)


def test_zstd_frames_to_be_skipped_are_skipped(tmp_path: Path) -> None:
    skipped = b"\x5a\x2a\x4d\x18\x04\0\0\0abcd"

    assert prompts(read(write(tmp_path / "in", skipped + zstd(jsonl(0, 3)) + skipped))) == expected(3)


def test_line_that_is_too_long_is_an_error_row_and_its_bytes_are_not_kept(tmp_path: Path) -> None:
    long = b'{"prompt": "' + b"x" * MAX_LINE_BYTES + b'"}\n'
    path = write(tmp_path / "in.jsonl", jsonl(0, 1) + long + jsonl(1, 1))

    first, second, third = read(path)

    assert (first.columns["prompt"], third.columns["prompt"]) == ("row 0", "row 1")
    assert second.error is not None
    assert second.error.code == "line_too_long"
    assert second.error.message == f"in.jsonl line 2: the line has {len(long) - 1:,} bytes, more than 64 MiB"
    assert second.columns == {}
    assert second.checksum == zlib.crc32(long[:-1])
    assert read(path, start=second.next_position, first_index=2) == [third]


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(_PIECES)), max_size=30).map(b"".join))
@fuzz(2000)
def test_any_bytes_give_one_row_per_line_that_is_not_blank(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            rows = read(file.name)
        except InputError:
            return
    if data[:2] in (b"\x1f\x8b", b"\x28\xb5"):
        return
    lines = [re.sub(rb"^(\xef\xbb\xbf)+", b"", line) for line in data.split(b"\n")]

    assert len(rows) == sum(bool(line.strip(b" \t\r\n\v\f")) for line in lines)
    assert [row.index for row in rows] == list(range(len(rows)))
    for row in rows:
        assert (row.error is None) or row.columns == {}


@given(st.binary(max_size=300), st.sampled_from(["gz", "zst", "parquet"]), st.integers(0, 2000))
@fuzz(300)
def test_damaged_files_are_input_errors_and_nothing_else(damage: bytes, kind: str, place: int) -> None:
    whole = _WHOLE_FILES[kind]
    # Arrow itself aborts the process on some damaged footers, so only the pages in front of it are.
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little") if kind == "parquet" else len(whole)
    place %= end
    damage = damage[: end - place]
    data = whole[:place] + damage + whole[place + len(damage) :]
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(InputError):
            read(file.name)


def test_broken_parquet_is_an_input_error(tmp_path: Path) -> None:
    path = Path(write_parquet(tmp_path / "in.parquet", 100, 10))
    path.write_bytes(path.read_bytes()[:-20])

    with pytest.raises(InputError, match="begins like a Parquet file but is not a whole one"):
        read(str(path))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_refused_with_the_way_out(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path / "in.jsonl", '{"prompt": "a"}\n'.encode(encoding))

    with pytest.raises(InputError, match=r"UTF-16.*iconv"):
        check_inputs((path,))


@pytest.mark.parametrize(
    "text",
    [
        b'[{"prompt":"a"},{"prompt":"b"}]',
        b'\xef\xbb\xbf [\n  {"prompt":"a"}\n]\n',
        b'[{"prompt":"a"},\n{"prompt":"b"}]',
    ],
)
def test_json_array_is_refused_with_the_way_out(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(InputError, match=r"JSON array.*jq -c"):
        check_inputs((write(tmp_path / "in.json", text),))


def test_first_line_that_is_a_list_is_a_bad_row_not_a_bad_file(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "in.jsonl", b"[1, 2]\n" + jsonl(1, 1)))

    assert [row.error and row.error.code for row in rows] == ["not_an_object", None]


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*nowhere\.jsonl: No such file"):
        check_inputs((str(tmp_path / "nowhere.jsonl"),))


def test_directory_of_shards_is_one_input(tmp_path: Path) -> None:
    write(tmp_path / "part-10.jsonl", jsonl(4, 2))
    write(tmp_path / "part-2.jsonl", jsonl(0, 2))
    write(tmp_path / "part-3.jsonl", b"")
    write_parquet(tmp_path / "part-4.parquet", 0, 5)
    pq.write_table(pa.table({"other": [1, 2], "prompt": ["row 2", "row 3"]}), tmp_path / "part-5.parquet")

    rows = read(str(tmp_path))

    assert prompts(rows) == expected(6)
    assert [row.place for row in rows][2:5] == ["part-5.parquet row 1", "part-5.parquet row 2", "part-10.jsonl line 1"]


def test_parquet_without_row_groups_is_an_empty_shard(tmp_path: Path) -> None:
    pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("prompt", pa.string())])).close()

    assert read(str(tmp_path)) == []


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([["a"], ["b"], [1]], names=["prompt", "prompt", "n"]), tmp_path / "in.parquet")

    with pytest.raises(InputError, match=r"in\.parquet has two columns named 'prompt'"):
        check_inputs((str(tmp_path / "in.parquet"),))


@pytest.mark.parametrize("kept", [4, 12, 100, 2000])
@pytest.mark.parametrize("filled", [True, False])
def test_parquet_that_lost_its_end_is_refused(tmp_path: Path, kept: int, filled: bool) -> None:
    path = tmp_path / "in.parquet"
    whole = Path(write_parquet(path, 1000, 100)).read_bytes()
    path.write_bytes(whole[:kept].ljust(len(whole) if filled else 0, b"\0"))

    with pytest.raises(InputError, match=r"in\.parquet begins like a Parquet file but is not a whole one"):
        check_inputs((str(path),))


@pytest.mark.parametrize(("start", "end"), [(4, 600), (4, 5000), (3000, 6000)])
def test_parquet_with_a_hole_of_zero_bytes_is_refused(tmp_path: Path, start: int, end: int) -> None:
    path = tmp_path / "in.parquet"
    whole = Path(write_parquet(path, 1000, 50)).read_bytes()
    path.write_bytes(whole[:start] + bytes(end - start) + whole[end:])

    with pytest.raises(InputError, match=r"in\.parquet is a damaged Parquet file: row group \d+ of 20 is zero bytes"):
        check_inputs((str(path),))


# -- stdin ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd])
def test_stdin_is_read_from_its_first_byte(monkeypatch: pytest.MonkeyPatch, compress: Any) -> None:
    put_on_stdin(monkeypatch, compress(jsonl(0, 5000)))

    rows = read(STDIN)

    assert prompts(rows) == expected(5000)
    assert rows[0].place == "stdin line 1"


def test_stdin_resumes_by_skipping_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_stdin(monkeypatch, jsonl(0, 100))
    position = read(STDIN)[60].next_position
    put_on_stdin(monkeypatch, jsonl(0, 100))

    rows = read(STDIN, start=position, first_index=61)

    assert prompts(rows) == expected(100)[61:]
    assert rows[0].place == "stdin line 62"


def test_stdin_twice_is_refused() -> None:
    with pytest.raises(InputError, match="only once"):
        check_inputs((STDIN, STDIN))


def test_parquet_on_stdin_is_read_as_often_as_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Path(write_parquet(tmp_path / "in", 1000, 300)).read_bytes()
    put_on_stdin(monkeypatch, data)
    sources = check_inputs((STDIN,))
    (source,) = sources

    rows = list(read_rows(sources))

    assert prompts(rows) == expected(1000)
    assert rows[-1].place == "stdin row 1000"
    assert list(read_rows(sources, rows[600].next_position, 601)) == rows[601:]
    assert (source.is_stream, source.size, source.length) == (False, len(data), 1000)
    put_on_stdin(monkeypatch, data)
    assert check_inputs((STDIN,))[0].signature() == source.signature()
    write_parquet(tmp_path / "in", 1001, 300)
    put_on_stdin(monkeypatch, (tmp_path / "in").read_bytes())
    assert check_inputs((STDIN,))[0].signature() != source.signature()


def test_spooled_parquet_has_any_number_of_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_stdin(monkeypatch, Path(write_parquet(tmp_path / "in", 3000, 50)).read_bytes())
    sources = check_inputs((STDIN,))
    found: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        found[number] = prompts(list(read_rows(sources)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert list(found.values()) == [expected(3000)] * 4


def test_torn_parquet_on_stdin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_stdin(monkeypatch, Path(write_parquet(tmp_path / "in", 1000, 300)).read_bytes()[:-1])

    with pytest.raises(InputError, match="stdin begins like a Parquet file but is not a whole one"):
        check_inputs((STDIN,))


def test_spooled_parquet_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    put_on_stdin(monkeypatch, Path(write_parquet(tmp_path / "in", 10, 3)).read_bytes())

    sources = check_inputs((STDIN,))

    assert list((tmp_path / "temporary").iterdir()) == []
    assert len(list(read_rows(sources))) == 10


def test_closed_stdin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)

    with pytest.raises(InputError, match="stdin is closed"):
        check_inputs((STDIN,))


def test_stdin_that_is_a_directory_is_refused(tmp_path: Path) -> None:
    code = "from cbgen.data.readers import check_inputs; check_inputs(('-',))"
    directory = os.open(tmp_path, os.O_RDONLY)

    result = subprocess.run([sys.executable, "-c", code], stdin=directory, capture_output=True, text=True, check=False)

    os.close(directory)
    assert "InputError: cannot read stdin" in result.stderr or "init_sys_streams" in result.stderr


def test_stream_is_read_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_stdin(monkeypatch, jsonl(0, 3))
    sources = check_inputs((STDIN,))

    assert sources[0].is_stream
    assert len(list(read_rows(sources))) == 3
    with pytest.raises(InputError, match="only once"):
        list(read_rows(sources))


def test_first_row_of_a_slow_writer_comes_before_the_second_is_written() -> None:
    reading, writing = os.pipe()
    os.write(writing, jsonl(0, 1))

    rows = read_rows(check_inputs((f"/dev/fd/{reading}",)))
    first = next(rows)
    os.write(writing, jsonl(1, 5000)[:40000])
    os.close(writing)
    rest = list(rows)
    os.close(reading)

    assert first.columns["prompt"] == "row 0"
    assert rest[0].columns["prompt"] == "row 1"


def on_a_pipe(path: Path, data: bytes) -> str:
    """A named pipe that somebody writes into, a few bytes at a time at first."""
    os.mkfifo(path)

    def work() -> None:
        with path.open("wb", buffering=0) as pipe, contextlib.suppress(BrokenPipeError):
            for block in (data[:2], data[2:5], data[5:]):
                pipe.write(block)

    threading.Thread(target=work, daemon=True).start()
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "gzip", "zstd", "parquet"])
def test_pipe_of_any_kind_is_opened_once_and_read_whole(tmp_path: Path, kind: str) -> None:
    data = Path(write_parquet(tmp_path / "in", 5000, 700)).read_bytes() if kind == "parquet" else jsonl(0, 5000)
    encoders: dict[str, Any] = {"gzip": gzip.compress, "zstd": zstd}
    path = on_a_pipe(tmp_path / "pipe", encoders.get(kind, bytes)(data))
    sources = check_inputs((path,))

    assert sources[0].is_stream is (kind != "parquet")
    assert prompts(list(read_rows(sources))) == expected(5000)
    assert input_fraction(sources, Position()) in (None, 0)


def test_pipe_of_few_bytes_is_read(tmp_path: Path) -> None:
    assert prompts(read(on_a_pipe(tmp_path / "a", b'{"prompt":"row 0"}'))) == expected(1)
    assert read(on_a_pipe(tmp_path / "b", b"")) == []
    assert read(on_a_pipe(tmp_path / "c", b"\n")) == []
    assert read("/dev/null") == []


def test_pipe_twice_is_refused(tmp_path: Path) -> None:
    path = on_a_pipe(tmp_path / "pipe", b"")

    with pytest.raises(InputError, match="is a pipe, which can be read only once"):
        check_inputs((path, path))


@pytest.mark.parametrize("text", [b'[{"prompt":"a"}]', '{"prompt":"a"}'.encode("utf-16")])
def test_stdin_is_checked_like_a_file(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    put_on_stdin(monkeypatch, text)

    with pytest.raises(InputError, match="convert it"):
        check_inputs((STDIN,))


# -- how far ----------------------------------------------------------------------------------------------------------


def test_input_fraction_grows_from_zero_to_one(tmp_path: Path) -> None:
    paths = (
        write(tmp_path / "a", jsonl(0, 10)),
        write_parquet(tmp_path / "b", 10, 3),
        write(tmp_path / "c", jsonl(0, 9)),
    )
    sources = check_inputs(paths)

    fractions = [input_fraction(sources, row.next_position) for row in read_rows(sources)]

    assert input_fraction(sources, Position()) == 0
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1


def test_input_fraction_of_a_compressed_file_or_stdin_is_unknown(tmp_path: Path) -> None:
    path = write(tmp_path / "in.gz", gzip.compress(jsonl(0, 10)))

    assert input_fraction(check_inputs((path,)), Position()) is None
    assert input_fraction([Source(STDIN, "jsonl")], Position()) is None


def test_signature_changes_when_the_file_does(tmp_path: Path) -> None:
    (source,) = check_inputs((write(tmp_path / "in", jsonl(0, 2)),))
    before = source.signature()

    assert source.signature() == before
    write(tmp_path / "in", jsonl(0, 3))
    assert source.signature() != before


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "width", "dictionary"), [(150_000, 1000, False), (2000, 2 << 20, True)])
def test_row_group_of_any_size_is_read_in_bounded_memory(
    tmp_path: Path, num_rows: int, width: int, dictionary: bool
) -> None:
    rng = random.Random(0)
    texts = [rng.randbytes(width // 2).hex() for _ in range(4 if dictionary else num_rows)]
    table = pa.table({"prompt": texts})
    if dictionary:
        indices = pa.array([number % 4 for number in range(num_rows)], pa.int8())
        table = pa.table({"prompt": pa.DictionaryArray.from_arrays(indices, pa.array(texts))})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=10**9, store_schema=False)
    code = (
        "import resource; from cbgen.data.readers import check_inputs, read_rows\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"print(sum(1 for _ in read_rows(check_inputs(({str(tmp_path / 'in.parquet')!r},)))))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    count, growth = map(int, result.stdout.split())
    assert count == num_rows
    assert growth < 200 << 10
