"""What every kind of output has in common: a tape, and how it is repaired, rewritten and verified.

Only committed rows are ever taken back from an output: `repair` brings what a crash or a user left behind to a state
that holds, or refuses.
"""

from __future__ import annotations

import os
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from cbgen.config import OutputConfig
from cbgen.data import addresses
from cbgen.errors import RefusedError
from cbgen.output.encoders import CODECS, Encoder, JsonlEncoder
from cbgen.output.places import sync_directory
from cbgen.output.state import State
from cbgen.output.tape import (
    Mark,
    Tape,
    checksum,
    is_intact,
    last_intact_mark,
    read_lines,
    size_without_zeros,
    write_tape,
)

IsWhole = Callable[[bytes], bool]


class Output(ABC):
    """What `OrderedWriter` and `Sidecar` know of an output.

    Attributes:
        path: as messages name it.
        directory: the sidecar directory.
        tape: where lines go first.
        encoder: turns them into the output's own form.
        rows_per_part: rows after which the tape is sealed, or None.
        is_lasting: whether a later run can go on here.
    """

    rows_per_part: int | None = None
    is_lasting = True

    def __init__(self, config: OutputConfig, directory: Path, tape: Tape) -> None:
        self.config = config
        self.path = addresses.redact(config.path)
        self.directory = directory
        self.tape = tape
        self.encoder: Encoder = JsonlEncoder(CODECS[config.resolved_format])

    # -- before a run -------------------------------------------------------------------------------------------------

    @abstractmethod
    def holds_something(self) -> bool:
        """Whether there is anything that a new run would destroy."""

    @abstractmethod
    def back_up(self) -> None:
        """Give what is there another name.

        Raises:
            RefusedError: that cannot be done.
        """

    def is_input(self, path: str) -> bool:
        """Whether writing here would write to this input."""
        return False

    def prepare(self, encoder: Encoder) -> None:
        """Take what turns lines into the output's own form; before anything is sealed or read back."""
        self.encoder = encoder

    def repair(self, state: State, is_whole: IsWhole) -> State:
        """Bring the tape to `state`, or to the longest earlier state that holds.

        Args:
            state: as last committed.
            is_whole: whether a line is a whole record; what was cut short is judged by it.

        Raises:
            RefusedError: rows that were committed are no longer what they were.
        """
        tape = self.tape
        size = tape.path.stat().st_size if tape.path.exists() else 0
        if size >= state.num_bytes:
            if not size or is_intact(tape.path, state.mark):
                if size > state.num_bytes:
                    if state.closed and size_without_zeros(tape.path) > state.num_bytes:
                        raise edited(self.path)
                    os.truncate(tape.path, state.num_bytes)
                return state
            size = size_without_zeros(tape.path)
            if size >= state.num_bytes:
                raise edited(self.path)
        kept = self._cut(size, is_whole)
        return replace(
            state,
            rows=state.base_rows + kept.rows,
            num_bytes=kept.num_bytes,
            crc=kept.crc,
            mtime_ns=kept.mtime_ns,
        )

    def _cut(self, size: int, is_whole: IsWhole) -> Mark:
        """Cut a tape that lost its end after the last whole line or frame; what is left."""
        path = self.tape.path
        if not path.exists():
            return Mark()
        known = last_intact_mark(path, self.marks, size)
        # Lines that do not hold their row's columns cannot show which row they answer.
        only_known = self.tape.codec is not None or self.encoder.takes_from_input
        kept = known if only_known else _whole_lines(path, known, size, is_whole)
        os.truncate(path, kept.num_bytes)
        return kept

    @property
    def marks(self) -> Path:
        """The list of the tape's safe prefixes."""
        return self.directory / "marks"

    def adopt(self) -> None:
        """Fetch the state of a run that was begun on another machine, if the output itself keeps one."""
        return

    def share(self, *names: str) -> None:
        """Keep these files of the sidecar directory with the output, for a run on another machine."""
        return

    # -- during a run -------------------------------------------------------------------------------------------------

    def open(self, state: State) -> None:
        """Go on behind `state`."""
        self.tape.open(state.mark)

    def append(self, lines: list[bytes]) -> None:
        self.tape.append(lines)

    def sync(self) -> Mark:
        """Make everything appended survive a power cut."""
        return self.tape.sync()

    def seal(self, base_rows: int) -> None:
        """Turn the whole tape, rows from `base_rows` on, into a part. Doing it twice does no harm."""
        return

    def finish(self, base_rows: int) -> None:
        """Bring the output into its final form; the run is complete, and everything is synced."""
        return

    def close(self) -> None:
        self.tape.close()

    # -- after a run --------------------------------------------------------------------------------------------------

    def lines(self, state: State) -> Iterator[bytes]:
        """The committed rows' lines, in order, as they were appended."""
        return read_lines(self.tape.path, self.tape.codec, state.rows)

    def rewrite(self, state: State, lines: Mapping[int, bytes], commit: Callable[[State], None]) -> State:
        """Replace some rows' lines; a crash leaves the old or the new.

        Args:
            state: committed.
            lines: by row index.
            commit: makes a state durable.
        """
        temporary = self.swap_path
        temporary.unlink(missing_ok=True)
        mark = write_tape(temporary, self.tape.codec, replaced(self.lines(state), lines))
        new = replace(state, base_rows=0, num_bytes=mark.num_bytes, crc=mark.crc, mtime_ns=mark.mtime_ns, swap=True)
        commit(new)
        return self.end_swap(new, commit)

    @property
    def swap_path(self) -> Path:
        """Where `rewrite` puts the tape's successor, on the same filesystem."""
        return self.tape.path.with_name(f".{self.tape.path.name}.new")

    def end_swap(self, state: State, commit: Callable[[State], None]) -> State:
        """Put the successor that a state announces in the tape's place, unless that has happened already."""
        self._put_successor()
        self.marks.unlink(missing_ok=True)
        state = replace(state, swap=False)
        commit(state)
        return state

    def _put_successor(self) -> None:
        if self.swap_path.exists():
            os.replace(self.swap_path, self.tape.path)
            sync_directory(self.tape.path.parent)

    def verify(self, state: State) -> None:
        """Compare everything with what was committed.

        Raises:
            RefusedError: it differs.
        """
        path = self.tape.path
        if not path.exists() and state.num_bytes:
            raise RefusedError(f"{self.path} is gone")
        size = path.stat().st_size if path.exists() else 0
        if size < state.num_bytes:
            raise RefusedError(
                f"{self.path} is shorter ({size:,} bytes) than what was committed ({state.num_bytes:,}); run the same "
                "command without --verify to repair it"
            )
        grown = state.closed and size > state.num_bytes and size_without_zeros(path) > state.num_bytes
        if grown or (state.num_bytes and checksum(path, state.num_bytes) != state.crc):
            raise edited(self.path)


def edited(output: str) -> RefusedError:
    """The refusal of an output whose lines are no longer the ones that were committed."""
    return RefusedError(
        f"{output} was edited since it was written, so its rows may no longer answer the rows they stand for; put it "
        "back, choose another -o, or start anew with --overwrite (the old file is kept as a backup)"
    )


def same_file(output: Path, path: str) -> bool:
    """Whether both paths lead to one file or directory, also through links."""
    return os.path.exists(path) and output.exists() and os.path.samefile(output, path)


def free_backup_path(path: Path) -> Path:
    """A name for the old output that no other file has."""
    return path.with_name(free_name(path.name, {entry.name for entry in path.parent.iterdir()}))


def free_name(name: str, taken: set[str]) -> str:
    """The name with the time in it, and a number if even that is taken."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{name}.backup-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 10_000))))
    return next(name for name in names if name not in taken)


def _whole_lines(path: Path, known: Mark, size: int, is_whole: IsWhole) -> Mark:
    """The longest prefix of whole records, of which `known` needs no second look."""
    rows, num_bytes, crc = known.rows, known.num_bytes, known.crc
    with path.open("rb") as file:
        file.seek(num_bytes)
        for line in file:
            if num_bytes + len(line) > size or not line.endswith(b"\n") or not is_whole(line):
                break
            rows, num_bytes, crc = rows + 1, num_bytes + len(line), zlib.crc32(line, crc)
    return Mark(rows, num_bytes, crc)


def replaced(lines: Iterable[bytes], new: Mapping[int, bytes], first: int = 0) -> Iterator[bytes]:
    """The lines of rows `first`, `first + 1`, ..., of which some are new."""
    for index, line in enumerate(lines, first):
        yield new.get(index, line)
