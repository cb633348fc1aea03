"""Finished rows to the output file: in input order, once each, surviving a crash at any instruction.

`OrderedWriter` takes rows in any order, puts them into the journal at once, and on a commit moves the rows that are
next in line into the output. Invariants: I1 out[0:num_bytes] is exactly rows 0..rows-1. I2 state.json never names bytes
that were not fsynced before it. I3 a row is finished iff its index is below `rows` or the journal holds it intact. I4 a
journal segment is removed only after a durable state makes it useless. I5 recovery is: lock, compare fingerprints, cut
the output to `num_bytes`, read the journal, go on; a crash during recovery changes nothing.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from cbgen.data.journal import Journal, Record
from cbgen.data.sidecar import Sidecar, State, chain, named_disk_errors
from cbgen.errors import RefusedError
from cbgen.records import Position, Row

_COMMIT_SECONDS = 1.0
_MAX_COMMIT_SHARE = 0.05  # of wall time; a slow filesystem commits less often instead of stalling the engine
_DRAIN_BYTES = 4 << 20


class OrderedWriter:
    """Takes finished rows in any order; commits the gap-free prefix.

    Args:
        sidecar: locked, its output already repaired to `state.num_bytes`.
        state: what is committed.
        signatures: of the inputs, stored with each commit.
    """

    def __init__(self, sidecar: Sidecar, state: State, signatures: list[Any]) -> None:
        self.state = state
        self.head = state.rows  # the first row that is not finished
        self.num_recovered = state.rows  # rows that earlier runs finished
        self._sidecar = sidecar
        self._signatures = signatures
        with named_disk_errors(sidecar.output):
            sidecar.write_state(state)  # after a repair the one on disk still names rows that were cut off
            self._journal = Journal(sidecar.directory, state.rows)
            self._output = os.open(sidecar.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._positions: dict[int, Position] = {}  # finished row -> where the next one starts
        self._next_commit = time.monotonic() + _COMMIT_SECONDS
        self._uncommitted = 0

    @property
    def num_finished(self) -> int:
        """Rows that will never be generated again: in the output, or waiting in the journal."""
        return self.state.rows + len(self._journal)

    def recovered(self, row: Row) -> bool:
        """Whether an earlier run finished this row; call it for every row read.

        Raises:
            RefusedError: it did, but the row has changed since.
        """
        if row.index not in self._journal:
            return False
        if self._journal.checksum(row.index) != row.checksum:
            raise RefusedError(
                f"{row.place} has changed since this output was begun; put the input back, choose another -o, or start "
                "anew with --overwrite"
            )
        self._finish(row)
        self.num_recovered += 1
        return True

    def put(self, row: Row, record: Record) -> None:
        """Make one finished row safe from a crash of this process.

        Raises:
            CbgenError: the disk is full or the file cannot be written.
        """
        with named_disk_errors(self._sidecar.output):
            self._journal.append(record)
        self._finish(row)

    def _finish(self, row: Row) -> None:
        self._positions[row.index] = row.next_position
        self._uncommitted += 1
        while self.head in self._positions:
            self.head += 1

    def tick(self) -> None:
        """Commit when it is time to; called once a step."""
        now = time.monotonic()
        if self._uncommitted and now >= self._next_commit:
            self.commit()
            took = time.monotonic() - now
            self._next_commit = now + took + max(_COMMIT_SECONDS, took / _MAX_COMMIT_SHARE)

    def commit(self) -> None:
        """Move the rows that are next in line into the output and make everything finished survive a power cut.

        Raises:
            CbgenError: the disk is full or the file cannot be written.
        """
        with named_disk_errors(self._sidecar.output):
            self._journal.sync()
            state = self._drain()
            os.fsync(self._output)
            self.state = replace(state, signatures=self._signatures)
            self._sidecar.write_state(self.state)
            self._journal.prune(self.state.rows)
        self._uncommitted = 0

    def _drain(self) -> State:
        rows, num_bytes, digest = self.state.rows, self.state.num_bytes, self.state.digest
        position, tally = self.state.position, replace(self.state.tally, errors=dict(self.state.tally.errors))
        parts: list[bytes] = []
        pending = 0
        while rows < self.head:  # a journalled row counts once its input was read again and found unchanged
            record = self._journal.pop(rows)
            position = self._positions.pop(rows)
            digest = chain(digest, record.checksum)
            tally.add(record.error_code, record.prompt_tokens, record.completion_tokens)
            parts += (record.payload, b"\n")
            pending += len(record.payload) + 1
            rows += 1
            if pending >= _DRAIN_BYTES:
                num_bytes += self._append(parts)
                parts, pending = [], 0
        num_bytes += self._append(parts)
        return State(rows, num_bytes, position, digest, tally=tally)

    def _append(self, parts: list[bytes]) -> int:
        data = memoryview(b"".join(parts))
        size = len(data)
        while data:
            data = data[os.write(self._output, data) :]
        return size

    def finish(self) -> None:
        """The last commit. The journal goes, unless it holds rows past the end of this run's input (or --limit)."""
        self.commit()
        if not len(self._journal):
            self._journal.remove()

    def __enter__(self) -> OrderedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._output)
        self._journal.close()
