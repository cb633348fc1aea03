"""SIGTERM and SIGINT: the first one stops the run cleanly, the second one at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from cbgen.errors import EXIT_SECOND_SIGNAL, Stopped

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Remembers that a signal came. A context manager; handlers are only set in the main thread.

    Attributes:
        requested: name of the signal, or empty.
        raise_at_once: while True (as it is until generation starts) the first signal raises `Stopped` where it hits:
            nothing needs to be saved, and loading a model can take minutes.
    """

    def __init__(self) -> None:
        self.requested = ""
        self.raise_at_once = True
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(EXIT_SECOND_SIGNAL)  # finished rows are in the journal; the next run puts them in place
        self.requested = signal.Signals(number).name
        if self.raise_at_once:
            raise Stopped(f"stopped by {self.requested} before the first row; the same command starts again")
