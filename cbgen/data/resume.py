"""Where a run starts: after the last row that is safe in the output, or at the first one.

Enters: a locked `Sidecar` and the input files. Leaves: a `Start`, after the output was repaired and the input found to
be the one that the output was begun with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cbgen.config import OutputConfig, RunConfig
from cbgen.data.openai import is_batch_line
from cbgen.data.prompts import clash_message
from cbgen.data.readers import STDIN, Source, read_rows
from cbgen.data.sidecar import Sidecar, State, answers, chain, edited_output
from cbgen.errors import InputError, RefusedError
from cbgen.records import Position, Row

_PEEK_ROWS = 100


@dataclass(slots=True)
class Start:
    """What the output holds already, and the rows that follow."""

    state: State
    rows: Iterator[Row]
    has_rows: bool = False


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
        note(f"{sidecar.output} was cut short: {state.rows:,} of {committed.rows:,} rows are whole, the rest is redone")
    unchanged = committed.signatures == [source.signature() for source in sources] and STDIN not in config.inputs
    if state.rows and (state.rows < committed.rows or not unchanged):
        start = _rescan(config.output, sources, sidecar, committed, state)
    else:
        start = Start(state, read_rows(sources, state.position if state.rows else Position(), state.rows))
    if config.limit is not None:
        start.rows = itertools.islice(start.rows, max(0, config.limit - start.state.rows))
    return _peeked(start, config.output.result_fields)


def _rescan(config: OutputConfig, sources: list[Source], sidecar: Sidecar, committed: State, state: State) -> Start:
    """Read the committed part of the input again: is it still the same, and where does the row after it start?"""
    rows = read_rows(sources)
    digest, count, found = "", 0, state
    for row in itertools.islice(rows, committed.rows):
        digest, count = chain(digest, row.checksum), count + 1
        if count == state.rows:
            found = replace(state, digest=digest, position=row.next_position)
    if count < committed.rows or digest != committed.digest:
        what = "is shorter than" if count < committed.rows else "differs from"
        raise RefusedError(
            f"the input {what} the one that {sidecar.output} was begun with (within its first {committed.rows:,} rows)"
            "; put it back, choose another -o, or start anew with --overwrite"
        )
    if state.rows < committed.rows:
        _check_kept_lines(sources, sidecar, state.rows, config)
        if any(source.path == STDIN for source in sources):
            raise RefusedError(f"{sidecar.output} was cut short, and stdin cannot be read twice; use --overwrite")
        rows = read_rows(sources, found.position, state.rows)
    return Start(found, rows)


def _check_kept_lines(sources: list[Source], sidecar: Sidecar, num_rows: int, config: OutputConfig) -> None:
    """An output that was cut short keeps its first rows; one from which lines were taken out does not.

    Raises:
        RefusedError: a kept line answers another row than the one it stands for.
    """
    if any(source.path == STDIN for source in sources) or not num_rows:
        return
    with sidecar.output.open("rb") as lines:
        for line, row in zip(lines, itertools.islice(read_rows(sources), num_rows), strict=False):
            if not answers(line, row, config):
                raise edited_output(sidecar.output)


def _peeked(start: Start, result_fields: tuple[str, ...]) -> Start:
    """Look at the first rows: is there one at all, and does a column carry the name of a result field?"""
    head = list(itertools.islice(start.rows, _PEEK_ROWS))
    for row in [] if start.state.rows else head:  # later ones are row errors, as they are in an unbroken run
        if is_batch_line(row.columns):
            continue
        clash = next((name for name in result_fields if name in row.columns), None)
        if clash is not None:
            raise InputError(f"{row.place}: {clash_message(clash)}")
    return Start(start.state, itertools.chain(head, start.rows), bool(head))
