"""Telling people how a run goes: one live line on a terminal, one plain line per interval elsewhere. Always stderr.

Enters: a `Snapshot` after every step, most of which are ignored. Nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from tqdm import tqdm

Mode = Literal["auto", "bar", "plain", "none"]
_LIVE_SECONDS = 0.2
_RECENT_SECONDS = 10.0
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a run at one moment. Tokens and rows count from the start of this run.

    Attributes:
        rows: finished rows, earlier runs included.
        head: the first row that is not finished; it holds the output back.
        fraction: share of the input that is in the output, or None where it cannot be known.
    """

    rows: int
    errors: int
    prompt_tokens: int
    output_tokens: int
    running: int
    waiting: int
    kv_usage: float
    head: int
    fraction: float | None


class Progress:
    """Prints snapshots at a bearable rate. Use as a context manager.

    Args:
        interval_seconds: between plain lines.
        stream: stderr if not given.
        mode: `auto` and `bar` draw a live line where that is possible, `plain` never; `none` prints only notes.
        redact: applied to every text before it is shown.
    """

    def __init__(
        self,
        interval_seconds: float,
        stream: TextIO | None = None,
        mode: Mode = "auto",
        redact: Callable[[str], str] = str,
    ) -> None:
        self._stream: TextIO = stream or sys.stderr or io.StringIO()  # stderr is None when it was closed at start
        self._live = mode in ("auto", "bar") and is_live(self._stream, asked_for=mode == "bar")
        self._silent = mode == "none"
        self._redact = redact
        self._interval = _LIVE_SECONDS if self._live else interval_seconds
        self._started = time.monotonic()
        self._next = self._started + self._interval
        self._history: deque[tuple[float, int, int]] = deque()  # (time, prompt tokens, output tokens)
        self._head, self._head_since = -1, self._started
        self._first_fraction: tuple[float, float] | None = None
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Progress:
        if self._live:
            size = {"dynamic_ncols": True} if _knows_its_size(self._stream) else {"ncols": 100, "nrows": 20}
            self._bar = tqdm(total=1.0, file=self._stream, bar_format="{desc}", leave=False, **size)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()

    def note(self, text: str) -> None:
        """A line of its own that does not tear the live one. A reader that went away must not end the run."""
        self._print(printable(self._redact(text)))

    def is_due(self) -> bool:
        """Whether `update` would print; asked first, so that most steps do not even build a snapshot."""
        return not self._silent and time.monotonic() >= self._next

    def update(self, snapshot: Snapshot) -> None:
        """Print the snapshot."""
        if self._silent:
            return
        now = time.monotonic()
        self._next = now + self._interval
        line = self._format(snapshot, now)
        if self._bar is None:
            self._print(line)
            return
        with contextlib.suppress(OSError, ValueError):
            self._bar.set_description_str(line)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed, or cannot encode
            if self._bar is not None:
                self._bar.write(text, file=self._stream)
            else:
                self._stream.write(text + "\n")
                self._stream.flush()

    def _format(self, s: Snapshot, now: float) -> str:
        recent_in, recent_out = self._recent(s, now)
        overall = s.output_tokens / max(now - self._started, 1e-9)
        if s.head != self._head:
            self._head, self._head_since = s.head, now
        parts = [
            f"{s.rows:,} rows",
            f"{_short(recent_out)} tok/s out ({_short(overall)} overall), {_short(recent_in)} in",
            f"running {s.running} waiting {s.waiting}",
            f"kv {s.kv_usage:.0%}",
        ]
        if s.errors:
            parts.append(f"errors {s.errors:,}")
        if now - self._head_since > 5:
            parts.append(f"row {s.head:,} holds the output for {now - self._head_since:.0f} s")
        if s.fraction is not None:
            parts.insert(0, f"{s.fraction:4.0%}")
            parts.append(f"eta {self._eta(s.fraction, now)}")
        return " | ".join(parts)

    def _recent(self, s: Snapshot, now: float) -> tuple[float, float]:
        """(prompt, output) tokens per second over the last ten seconds or so."""
        history = self._history
        history.append((now, s.prompt_tokens, s.output_tokens))
        window = max(_RECENT_SECONDS, self._interval)
        while len(history) > 2 and history[1][0] < now - window:
            history.popleft()
        then, prompt_tokens, output_tokens = history[0] if len(history) > 1 else (self._started, 0, 0)
        seconds = max(now - then, 1e-9)
        return (s.prompt_tokens - prompt_tokens) / seconds, (s.output_tokens - output_tokens) / seconds

    def _eta(self, fraction: float, now: float) -> str:
        if self._first_fraction is None:
            self._first_fraction = now, fraction  # not zero: loading takes time, and a resumed run begins further on
        since, first = self._first_fraction
        if fraction <= first:
            return "?"
        seconds = int((1 - fraction) / (fraction - first) * (now - since))
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"


def is_live(stream: TextIO, *, asked_for: bool = False) -> bool:
    """A terminal that can redraw a line; CI systems may pretend to have one.

    Args:
        stream: where the line would be.
        asked_for: somebody said `bar`, which beats NO_COLOR.
    """
    try:
        terminal = stream.isatty()
    except ValueError:  # closed
        return False
    plain = os.environ.get("CI") or os.environ.get("TERM") == "dumb"
    return terminal and not plain and (asked_for or not os.environ.get("NO_COLOR"))


def _knows_its_size(stream: TextIO) -> bool:
    """Some terminals, as in containers, say they have no columns and no lines; there nothing would be shown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return True


def printable(text: str) -> str:
    """The text without control characters: what quotes a row or a file name must not steer a terminal."""
    return text.translate(_CONTROL)


def _short(number: float) -> str:
    return f"{number:.0f}" if number < 10_000 else f"{number / 1000:.1f}k"
