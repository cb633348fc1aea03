"""Outputs whose rows wait on a tape in the sidecar directory and become files later; what is known of those files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from cbgen.config import OutputConfig
from cbgen.data import addresses
from cbgen.errors import RefusedError
from cbgen.output.base import Output, edited
from cbgen.output.places import Place
from cbgen.output.state import State
from cbgen.output.tape import (
    Codec,
    Tape,
    checksum,
    read_lines,
)


@dataclass(frozen=True, slots=True)
class Published:
    """A finished file, as noted when it was published; moving it keeps the time of its last change."""

    rows: int
    size: int
    crc: int
    mtime_ns: int = 0

    @classmethod
    def of(cls, path: Path, rows: int) -> Published:
        """The note of a local file."""
        stat = path.stat()
        return cls(rows, stat.st_size, checksum(path, stat.st_size), stat.st_mtime_ns)


class StagedOutput(Output):
    """Common to outputs whose tape stands in the sidecar directory and becomes files later."""

    def __init__(self, config: OutputConfig, root: Place, directory: Path, codec: Codec | None = None) -> None:
        super().__init__(config, directory, Tape(directory / "rows.jsonl", codec, directory / "marks"))
        self.form = config.resolved_format
        self.root = root
        self.published: dict[str, list[Published]] = {}

    def open(self, state: State) -> None:
        self.published = self._read_published()
        super().open(state)

    def _tape_lines(self) -> Iterator[bytes]:
        return read_lines(self.tape.path, self.tape.codec, self.tape.mark.rows)

    def _is_published(self, name: str, rows: int, sizes: Mapping[str, int]) -> bool:
        """Whether the file with so many rows is in place; one that was noted and never arrived is not."""
        noted = self.published.get(name)
        return noted is not None and (noted[-1].rows, noted[-1].size) == (rows, sizes.get(name))

    def _is_known(self, name: str, size: int) -> bool:
        """Whether a file is one of ours; a local one that was touched since is read for it, of a remote one the size
        has to do. Nothing is known of one that was never noted.

        A crash between note and publication leaves the one before the last.
        """
        alike = [noted for noted in self.published.get(name, [])[-2:] if noted.size == size]
        if not alike or self.root.is_remote:
            return bool(alike) or not self.published.get(name)
        return is_one_of(alike, Path(self.root.root) / name)

    def _verify_file(self, name: str, root: Place, sizes: Mapping[str, int]) -> None:
        if name not in sizes:
            raise RefusedError(f"{name} is gone from {addresses.redact(root.root)}")
        with root.fetched(name, self.directory) as local:
            size = local.stat().st_size
            known = [(noted.size, noted.crc) for noted in self.published.get(name, [])[-2:]]
            if known and (size, checksum(local, size)) not in known:
                raise edited(f"{addresses.redact(root.root)}: {name}")

    def _note(self, name: str, rows: int, local: Path) -> None:
        """Remember what is about to be published, for `verify` and for a later run. What is in place until then always
        is the note before it, however many publications a crash has prevented since.
        """
        in_place = self._in_place(name)
        if in_place is not None and in_place != self.published[name][-1]:
            self._write_note(name, in_place)
        self._write_note(name, Published.of(local, rows))

    def _in_place(self, name: str) -> Published | None:
        """The note of the file that is there now, judged by its size."""
        noted = self.published.get(name)
        size = self.root.sizes().get(name) if noted else None
        return next((entry for entry in reversed(noted or ()) if entry.size == size), None)

    def _write_note(self, name: str, published: Published) -> None:
        record = {"name": name, **asdict(published)}
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(log, b"\n" + orjson.dumps(record) + b"\n")  # the one before may be torn
            os.fsync(log)
        finally:
            os.close(log)
        self.published.setdefault(name, []).append(published)

    def _read_published(self) -> dict[str, list[Published]]:
        published: dict[str, list[Published]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in self._log.read_bytes().split(b"\n"):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn last line
                    record = orjson.loads(line)
                    published.setdefault(record.pop("name"), []).append(Published(**record))
        return published

    @property
    def _log(self) -> Path:
        return self.directory / "published"


def is_one_of(noted: list[Published], path: Path) -> bool:
    """Whether a local file is what one of these notes says; it is read only if it was touched since."""
    stat = path.stat()
    if any((entry.size, entry.mtime_ns) == (stat.st_size, stat.st_mtime_ns) for entry in noted):
        return True
    alike = {entry.crc for entry in noted if entry.size == stat.st_size}
    return bool(alike) and checksum(path, stat.st_size) in alike
