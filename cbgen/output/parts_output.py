"""A directory of parts, local or in an object store: immutable files over fixed row ranges."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from cbgen.config import OutputConfig
from cbgen.data import files
from cbgen.errors import RefusedError
from cbgen.output.base import IsWhole, free_backup_path, replaced
from cbgen.output.places import Place, split_path, sync_file
from cbgen.output.staged import StagedOutput
from cbgen.output.state import State
from cbgen.output.tape import (
    read_lines,
    write_tape,
)


class PartsOutput(StagedOutput):
    """A directory of parts: part k holds rows k*S .. (k+1)*S - 1 and is never changed once it is full."""

    def __init__(self, config: OutputConfig) -> None:
        root = Place(config.path)
        default = Path(split_path(config.path)[1] + ".cbgen") if root.is_remote else Path(config.path) / "_cbgen"
        super().__init__(config, root, Path(config.state_dir) if config.state_dir else default)
        self.rows_per_part = config.rows_per_part

    def part_name(self, base_rows: int) -> str:
        """The file of the part that begins with this row."""
        return f"part-{base_rows // self.config.rows_per_part:06d}.{self.form}"

    def holds_something(self) -> bool:
        return any(name != "_cbgen" for name in self.root.names())

    def back_up(self) -> None:
        if self.root.is_remote:
            if self.holds_something():
                raise RefusedError(f"{self.path} is not empty, and objects cannot be renamed; choose another -o")
            return
        names = [name for name in self.root.names() if name != "_cbgen"]
        if names:
            path = Path(self.config.path)
            backup = free_backup_path(path.parent / path.resolve().name)
            backup.mkdir()
            for name in names:
                os.replace(path / name, backup / name)

    def is_input(self, path: str) -> bool:
        """Also when the input lies in the directory: --overwrite would move it away."""
        if self.root.is_remote or not os.path.exists(path):
            return False
        directory, place = Path(self.config.path).resolve(), Path(path).resolve()
        return directory == place or directory in place.parents

    def adopt(self) -> None:
        if not self.root.is_remote or (self.directory / "run.json").exists():
            return
        for name in ("state.json", "run.json"):  # in this order: what has no run.json has not begun
            uri = self.root.uri(f"_cbgen/{name}")
            if not files.exists(uri):
                return
            (self.directory / name).write_bytes(files.read_bytes(uri))

    def share(self, *names: str) -> None:
        for name in names if self.root.is_remote else ():
            files.write_bytes(self.root.uri(f"_cbgen/{name}"), (self.directory / name).read_bytes())

    def repair(self, state: State, is_whole: IsWhole) -> State:
        self.published = self._read_published()
        sizes = self.root.sizes() if state.rows else {}
        for base_rows in range(0, state.rows, self.config.rows_per_part):
            name = self.part_name(base_rows)
            # The last one may be missing: its rows are on the tape, too.
            is_right = self._is_known(name, sizes[name]) if name in sizes else base_rows == state.base_rows
            if not is_right:
                what = "is gone from" if name not in sizes else "was changed in"
                raise RefusedError(
                    f"{name} {what} {self.path} since it was written; put it back, choose another -o, or start anew "
                    "with --overwrite"
                )
        if state.num_bytes and not self.tape.path.exists() and self.part_name(state.base_rows) in sizes:
            state = self._with_tape_restored(state)
        return super().repair(state, is_whole)

    def _with_tape_restored(self, state: State) -> State:
        """The last, unfinished part holds the rows of a tape that stayed on another machine."""
        lines = itertools.islice(self._part_lines(state.base_rows), state.rows - state.base_rows)
        mark = write_tape(self.tape.path, None, lines)
        state = replace(state, rows=state.base_rows + mark.rows, num_bytes=mark.num_bytes, crc=mark.crc)
        return replace(state, mtime_ns=mark.mtime_ns)

    def seal(self, base_rows: int) -> None:
        self._publish(base_rows, self._tape_lines(), self.tape.mark.rows)

    def finish(self, base_rows: int) -> None:
        """Publish the last, shorter part; its rows stay on the tape too, in case the input grows."""
        rows = self.tape.mark.rows
        if rows and not self._is_published(self.part_name(base_rows), rows, self.root.sizes()):
            self._publish(base_rows, self._tape_lines(), rows)

    def _publish(self, base_rows: int, lines: Iterable[bytes], rows: int) -> None:
        name = self.part_name(base_rows)
        local = self.directory / f"{name}.tmp"
        self.encoder.encode(base_rows, lines, local)
        self._note(name, rows, local)
        self.root.put(local, name)

    def lines(self, state: State) -> Iterator[bytes]:
        for base_rows in range(0, state.base_rows, self.config.rows_per_part):
            yield from self._part_lines(base_rows)
        yield from read_lines(self.tape.path, self.tape.codec, state.rows - state.base_rows)

    def _part_lines(self, base_rows: int) -> Iterator[bytes]:
        with self.root.fetched(self.part_name(base_rows), self.directory) as local:
            yield from self.encoder.decode(base_rows, local)

    def rewrite(self, state: State, lines: Mapping[int, bytes], commit: Callable[[State], None]) -> State:
        """Make every part with replaced rows anew, and the tape; with one commit all of them count."""
        for left in (self.swap_path, *self._rewritten()):
            left.unlink(missing_ok=True)
        size, sizes = self.config.rows_per_part, self.root.sizes()
        for base_rows in sorted({index // size * size for index in lines}):
            name = self.part_name(base_rows)
            if name in sizes:
                path = self.directory / f".{name}.new"
                self.encoder.encode(base_rows, replaced(self._known_lines(state, base_rows), lines, base_rows), path)
                sync_file(path)
        new = replace(state, swap=True)
        if any(index >= state.base_rows for index in lines):
            on_tape = replaced(self._known_lines(state, state.base_rows), lines, state.base_rows)
            mark = write_tape(self.swap_path, None, on_tape)
            new = replace(new, num_bytes=mark.num_bytes, crc=mark.crc, mtime_ns=mark.mtime_ns)
        commit(new)
        return self.end_swap(new, commit)

    def _known_lines(self, state: State, base_rows: int) -> Iterator[bytes]:
        """The committed lines of one part, from its file or from the tape."""
        if base_rows < state.base_rows:
            return self._part_lines(base_rows)
        return read_lines(self.tape.path, None, state.rows - state.base_rows)

    def _rewritten(self) -> list[Path]:
        """Parts that `rewrite` made, and that are not yet in place."""
        return sorted(self.directory.glob(".part-*.new"))

    def end_swap(self, state: State, commit: Callable[[State], None]) -> State:
        self.published = self._read_published()
        for path in self._rewritten():
            name = path.name.removeprefix(".").removesuffix(".new")
            base_rows = int(name.removeprefix("part-").partition(".")[0]) * self.config.rows_per_part
            self._note(name, min(self.config.rows_per_part, state.rows - base_rows), path)
            self.root.put(path, name)
        return super().end_swap(state, commit)

    def verify(self, state: State) -> None:
        super().verify(state)
        self.published = self._read_published()
        sizes = self.root.sizes()
        for base_rows in range(0, state.rows, self.config.rows_per_part):
            name = self.part_name(base_rows)
            if name in self.published or base_rows < state.base_rows:
                self._verify_file(name, self.root, sizes)
