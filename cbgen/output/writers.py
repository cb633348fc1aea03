"""Finished rows to the output: in input order, once each, surviving a crash at any instruction.

`OrderedWriter` takes rows in any order, puts them into the journal at every step, and on a commit moves the rows that
are next in line onto the tape. Invariants: I1 the tape's first `num_bytes` bytes are exactly rows base_rows..rows-1,
and the sealed parts rows 0..base_rows-1. I2 state.json never names bytes that were not fsynced before it. I3 a row is
finished iff its index is below `rows` or the journal holds it intact. I4 a journal segment is removed only after a
durable state makes it useless. I5 recovery is: lock, compare fingerprints, cut the tape to `num_bytes`, read the
journal, go on; a crash during recovery changes nothing. I6 a part is published before the state that counts on it, and
publishing it again gives the same part.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from cbgen.errors import RefusedError
from cbgen.output.journal import Journal, Record
from cbgen.output.sidecar import Sidecar, named_disk_errors
from cbgen.output.state import State, add_row
from cbgen.records import Position, Row

_COMMIT_SECONDS = 1.0
_COMMIT_ROWS = 20_000  # rows that wait for a commit are in memory, by a few hundred bytes each
_MAX_COMMIT_SHARE = 0.05  # of wall time; a slow filesystem commits less often instead of stalling the engine
_APPEND_BYTES = 4 << 20


class OrderedWriter:
    """Takes finished rows in any order; commits the gap-free prefix.

    Args:
        sidecar: locked, its output already repaired to `state`.
        state: what is committed.
        signatures: of the inputs, stored with each commit.
    """

    def __init__(self, sidecar: Sidecar, state: State, signatures: list[Any]) -> None:
        self.state = state
        self.head = state.rows  # the first row that is not finished
        self.num_recovered = state.rows  # rows that earlier runs finished
        self._sidecar = sidecar
        self._output = sidecar.output
        self._signatures = signatures
        with named_disk_errors(self._output):
            state = self.state = replace(state, closed=False)
            sidecar.write_state(state)  # after a repair the one on disk still names rows that were cut off
            self._journal = Journal(sidecar.directory, state.rows)
            self._output.open(state)
            self._seal_if_full()
        self._positions: dict[int, Position] = {}  # finished row -> where the next one starts
        self._unwritten: list[Record] = []  # finished in this step
        self._uncommitted = 0
        self._waited = 0.0  # seconds of the last commit that went to waiting for the disk
        self._next_commit = time.monotonic() + _COMMIT_SECONDS

    @property
    def num_finished(self) -> int:
        """Rows that will never be generated again: in the output, or waiting in the journal."""
        return self.state.rows + len(self._journal) + len(self._unwritten)

    def recovered(self, row: Row) -> bool:
        """Whether an earlier run finished this row; call it for every row read.

        Raises:
            RefusedError: it did, but the row has changed since.
        """
        if row.index not in self._journal:
            return False
        if self._journal.checksum(row.index) != row.checksum:
            raise changed_row(row)
        self._finish(row)
        self.num_recovered += 1
        return True

    def put(self, row: Row, record: Record) -> None:
        """Take one finished row; the next `flush` makes it safe from a crash of this process."""
        self._unwritten.append(record)
        self._finish(row)

    def flush(self) -> None:
        """Write what was put into the journal.

        Raises:
            CbgenError: the disk is full or the file cannot be written.
        """
        if self._unwritten:
            with named_disk_errors(self._output):
                self._journal.append(self._unwritten)
            self._unwritten = []

    def _finish(self, row: Row) -> None:
        self._positions[row.index] = row.next_position
        self._uncommitted += 1
        while self.head in self._positions:
            self.head += 1

    def tick(self) -> None:
        """Flush, and commit when it is time to; called once a step."""
        self.flush()
        if self._uncommitted and (time.monotonic() >= self._next_commit or self._uncommitted >= _COMMIT_ROWS):
            self.commit()
            self._next_commit = time.monotonic() + max(_COMMIT_SECONDS, self._waited / _MAX_COMMIT_SHARE)

    def commit(self) -> None:
        """Move the rows that are next in line onto the tape and make everything finished survive a power cut.

        Raises:
            CbgenError: the disk is full or the file cannot be written.
            RefusedError: another run took this output over.
        """
        self.flush()
        self._sidecar.lock.renew()
        with named_disk_errors(self._output):
            started = time.monotonic()
            self._journal.sync()
            self._waited = time.monotonic() - started
            while True:
                self._drain()
                if not self._seal_if_full():
                    break
            self._journal.prune(self.state.rows)
        self._uncommitted = 0

    def _drain(self) -> None:
        """Append rows up to the head, or to where the next part begins, and commit them."""
        size, state = self._output.rows_per_part, self.state
        end = self.head if size is None else min(self.head, max(state.base_rows + size, state.rows))
        state = self._append(state, end)
        started = time.monotonic()
        mark = self._output.sync()
        self._commit(replace(state, num_bytes=mark.num_bytes, crc=mark.crc, mtime_ns=mark.mtime_ns))
        self._waited += time.monotonic() - started

    def _append(self, state: State, end: int) -> State:
        digest, good_digest, position = state.digest, state.good_digest, state.position
        tally = replace(state.tally, errors=dict(state.tally.errors))
        lines: list[bytes] = []
        pending = 0
        for index in range(state.rows, end):  # a journalled row counts once its input was read and found unchanged
            record = self._journal.pop(index)
            position = self._positions.pop(index)
            digest = add_row(digest, index, record.checksum)
            if record.error_code is None:
                good_digest = add_row(good_digest, index, record.checksum)
            tally.add(record.error_code, record.prompt_tokens, record.completion_tokens)
            lines.append(record.payload)
            pending += len(record.payload)
            if pending >= _APPEND_BYTES:
                self._output.append(lines)
                lines, pending = [], 0
        self._output.append(lines)
        return replace(
            state, rows=max(end, state.rows), digest=digest, good_digest=good_digest, position=position, tally=tally
        )

    def _seal_if_full(self) -> bool:
        """Seal the tape when it holds a whole part; whether it did."""
        state, size = self.state, self._output.rows_per_part
        if size is None or state.rows - state.base_rows < size:
            return False
        self._output.seal(state.base_rows)
        self._commit(replace(state, base_rows=state.rows, num_bytes=0, crc=0, mtime_ns=0))
        self._output.tape.clear()
        self._output.share("state.json")
        return True

    def _commit(self, state: State) -> None:
        self.state = replace(state, signatures=self._signatures)
        self._sidecar.write_state(self.state)

    def finish(self) -> None:
        """The last commit, and the output's final form. The journal goes, unless it holds rows past the end of this
        run's input (or --limit).
        """
        self.commit()
        with named_disk_errors(self._output):
            self._output.finish(self.state.base_rows)
            self._output.share("state.json")
            if not len(self._journal):
                self._journal.remove()

    def __enter__(self) -> OrderedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._output.close()
        self._journal.close()
        if kind is None:
            with named_disk_errors(self._output):
                self._sidecar.write_state(replace(self.state, closed=True))


def changed_row(row: Row) -> RefusedError:
    """The refusal of a row that is not the one which was answered."""
    return RefusedError(
        f"{row.place} has changed since this output was begun; put the input back, choose another -o, or start "
        "anew with --overwrite"
    )
