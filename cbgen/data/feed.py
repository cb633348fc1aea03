"""The read-ahead thread: rows are read, rendered and tokenized in batches while the engine computes.

Enters: an iterator of rows and a `PromptBuilder`. Leaves: prompts (or rows with errors) in order, from a short queue,
so that memory stays bounded and a slow engine holds the reader back. If the thread fails, the feed ends
there and says why.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from cbgen.data.prompts import PromptBuilder
from cbgen.errors import CbgenError
from cbgen.records import Prompt, Row

Item = Prompt | Row
_BATCH_ROWS = 64
_BATCH_BYTES = 4 << 20  # of text in the rows
_FIRST_BATCH_ROWS = 8  # the engine starts on these while the next ones are tokenized
_MAX_BATCHES = 4
_POLL_SECONDS = 0.1


class PromptFeed:
    """Ordered prompts from a background thread. Use as a context manager; leaving it ends the thread.

    Attributes:
        exhausted: nothing more will come.
        failure: what stopped the thread before the end of the input, if anything did.
    """

    def __init__(self, rows: Iterator[Row], builder: PromptBuilder) -> None:
        self.exhausted = False
        self.failure: BaseException | None = None
        self._batches: queue.Queue[list[Item] | BaseException | None] = queue.Queue(_MAX_BATCHES)
        self._ready: deque[Item] = deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(rows, builder), name="prompt-feed", daemon=True)

    def __enter__(self) -> PromptFeed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def peek(self, *, wait: bool) -> Item | None:
        """The next item without taking it. None when there is none: for ever if `exhausted`, else not yet.

        Args:
            wait: wait a moment for the thread if nothing is ready.
        """
        if not self._ready and not self.exhausted:
            lives = self._thread.is_alive()  # asked first: what it put before it died is still taken
            try:
                batch = self._batches.get(timeout=_POLL_SECONDS) if wait and lives else self._batches.get_nowait()
            except queue.Empty:
                if lives:
                    return None
                batch = CbgenError("the thread that reads prompts died; the same command continues")
            if isinstance(batch, list):
                self._ready.extend(batch)
            else:
                self.exhausted, self.failure = True, batch
        return self._ready[0] if self._ready else None

    def take(self) -> Item:
        """Remove and return what `peek` returned."""
        return self._ready.popleft()

    def _work(self, rows: Iterator[Row], builder: PromptBuilder) -> None:
        try:
            size, failure = _FIRST_BATCH_ROWS, None
            while failure is None:
                batch, failure = _next_rows(rows, size)
                if not batch:
                    break
                if not self._put(builder.build(batch)):
                    return
                size = _BATCH_ROWS
            self._put(failure)
        except BaseException as error:  # handed over whole: the main thread decides what it means
            self._put(error)

    def _put(self, item: list[Item] | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._batches.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False


def _next_rows(rows: Iterator[Row], max_rows: int) -> tuple[list[Row], BaseException | None]:
    """The next rows, fewer where they are large; and what went wrong after them."""
    batch: list[Row] = []
    num_bytes = 0
    try:
        for row in rows:
            batch.append(row)
            num_bytes += memory_of(row.columns)
            if len(batch) == max_rows or num_bytes >= _BATCH_BYTES:
                break
    except BaseException as error:
        return batch, error
    return batch, None


def memory_of(value: Any) -> int:
    """About what a value takes in memory."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(memory_of, value.values()))
    if isinstance(value, list):
        # Numbers come in long lists, and a look at each would cost more than it tells.
        return 8 * len(value) if value and isinstance(value[0], int | float) else sum(map(memory_of, value))
    return 8
