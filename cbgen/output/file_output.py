"""One file that can only be written whole: Parquet, or any object of an object store."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from cbgen.config import OutputConfig
from cbgen.errors import RefusedError
from cbgen.output.base import IsWhole, edited, free_name, same_file
from cbgen.output.encoders import CODECS
from cbgen.output.places import Place, move, split_path
from cbgen.output.staged import Published, StagedOutput, is_one_of
from cbgen.output.state import State
from cbgen.output.tape import (
    read_lines,
)


class FileOutput(StagedOutput):
    """One file that appears when it is complete. Parquet is sealed in pieces meanwhile, which are joined at the end."""

    def __init__(self, config: OutputConfig) -> None:
        parent, name = split_path(config.path)
        root = Place(parent)
        self.name = name
        default = Path(name + ".cbgen") if root.is_remote else Path(parent) / f"{name}.cbgen"
        codec = CODECS[config.resolved_format]
        super().__init__(config, root, Path(config.state_dir) if config.state_dir else default, codec)
        self.rows_per_part = config.rows_per_part if self.form == "parquet" else None

    def holds_something(self) -> bool:
        return bool(self.root.sizes().get(self.name))

    def back_up(self) -> None:
        if self.holds_something():
            self.root.rename(self.name, free_name(self.name, set(self.root.sizes())))

    def is_input(self, path: str) -> bool:
        return path == self.config.path or (not self.root.is_remote and same_file(Path(self.config.path), path))

    def repair(self, state: State, is_whole: IsWhole) -> State:
        self.published, sizes = self._read_published(), self.root.sizes()
        first = self._first_held(state.base_rows)
        if first and self.name not in sizes:  # its rows were nowhere else: begin again
            self._drop_sealed()
            return super().repair(State(), is_whole)
        if self.name in sizes and not self._is_known(self.name, sizes[self.name]):
            raise edited(self.path)
        for _, _, path in self._pieces(state.base_rows):
            noted = self.published.get(path.name)
            if noted and not is_one_of(noted[-2:], path):
                raise edited(str(path))
        noted = self.published.get(self.name)
        if noted and first > max(published.rows for published in noted):
            raise RefusedError(
                f"a file sealed-*.parquet with rows before {first:,} is gone from {self.directory}; put it back, or "
                "start anew with --overwrite (the old file is kept as a backup)"
            )
        return super().repair(state, is_whole)

    def _sealed(self) -> dict[int, tuple[int, Path]]:
        """Sealed pieces: the row after the last one -> (first row, file)."""
        found = {}
        for path in self.directory.glob("sealed-*.parquet"):
            first, end = (int(number) for number in path.stem.split("-")[1:])
            found[end] = first, path
        return found

    def _pieces(self, base_rows: int) -> list[tuple[int, int, Path]]:
        """(first row, number of rows, file) of the sealed pieces that lead up to the tape, in order."""
        sealed, pieces = self._sealed(), []
        while base_rows in sealed:
            first, path = sealed[base_rows]
            pieces.append((first, base_rows - first, path))
            base_rows = first
        return pieces[::-1]

    def _first_held(self, base_rows: int) -> int:
        """The first row that is still in a piece or on the tape; those before it are only in the output."""
        pieces = self._pieces(base_rows)
        return pieces[0][0] if pieces else base_rows

    def seal(self, base_rows: int) -> None:
        path = self.directory / f"sealed-{base_rows}-{base_rows + self.tape.mark.rows}.parquet"
        local = path.with_suffix(".tmp")
        self.encoder.encode(base_rows, self._tape_lines(), local)
        self._write_note(path.name, Published.of(local, self.tape.mark.rows))
        move(local, path)

    def finish(self, base_rows: int) -> None:
        rows = base_rows + self.tape.mark.rows
        if not self._is_published(self.name, rows, self.root.sizes()):
            local = self.directory / f"{self.name}.tmp"
            if self.form == "parquet":
                self._assemble(base_rows, local)
            else:
                shutil.copyfile(self.tape.path, local)
            self._note(self.name, rows, local)
            self.root.put(local, self.name)
        self._drop_sealed()

    def _assemble(self, base_rows: int, local: Path) -> None:
        last = self.directory / "last.tmp"
        self.encoder.encode(base_rows, self._tape_lines(), last)
        first = self._first_held(base_rows)
        with contextlib.ExitStack() as stack:
            old = [(stack.enter_context(self.root.fetched(self.name, self.directory)), first)] if first else []
            pieces = [(path, num_rows) for _, num_rows, path in self._pieces(base_rows)]
            self.encoder.join([*old, *pieces], last, local)
        last.unlink()

    def _drop_sealed(self) -> None:
        """From the front: what is left always leads up to the tape."""
        for _, (_, path) in sorted(self._sealed().items()):
            path.unlink()

    def lines(self, state: State) -> Iterator[bytes]:
        if self.form != "parquet":
            yield from super().lines(state)
            return
        first = self._first_held(state.base_rows)
        if first:
            with self.root.fetched(self.name, self.directory) as local:
                yield from itertools.islice(self.encoder.decode(0, local), first)
        for base_rows, _, path in self._pieces(state.base_rows):
            yield from self.encoder.decode(base_rows, path)
        yield from read_lines(self.tape.path, None, state.rows - state.base_rows)

    def end_swap(self, state: State, commit: Callable[[State], None]) -> State:
        """After `rewrite` all rows are on one tape, and the file is made anew from it."""
        self._put_successor()
        self._drop_sealed()  # while the state still announces the swap: later, a new piece may end where an old one did
        self.published = self._read_published()
        in_place = self._in_place(self.name)
        if in_place is not None:
            self._write_note(self.name, replace(in_place, rows=0))  # known, but not what the rows are now
        return super().end_swap(state, commit)

    def verify(self, state: State) -> None:
        super().verify(state)
        self.published = self._read_published()
        for _, num_rows, path in self._pieces(state.base_rows):
            noted = self.published.get(path.name)
            now = Published.of(path, num_rows)
            if noted and (now.size, now.crc) not in [(entry.size, entry.crc) for entry in noted[-2:]]:
                raise edited(str(path))
        if self.name in self.published or self._first_held(state.base_rows):
            self._verify_file(self.name, self.root, self.root.sizes())
