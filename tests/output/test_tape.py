"""The tape: what was synced can be read back, cut at any commit, and told from what it was not."""

import contextlib
import gzip
import os
import random
from pathlib import Path

import pyarrow as pa
import pytest

from cbgen.output import tape as tape_module
from cbgen.output.tape import (
    Codec,
    Mark,
    Tape,
    all_lines,
    checksum,
    compress,
    is_intact,
    last_intact_mark,
    note_mark,
    read_lines,
    size_without_zeros,
)

LINES = [b'{"row": %d, "text": "%b"}' % (index, b"x" * (index % 9)) for index in range(20)]
CODECS: list[Codec | None] = [None, "gzip", "zstd"]


@pytest.fixture(params=CODECS, ids=["plain", "gzip", "zstd"])
def codec(request: pytest.FixtureRequest) -> Codec | None:
    found: Codec | None = request.param
    return found


def written(directory: Path, codec: Codec | None, *sizes: int) -> tuple[Path, list[Mark]]:
    """A tape with so many lines in each commit, and the mark after each."""
    path, marks, done = directory / "tape", [], 0
    tape = Tape(path, codec, directory / "marks")
    tape.open(Mark())
    for size in sizes:
        tape.append(LINES[done : done + size])
        marks.append(tape.sync())
        done += size
    tape.close()
    return path, marks


# -- what was written -------------------------------------------------------------------------------------------------


def test_lines_come_back(tmp_path: Path, codec: Codec | None) -> None:
    path, marks = written(tmp_path, codec, 3, 0, 5, 12)

    assert list(all_lines(path, codec)) == LINES
    assert list(read_lines(path, codec, 4)) == LINES[:4]
    assert [mark.rows for mark in marks] == [3, 3, 8, 20]
    assert marks[-1].num_bytes == path.stat().st_size
    assert marks[-1].crc == checksum(path, path.stat().st_size)


@pytest.mark.parametrize("block_bytes", [1, 7, 30, 1 << 20])
def test_lines_come_back_in_blocks_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec | None, block_bytes: int
) -> None:
    monkeypatch.setattr(tape_module, "_BLOCK_BYTES", block_bytes)
    path, marks = written(tmp_path, codec, 20)

    assert list(all_lines(path, codec)) == LINES
    assert checksum(path, marks[0].num_bytes) == marks[0].crc


def test_file_is_one_that_every_tool_reads(tmp_path: Path, codec: Codec | None) -> None:
    path, _ = written(tmp_path, codec, 4, 16)

    data = path.read_bytes()
    whole = {
        None: lambda: data,
        "gzip": lambda: gzip.decompress(data),
        "zstd": lambda: pa.CompressedInputStream(pa.BufferReader(data), "zstd").read(),
    }[codec]()
    assert whole == b"".join(line + b"\n" for line in LINES)


def test_cut_at_any_commit_it_is_whole_and_goes_on(tmp_path: Path, codec: Codec | None) -> None:
    path, marks = written(tmp_path, codec, 5, 5, 5, 5)
    for mark in reversed(marks[:-1]):
        os.truncate(path, mark.num_bytes)
        assert list(all_lines(path, codec)) == LINES[: mark.rows]
    tape = Tape(path, codec)
    tape.open(marks[0])
    tape.append(LINES[5:])
    mark = tape.sync()
    tape.close()

    assert list(all_lines(path, codec)) == LINES
    assert (mark.rows, mark.crc) == (20, checksum(path, mark.num_bytes))


def test_long_commit_ends_frames_so_that_memory_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec | None
) -> None:
    monkeypatch.setattr(tape_module, "_FRAME_BYTES", 60)
    tape = Tape(tmp_path / "tape", codec)
    tape.open(Mark())
    for line in LINES:
        tape.append([line])
        assert tape._pending_bytes < 60
    tape.sync()
    tape.close()

    assert list(all_lines(tmp_path / "tape", codec)) == LINES


def test_same_lines_give_the_same_bytes(codec: Codec | None) -> None:
    assert compress(b"abc" * 100, codec) == compress(b"abc" * 100, codec)


def test_cleared_tape_begins_again(tmp_path: Path, codec: Codec | None) -> None:
    tape = Tape(tmp_path / "tape", codec)
    tape.open(Mark())
    tape.append(LINES[:9])
    tape.sync()
    tape.clear()
    assert tape.mark == Mark()
    tape.append(LINES[9:])
    mark = tape.sync()
    tape.close()

    assert list(all_lines(tmp_path / "tape", codec)) == LINES[9:]
    assert mark.rows == 11


def test_tape_with_fewer_lines_than_it_should_have_is_an_error(tmp_path: Path, codec: Codec | None) -> None:
    path, _ = written(tmp_path, codec, 3)

    with pytest.raises(OSError, match="3 lines, fewer than the 4"):
        list(read_lines(path, codec, 4))
    assert list(read_lines(path, codec, 0)) == []


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_torn_frame_is_an_error_and_not_a_row(tmp_path: Path, codec: Codec) -> None:
    path, marks = written(tmp_path, codec, 5, 15)
    whole = path.read_bytes()
    for size in range(marks[0].num_bytes + 1, marks[1].num_bytes):
        path.write_bytes(whole[:size])
        found: list[bytes] = []
        with contextlib.suppress(OSError):
            found.extend(all_lines(path, codec))
        assert found == LINES[: len(found)]


# -- is it still the same? --------------------------------------------------------------------------------------------


def test_untouched_file_is_intact_without_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, marks = written(tmp_path, None, 5)

    def fail(*_: object) -> int:
        raise AssertionError("read")

    monkeypatch.setattr(tape_module, "checksum", fail)
    assert is_intact(path, marks[0])


def test_every_edit_is_found_by_time_or_checksum(tmp_path: Path) -> None:
    path, marks = written(tmp_path, None, 5)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        os.utime(path, ns=(0, 1))
        assert not is_intact(path, marks[0]), place
    path.write_bytes(data)
    os.utime(path, ns=(0, 1))
    assert is_intact(path, marks[0]), "written again, with the same bytes"
    path.write_bytes(data + b"more")
    assert is_intact(path, marks[0]), "a tail that is not committed"
    path.write_bytes(data[:-1])
    assert not is_intact(path, marks[0])


@pytest.mark.parametrize(("content", "size"), [(b"", 0), (b"\0" * 9, 0), (b"a\0b\0\0", 3), (b"abc", 3)])
@pytest.mark.parametrize("block_bytes", [1, 2, 1 << 20])
def test_size_without_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, size: int, block_bytes: int
) -> None:
    monkeypatch.setattr(tape_module, "_BLOCK_BYTES", block_bytes)
    (tmp_path / "file").write_bytes(content)

    assert size_without_zeros(tmp_path / "file") == size


# -- marks ------------------------------------------------------------------------------------------------------------


def test_longest_mark_that_still_holds_is_found(tmp_path: Path, codec: Codec | None) -> None:
    path, marks = written(tmp_path, codec, 5, 5, 10)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        best = max((mark.rows for mark in marks if mark.num_bytes <= size), default=0)
        assert last_intact_mark(path, tmp_path / "marks", size).rows == best


def test_mark_before_an_edit_holds_and_those_behind_it_do_not(tmp_path: Path) -> None:
    path, marks = written(tmp_path, None, 5, 5, 10)
    data = bytearray(path.read_bytes())
    data[marks[0].num_bytes + 3] ^= 1
    path.write_bytes(bytes(data))

    found = last_intact_mark(path, tmp_path / "marks", len(data))

    assert (found.rows, found.num_bytes) == (5, marks[0].num_bytes)


@pytest.mark.parametrize("seed", range(30))
def test_torn_or_broken_list_of_marks_never_names_rows_that_are_not_there(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path, marks = written(tmp_path, None, *[2] * 10)
    noted = tmp_path / "marks"
    torn = noted.read_bytes()[: rng.randrange(noted.stat().st_size)] + bytes(rng.choice([0, 9]))
    noted.write_bytes(torn)
    for mark in rng.sample(marks, 3):
        note_mark(noted, mark)

    found = last_intact_mark(path, noted, path.stat().st_size)

    assert (found.rows, found.num_bytes, found.crc) in [(m.rows, m.num_bytes, m.crc) for m in [Mark(), *marks]]


def test_mark_behind_a_torn_one_is_not_drawn_into_it(tmp_path: Path) -> None:
    path, marks = written(tmp_path, None, 2, 3)
    (tmp_path / "marks").write_bytes(b"1")  # all that is left of a mark of 15 rows
    note_mark(tmp_path / "marks", marks[1])

    assert last_intact_mark(path, tmp_path / "marks", path.stat().st_size).rows == 5


def test_no_list_of_marks_is_no_mark(tmp_path: Path) -> None:
    path, _ = written(tmp_path, None, 5)

    assert last_intact_mark(path, tmp_path / "none", 100) == Mark()
