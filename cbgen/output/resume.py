"""Where a run starts: after the last row that is safe in the output, or at the first one.

Enters: a locked `Sidecar` and the input files. Leaves: a `Start`, after the output was repaired and the input found to
be the one that the output was begun with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from cbgen.config import OutputConfig, RunConfig
from cbgen.data.openai import is_batch_line
from cbgen.data.prompts import clash_message
from cbgen.data.readers import Source, check_inputs, read_rows
from cbgen.errors import InputError, RefusedError
from cbgen.output.base import edited
from cbgen.output.sidecar import Sidecar, answers, record_facts
from cbgen.output.state import State, add_row
from cbgen.records import Position, Row

PEEK_ROWS = 100


@dataclass(slots=True)
class Start:
    """What the output holds already, and the rows that follow.

    Attributes:
        state: what is committed.
        rows: those that come next.
        head: the first of them, looked at already.
        failed: rows before `state.rows` that are errors and are to be generated again.
        num_errors: rows that are errors and stay it.
        num_recovered: rows that earlier runs finished, as far as is known yet.
    """

    state: State
    rows: Iterator[Row]
    head: list[Row] = field(default_factory=list)
    failed: frozenset[int] = frozenset()
    num_errors: int = 0
    num_recovered: int = 0

    @property
    def has_rows(self) -> bool:
        """Whether there is anything to generate."""
        return bool(self.head or self.failed)


def find_start(config: RunConfig, sources: list[Source], sidecar: Sidecar, note: Callable[[str], None]) -> Start:
    """Repair the output and find the row to go on with.

    Args:
        config: the run; its output, limit and inputs matter here.
        sources: the checked inputs.
        sidecar: locked.
        note: tells the user of a repair.

    Raises:
        RefusedError: the input is not the one that this output was begun with.
        InputError: one of the first rows has a column with the name of a result field.
    """
    committed = sidecar.read_state()
    state = sidecar.repair(committed)
    if state.rows < committed.rows:
        path = sidecar.output.path
        note(f"{path} was cut short: {state.rows:,} of {committed.rows:,} rows are whole, the rest is redone")
    is_stream = any(source.is_stream for source in sources)
    unchanged = committed.signatures == [source.signature() for source in sources] and not is_stream
    if state.rows and (state.rows < committed.rows or not unchanged or config.output.retry_errors):
        start = _Rescan(config.output, sources, sidecar, committed, state, is_stream).start()
    else:
        start = Start(state, read_rows(sources, state.position if state.rows else Position(), state.rows))
    if config.limit is not None:
        start.rows = itertools.islice(start.rows, max(0, config.limit - start.state.rows))
    start.num_errors = start.state.tally.num_errors - len(start.failed)
    start.num_recovered = start.state.rows - len(start.failed)
    return _peeked(start, config.output.result_fields)


def verify_output(config: RunConfig) -> str:
    """Compare an output, and its input where that can be read, with what was committed.

    Returns:
        One sentence that says what was found intact.

    Raises:
        RefusedError: something differs.
    """
    with Sidecar.open(config.output, ()) as sidecar:
        if not sidecar.has_begun:
            raise RefusedError(f"{sidecar.output.path} was not written by cbgen, or its state is gone")
        state = sidecar.read_state()
        sidecar.output.verify(state)
        sources = check_inputs(config.inputs, exclude=(config.output.path,))
        checked = "the input was not compared, since it can be read only once"
        if not any(source.is_stream for source in sources):
            digest = count = 0
            for row in itertools.islice(read_rows(sources), state.rows):
                digest, count = add_row(digest, row.index, row.checksum), count + 1
            if (digest, count) != (state.digest, state.rows):
                raise RefusedError(
                    f"{sidecar.output.path} is intact, but the input is not the one that its {state.rows:,} rows answer"
                )
            checked = "and the input is the one they were written for"
        return f"{sidecar.output.path}: {state.rows:,} committed rows are intact, {checked}"


class _Rescan:
    """Reads the committed part of the input again: is it still the same, and where does the row after it start?"""

    def __init__(
        self,
        config: OutputConfig,
        sources: list[Source],
        sidecar: Sidecar,
        committed: State,
        state: State,
        is_stream: bool,
    ) -> None:
        self._config = config
        self._sources = sources
        self._sidecar = sidecar
        self._committed = committed
        self._state = state
        self._is_stream = is_stream

    def start(self) -> Start:
        """The start, once the input was found to be unchanged.

        Raises:
            RefusedError: it is not.
        """
        committed, state = self._committed, self._state
        cut = state.rows < committed.rows
        retry = self._config.retry_errors and not cut
        codes = self._error_codes() if retry else iter(())
        rows = read_rows(self._sources)
        digest = good_digest = count = 0
        found, failed = state, []
        for row in itertools.islice(rows, committed.rows):
            digest, count = add_row(digest, row.index, row.checksum), count + 1
            if next(codes, None) is None:
                good_digest = add_row(good_digest, row.index, row.checksum)
            else:
                failed.append(row.index)
            if count == state.rows:
                found = replace(state, digest=digest, position=row.next_position)
        # Rows that failed may have been mended before they are tried again; all others may never change.
        same = good_digest == committed.good_digest if retry else digest == committed.digest
        if count < committed.rows or not same:
            self._refuse("is shorter than" if count < committed.rows else "differs from")
        if cut:
            self._check_kept_lines()
            found = replace(found, good_digest=self._good_digest())
        if (cut or failed) and self._is_stream:
            raise RefusedError(
                f"{self._sidecar.output.path} needs rows of its input once more, and a stream cannot be read twice; "
                "name a file, or use --overwrite"
            )
        if cut:
            rows = read_rows(self._sources, found.position, state.rows)
        return Start(found, rows, failed=frozenset(failed))

    def _good_digest(self) -> int:
        """Of the rows that are left, after the output was cut short."""
        digest = 0
        for row, code in zip(read_rows(self._sources), self._error_codes(), strict=False):
            if code is None:
                digest = add_row(digest, row.index, row.checksum)
        return digest

    def _error_codes(self) -> Iterator[str | None]:
        """The error code of each committed row."""
        for line in self._sidecar.output.lines(self._state):
            facts = record_facts(line + b"\n", self._config)
            yield facts[0] if facts else None

    def _check_kept_lines(self) -> None:
        """An output that was cut short keeps its first rows; one from which lines were taken out does not.

        Raises:
            RefusedError: a kept line answers another row than the one it stands for.
        """
        if self._is_stream or not self._state.rows:
            return
        lines = self._sidecar.output.lines(self._state)
        for line, row in zip(lines, itertools.islice(read_rows(self._sources), self._state.rows), strict=False):
            if not answers(line, row, self._config):
                raise edited(self._sidecar.output.path)

    def _refuse(self, what: str) -> None:
        mended = self._committed.tally.num_errors and not self._config.retry_errors
        raise RefusedError(
            f"the input {what} the one that {self._sidecar.output.path} was begun with (within its first "
            f"{self._committed.rows:,} rows); put it back, choose another -o, or start anew with --overwrite"
            + (" (if only rows that failed were mended, use --retry-errors)" if mended else "")
        )


def _peeked(start: Start, result_fields: tuple[str, ...]) -> Start:
    """Look at the first rows: is there one at all, and does a column carry the name of a result field?"""
    start.head = list(itertools.islice(start.rows, PEEK_ROWS))
    for row in [] if start.state.rows else start.head:  # later ones are row errors, as they are in an unbroken run
        if is_batch_line(row.columns):
            continue
        clash = next((name for name in result_fields if name in row.columns), None)
        if clash is not None:
            raise InputError(f"{row.place}: {clash_message(clash)}")
    start.rows = itertools.chain(start.head, start.rows)
    return start
