"""The tape: an append-only file of output lines, of which a known prefix is committed.

Enters: lines in input order. Leaves: a file whose first `num_bytes` bytes are safe once `sync` returned. It is the
output itself (JSONL), or stands in the sidecar directory until its rows are moved to a part or a Parquet file. With a
codec each commit is one gzip member or zstd frame, so that cutting at a commit leaves a whole file.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal

import pyarrow as pa

from cbgen.output.places import sync_directory

Codec = Literal["gzip", "zstd"]
_BLOCK_BYTES = 1 << 20
_FRAME_BYTES = 8 << 20  # uncompressed; a frame ends here even before the commit, so that memory stays bounded


@dataclass(frozen=True, slots=True)
class Mark:
    """A prefix of a tape.

    Attributes:
        rows: lines in it.
        num_bytes, crc: its size on disk and the CRC-32 of those bytes.
        mtime_ns: when the file was last written, as far as its owner knows.
    """

    rows: int = 0
    num_bytes: int = 0
    crc: int = 0
    mtime_ns: int = 0


class Tape:
    """Appends lines; `sync` makes them safe.

    Args:
        path: the file.
        codec: None for plain lines.
        marks: file in which every synced mark is noted, to repair a tape that was cut short.
    """

    def __init__(self, path: Path, codec: Codec | None = None, marks: Path | None = None) -> None:
        self.path = path
        self.codec = codec
        self.mark = Mark()
        self._marks = marks
        self._file = -1
        self._pending: list[bytes] = []  # of a frame that is not written yet
        self._pending_bytes = 0
        self._noted = 0  # size at the last mark

    def open(self, mark: Mark) -> None:
        """Go on behind `mark`; the file was already cut to it."""
        self.mark = mark
        self._noted = mark.num_bytes
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sync_directory(self.path.parent)  # or a power cut takes a new file away with everything in it

    def append(self, lines: list[bytes]) -> None:
        """Write lines, each without its line end; none at all still make an empty file a readable one."""
        if not lines and (self.mark.num_bytes or self._pending):
            return
        data = b"".join([line + b"\n" for line in lines])
        if self.codec is None:
            self._write(data)
        else:
            self._pending.append(data)
            self._pending_bytes += len(data)
            if self._pending_bytes >= _FRAME_BYTES:
                self._end_frame()
        self.mark = replace(self.mark, rows=self.mark.rows + len(lines))

    def sync(self) -> Mark:
        """Make everything appended survive a power cut; the mark that is safe now."""
        self._end_frame()
        os.fsync(self._file)
        mark = self.mark = replace(self.mark, mtime_ns=os.stat(self._file).st_mtime_ns)
        if self._marks is not None and mark.num_bytes != self._noted:
            note_mark(self._marks, mark)
            self._noted = mark.num_bytes
        return mark

    def clear(self) -> None:
        """Empty the tape: its rows are safe elsewhere."""
        os.truncate(self._file, 0)
        self.mark = Mark()
        self._noted = 0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _end_frame(self) -> None:
        if self._pending:
            data = b"".join(self._pending)
            self._pending, self._pending_bytes = [], 0
            self._write(compress(data, self.codec))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        mark = self.mark
        self.mark = replace(mark, num_bytes=mark.num_bytes + len(data), crc=zlib.crc32(data, mark.crc))


def write_tape(path: Path, codec: Codec | None, lines: Iterable[bytes]) -> Mark:
    """A whole tape, synced."""
    path.unlink(missing_ok=True)
    tape = Tape(path, codec)
    tape.open(Mark())
    try:
        batch: list[bytes] = []
        for line in lines:
            batch.append(line)
            if len(batch) == 1024:
                tape.append(batch)
                batch = []
        tape.append(batch)
        return tape.sync()
    finally:
        tape.close()


def compress(data: bytes, codec: Codec | None) -> bytes:
    """One whole gzip member or zstd frame; the same bytes for the same data."""
    if codec is None:
        return data
    if codec == "gzip":
        return gzip.compress(data, compresslevel=6, mtime=0)
    frame: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return frame


@contextlib.contextmanager
def open_lines(path: Path, codec: Codec | None) -> Iterator[IO[bytes]]:
    """A tape's text as a stream; one that ends in the middle of a frame raises OSError when read that far."""
    with path.open("rb") as raw:
        yield raw if codec is None else pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)


def read_lines(path: Path, codec: Codec | None, num_rows: int) -> Iterator[bytes]:
    """The first `num_rows` lines, each without its end.

    Raises:
        OSError: there are fewer.
    """
    count = 0
    for line in itertools.islice(all_lines(path, codec) if num_rows else (), num_rows):
        yield line
        count += 1
    if count < num_rows:
        raise OSError(f"{path} has {count} lines, fewer than the {num_rows} it should have")


def all_lines(path: Path, codec: Codec | None) -> Iterator[bytes]:
    """Every line, without its end."""
    rest = b""
    with open_lines(path, codec) as stream:
        while block := stream.read(_BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines


def note_mark(path: Path, mark: Mark) -> None:
    """Add a mark to the list; each proves itself by its checksum, so the list need not survive a power cut. A torn one
    ends where the next one begins.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, b"\n%d %d %d\n" % (mark.rows, mark.num_bytes, mark.crc))
    finally:
        os.close(file)


def is_intact(path: Path, mark: Mark) -> bool:
    """Whether the file still begins with the bytes of `mark`; an untouched file is not read for it."""
    stat = path.stat()
    if stat.st_size == mark.num_bytes and stat.st_mtime_ns == mark.mtime_ns:
        return True
    return stat.st_size >= mark.num_bytes and checksum(path, mark.num_bytes) == mark.crc


def checksum(path: Path, num_bytes: int) -> int:
    """CRC-32 of the first `num_bytes` bytes."""
    crc = 0
    with path.open("rb") as file:
        while num_bytes and (block := file.read(min(num_bytes, _BLOCK_BYTES))):
            crc, num_bytes = zlib.crc32(block, crc), num_bytes - len(block)
    return crc


def size_without_zeros(path: Path) -> int:
    """Size of a file up to its last byte that is not zero: what a power cut can leave behind has zeros at its end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while size:
            start = max(0, size - _BLOCK_BYTES)
            file.seek(start)
            kept = file.read(size - start).rstrip(b"\0")
            if kept:
                return start + len(kept)
            size = start
    return 0


def last_intact_mark(path: Path, marks: Path, size: int) -> Mark:
    """The longest noted prefix within the first `size` bytes that is still what it was."""
    best, crc, position = Mark(), 0, 0
    noted = sorted(_read_marks(marks), key=lambda mark: mark.num_bytes)
    with path.open("rb") as file:
        for mark in noted:
            if mark.num_bytes > size:
                break
            while position < mark.num_bytes:
                block = file.read(min(_BLOCK_BYTES, mark.num_bytes - position))
                if not block:
                    return best
                crc, position = zlib.crc32(block, crc), position + len(block)
            if crc == mark.crc:
                best = mark
    return best


def _read_marks(path: Path) -> Iterator[Mark]:
    if path.exists():
        for line in path.read_bytes().split(b"\n"):
            numbers = line.split()
            if len(numbers) == 3 and all(number.isdigit() for number in numbers):
                yield Mark(int(numbers[0]), int(numbers[1]), int(numbers[2]))
