"""Everyone who is told how a run goes: people on stderr, programs on stdout, GitHub. One object for the loop.

Enters: notes, snapshots, failed rows, the summary. Leaves: lines and files; nothing here decides anything or fails
a run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from cbgen.config import ReportConfig
from cbgen.report.github import GitHubReport, runs_here
from cbgen.report.metrics import format_summary
from cbgen.report.progress import Progress, Snapshot
from cbgen.report.records import JsonRecords


class Reports:
    """Progress lines, and what else was asked for. A context manager.

    Args:
        config: who is to be told.
        redact: takes credentials out of text.
    """

    def __init__(self, config: ReportConfig, redact: Callable[[str], str] = str) -> None:
        self._progress = Progress(config.progress_seconds, mode=config.progress, redact=redact)
        self._records = JsonRecords(interval_seconds=config.progress_seconds) if config.json else None
        self._github = GitHubReport(self.note, redact=redact) if runs_here(config.github) else None

    def __enter__(self) -> Reports:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def note(self, text: str) -> None:
        """A line for people."""
        self._progress.note(text)

    def start(self, settings: dict[str, Any]) -> None:
        """The settings in force."""
        if self._records is not None:
            self._records.start(settings)

    def verified(self, text: str) -> None:
        """An output was found intact."""
        self.note(text)
        if self._records is not None:
            self._records.verified(text)

    def row_failed(self, file: str, line: int | None, code: str, message: str) -> None:
        """A row that became an error."""
        if self._github is not None:
            self._github.add_error(file, line, code, message)

    def update(self, snapshot: Callable[[], Snapshot]) -> None:
        """Called after every step; takes a snapshot only when one is shown."""
        if self._progress.is_due():
            self._progress.update(snapshot())
        if self._records is not None and self._records.is_due():
            self._records.progress(snapshot())

    def done(self, output: str, summary: dict[str, Any]) -> None:
        """The run came to its end, or was stopped."""
        self.note(f"{output}\n{format_summary(summary)}")
        if self._records is not None:
            self._records.done(summary)
        if self._github is not None:
            self._github.finish(summary)
