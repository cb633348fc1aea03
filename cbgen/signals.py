"""Signals: the first SIGINT, SIGTERM or SIGHUP stops the run cleanly, a second one at once; SIGUSR1 asks for a commit.

Enters: signals, in the main thread. Leaves: two flags that the loop reads between steps.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from cbgen.errors import EXIT_SECOND_SIGNAL, Stopped

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Remembers that a signal came. A context manager; handlers are only set in the main thread.

    Attributes:
        requested: name of the signal, or empty.
        commit_requested: SIGUSR1 came, as schedulers send it before they take a machine away.
        raise_at_once: while True (as it is until generation starts) the first signal raises `Stopped` where it hits:
            nothing needs to be saved, and loading a model can take minutes.
    """

    def __init__(self) -> None:
        self.requested = ""
        self.commit_requested = False
        self.raise_at_once = True
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _STOP:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
                    self._previous[number] = signal.signal(number, self._handle)
            self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._ask_for_commit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def take_commit_request(self) -> bool:
        """Whether a commit was asked for since the last call."""
        asked, self.commit_requested = self.commit_requested, False
        return asked

    def _ask_for_commit(self, number: int, frame: FrameType | None) -> None:
        self.commit_requested = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGHUP:  # a terminal that goes away says so twice: the kernel does, and the shell
                return
            os._exit(EXIT_SECOND_SIGNAL)  # finished rows are in the journal; the next run puts them in place
        self.requested = signal.Signals(number).name
        if self.raise_at_once:
            raise Stopped(f"stopped by {self.requested} before the first row; the same command starts again")
