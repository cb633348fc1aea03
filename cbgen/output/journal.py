"""The journal: finished rows in completion order, safe from the moment `append` returns.

Output order is input order, so a row that overtook a long one has to wait. It waits here, on disk, and memory
holds only where (and a few megabytes of the newest). Files are `wal-000000.jsonl`, ... in the sidecar directory; one
record is one line:

    <crc32 of the rest> <index> <row checksum> <error code or -> <prompt tokens> <completion tokens> <payload>\\n

Records are written unbuffered, all those of one `append` at once: a killed process loses none that `append` returned
for, a power cut at most those since the last `sync`. Reading stops at the first record of a segment that is torn or
fails its CRC. The newest records stay in memory too, so that rows which need not wait are not read back.
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

_SEGMENT_BYTES = 64 << 20
_RECENT_BYTES = 8 << 20  # of payload kept in memory
_SEGMENT_NAME = re.compile(r"wal-(\d{6,})\.jsonl")


@dataclass(slots=True)  # not frozen: there is one for every row, and freezing triples what making it costs
class Record:
    """A finished row: its output line (`payload`, without line end) and what totals and guards need of it."""

    index: int
    checksum: int
    error_code: str | None
    prompt_tokens: int
    completion_tokens: int
    payload: bytes

    def encode(self) -> bytes:
        body = b"%d %d %b %d %d %b" % (
            self.index,
            self.checksum,
            b"-" if self.error_code is None else self.error_code.encode("ascii"),
            self.prompt_tokens,
            self.completion_tokens,
            self.payload,
        )
        return b"%d %b\n" % (zlib.crc32(body), body)

    @classmethod
    def decode(cls, line: bytes) -> Record | None:
        """The record of one line without its end; None when it is not one whole, intact record."""
        try:
            crc, body = line.split(b" ", 1)
            if int(crc) != zlib.crc32(body):
                return None
            index, checksum, code, prompt_tokens, completion_tokens, payload = body.split(b" ", 5)
        except ValueError:
            return None
        error_code = None if code == b"-" else code.decode("ascii")
        return cls(int(index), int(checksum), error_code, int(prompt_tokens), int(completion_tokens), payload)


_Place = tuple[int, int, int]
"""(segment, offset, size) of a record."""


class Journal:
    """Append-only segments, an index in memory, and removal of segments that are no longer needed.

    Args:
        directory: where the segments live; existing ones are read.
        head: rows below it are already in the output and not kept.
    """

    def __init__(self, directory: Path, head: int) -> None:
        self._directory = directory
        self._places: dict[int, _Place] = {}
        self._recent: dict[int, Record] = {}
        self._recent_bytes = 0
        self._checksums: dict[int, int] = {}
        self._highest: dict[int, int] = {}  # segment -> highest row index in it
        self._readers: dict[int, int] = {}  # segment -> file descriptor
        for number, path in self._segments():
            self._recover(number, path, head)
        self._current = max(self._highest, default=-1) + 1  # never append behind a torn record
        self._file = self._open_segment(self._current)
        self._size = 0
        self._dirty = False

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def __len__(self) -> int:
        return len(self._places)

    def indices(self) -> list[int]:
        """The rows in it, in ascending order."""
        return sorted(self._places)

    def checksum(self, index: int) -> int:
        """The input checksum under which the row was finished."""
        return self._checksums[index]

    def append(self, records: list[Record]) -> None:
        """Write finished rows.

        Raises:
            OSError: the disk is full or gone; what was appended before stays intact.
        """
        if self._size >= _SEGMENT_BYTES:
            self.sync()
            following = self._open_segment(self._current + 1)
            os.close(self._file)
            self._current, self._file, self._size = self._current + 1, following, 0
        lines = [record.encode() for record in records]
        view = memoryview(b"".join(lines))
        while view:
            view = view[os.write(self._file, view) :]
        for record, line in zip(records, lines, strict=True):
            self._note(record, (self._current, self._size, len(line)))
            self._size += len(line)
            if self._recent_bytes < _RECENT_BYTES:
                self._recent[record.index] = record
                self._recent_bytes += len(record.payload)
        self._dirty = True

    def pop(self, index: int) -> Record:
        """Take a row out of the index; its bytes stay until `prune`."""
        segment, offset, size = self._places.pop(index)
        self._checksums.pop(index)
        recent = self._recent.pop(index, None)
        if recent is not None:
            self._recent_bytes -= len(recent.payload)
            return recent
        if segment not in self._readers:
            self._readers[segment] = os.open(self._path(segment), os.O_RDONLY)
        record = Record.decode(os.pread(self._readers[segment], size - 1, offset))
        if record is None or record.index != index:
            raise OSError(errno.EIO, f"the journal record of row {index} changed on disk")
        return record

    def peek(self, index: int) -> Record:
        """A row's record, which stays."""
        place, checksum = self._places[index], self._checksums[index]
        record = self.pop(index)
        self._places[index], self._checksums[index] = place, checksum
        return record

    def sync(self) -> None:
        """Make every appended record survive a power cut."""
        if self._dirty:
            os.fsync(self._file)
            self._dirty = False

    def prune(self, head: int) -> None:
        """Remove segments whose rows are all below `head`; only once a state that says so is durable."""
        for segment in [s for s, highest in self._highest.items() if highest < head and s != self._current]:
            self._close_reader(segment)
            self._path(segment).unlink(missing_ok=True)
            del self._highest[segment]

    def remove(self) -> None:
        """Delete every segment, once all rows are in the output."""
        assert not self._places, "rows would be lost"
        for _, path in self._segments():
            path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._file)
        for segment in list(self._readers):
            self._close_reader(segment)

    # -- files --------------------------------------------------------------------------------------------------------

    def _segments(self) -> list[tuple[int, Path]]:
        matches = ((_SEGMENT_NAME.fullmatch(path.name), path) for path in self._directory.iterdir())
        return sorted((int(match[1]), path) for match, path in matches if match)

    def _path(self, segment: int) -> Path:
        return self._directory / f"wal-{segment:06d}.jsonl"

    def _open_segment(self, segment: int) -> int:
        return os.open(self._path(segment), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def _recover(self, segment: int, path: Path, head: int) -> None:
        offset = 0
        self._highest[segment] = -1
        with path.open("rb") as file:
            for line in file:
                record = Record.decode(line[:-1]) if line.endswith(b"\n") else None
                if record is None:
                    break
                if record.index >= head:
                    self._note(record, (segment, offset, len(line)))
                offset += len(line)
            os.fsync(file.fileno())  # whoever wrote it may have been killed before

    def _note(self, record: Record, place: _Place) -> None:
        self._places[record.index] = place
        self._checksums[record.index] = record.checksum
        segment = place[0]
        if record.index > self._highest.get(segment, -1):
            self._highest[segment] = record.index

    def _close_reader(self, segment: int) -> None:
        if segment in self._readers:
            os.close(self._readers.pop(segment))
