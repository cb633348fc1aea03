"""Rows that failed, generated once more: the writer of `--retry-errors`.

Enters: new records of rows that are errors in the output, in any order. They wait in a journal of their own; the output
stays as it is until all of them are there, and then is rewritten with them in one step. A run that is stopped before
goes on with the same journal.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from cbgen.output.journal import Journal, Record
from cbgen.output.sidecar import Sidecar, named_disk_errors
from cbgen.output.state import State, add_row
from cbgen.records import Row

_COMMIT_SECONDS = 1.0


class RetryWriter:
    """Takes records of failed rows; `finish` puts them in place. The same methods as `OrderedWriter` has.

    Args:
        sidecar: locked, its output repaired.
        state: what is committed.
        failed: the rows that are tried again.
    """

    head = sys.maxsize  # no row waits for another one

    def __init__(self, sidecar: Sidecar, state: State, failed: frozenset[int]) -> None:
        self.state = state
        self.num_recovered = 0
        self._sidecar = sidecar
        self._failed = failed
        self._directory = sidecar.directory / "retry"
        self._unwritten: list[Record] = []
        self._next_commit = time.monotonic() + _COMMIT_SECONDS
        with named_disk_errors(sidecar.output):
            self._directory.mkdir(exist_ok=True)
            self._journal = Journal(self._directory, 0)

    @property
    def num_finished(self) -> int:
        """Rows of the output that need no more work."""
        return self.state.rows - len(self._failed) + len(self._journal) + len(self._unwritten)

    def recovered(self, row: Row) -> bool:
        """Whether this very row was tried again by a run that was stopped."""
        if row.index not in self._journal or self._journal.checksum(row.index) != row.checksum:
            return False
        self.num_recovered += 1
        return True

    def put(self, row: Row, record: Record) -> None:
        """Take one record; the next `flush` makes it safe."""
        self._unwritten.append(record)

    def flush(self) -> None:
        """Write what was put into the journal."""
        if self._unwritten:
            with named_disk_errors(self._sidecar.output):
                self._journal.append(self._unwritten)
            self._unwritten = []

    def tick(self) -> None:
        """Flush, and sync now and then; called once a step."""
        self.flush()
        if time.monotonic() >= self._next_commit:
            self.commit()

    def commit(self) -> None:
        """Make everything put survive a power cut."""
        self.flush()
        self._sidecar.lock.renew()
        with named_disk_errors(self._sidecar.output):
            self._journal.sync()
        self._next_commit = time.monotonic() + _COMMIT_SECONDS

    def finish(self) -> State:
        """Rewrite the output with the new records; the state that holds then."""
        self.commit()
        lines = _Lines(self._journal, self._failed)
        with named_disk_errors(self._sidecar.output):
            state = self._sidecar.output.rewrite(self._updated(), lines, self._sidecar.write_state)
            self._sidecar.write_state(state)
            shutil.rmtree(self._directory)
        return state

    def _updated(self) -> State:
        """Totals and digest with the new records: every error of the output was tried again."""
        tally, good_digest = replace(self.state.tally, errors={}), self.state.good_digest
        for index in sorted(self._failed):
            record = self._journal.peek(index)
            tally.prompt_tokens += record.prompt_tokens
            tally.completion_tokens += record.completion_tokens
            if record.error_code is None:
                good_digest = add_row(good_digest, index, record.checksum)
            else:
                tally.errors[record.error_code] = tally.errors.get(record.error_code, 0) + 1
        return replace(self.state, tally=tally, good_digest=good_digest)

    def __enter__(self) -> RetryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()


class _Lines(Mapping[int, bytes]):
    """The new lines by row index, read from the journal when they are asked for."""

    def __init__(self, journal: Journal, indices: frozenset[int]) -> None:
        self._journal = journal
        self._indices = indices

    def __getitem__(self, index: int) -> bytes:
        if index not in self._indices:
            raise KeyError(index)
        return self._journal.peek(index).payload

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._indices))

    def __len__(self) -> int:
        return len(self._indices)
