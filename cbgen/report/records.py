"""`--json`: what a run tells programs, as one strict JSON object a line on stdout.

    {"type": "start", "version": 1, ...}    once the settings in force are known
    {"type": "progress", "rows": 12, ...}   at intervals
    {"type": "done", ...}                   the summary; of a run that was stopped, too
    {"type": "error", "exit_code": 4, "message": "..."}     why it was stopped, broke, or did not begin
    {"type": "verified", "message": "..."}  all that a run with --verify has to say, unless it is an error

Enters: values of the run. Nothing here decides anything, and a reader that went away does not end the run.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict
from typing import Any, TextIO

from cbgen.report.progress import Snapshot

RECORDS_VERSION = 1


class JsonRecords:
    """Writes records, each flushed at once."""

    def __init__(self, stream: TextIO | None = None, interval_seconds: float = 30.0) -> None:
        self._stream = stream if stream is not None else sys.stdout  # None when it was closed at start
        self._interval = interval_seconds
        self._started = time.monotonic()
        self._next = self._started + interval_seconds

    def start(self, settings: dict[str, Any]) -> None:
        """The settings in force, before the first row."""
        self._write({"type": "start", "version": RECORDS_VERSION, **settings})

    def is_due(self) -> bool:
        """Whether an interval has passed since the last progress record."""
        return time.monotonic() >= self._next

    def progress(self, snapshot: Snapshot) -> None:
        """The run at one moment."""
        now = time.monotonic()
        self._next = now + self._interval
        self._write({"type": "progress", "seconds": round(now - self._started, 3), **asdict(snapshot)})

    def done(self, summary: dict[str, Any]) -> None:
        """The summary of a run that came to its end."""
        self._write({"type": "done", **summary})

    def verified(self, message: str) -> None:
        """An output was found intact."""
        self._write({"type": "verified", "message": message})

    def error(self, exit_code: int, message: str) -> None:
        """Why a run ended early or did not begin."""
        self._write({"type": "error", "exit_code": exit_code, "message": message})

    def _write(self, record: dict[str, Any]) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(json.dumps(strict(record), allow_nan=False) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # the reader has gone, or the stream is closed
            self._stream = None


def strict(value: Any) -> Any:
    """The value as JSON knows it: NaN and infinity are null, lone surrogates a question mark, the unknown its text."""
    if isinstance(value, dict):
        return {strict(str(key)): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [strict(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return str(value).encode("utf-8", "replace").decode("utf-8")
