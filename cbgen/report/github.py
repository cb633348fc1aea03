"""GitHub Actions: a table in the step summary, and annotations at the input lines whose rows failed.

Enters: the failed rows of a run as they come, of which only the first few are kept, and the summary at its end. Leaves:
Markdown, appended to the file that `GITHUB_STEP_SUMMARY` names, and workflow commands on stderr, where GitHub reads
them too; stdout is for data. GitHub shows ten annotations of a kind in one step. Nothing here can fail a run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from cbgen.report.progress import printable

Level = Literal["error", "warning"]
_NUM_SHOWN = 9  # the tenth annotation says how many more there are
_SUMMARY_BYTES = 60_000
_MESSAGE_LENGTH = 500


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row's error and its place; `line` is None where the input has no lines."""

    file: str
    line: int | None
    code: str
    message: str


def runs_here(asked: bool | None) -> bool:
    """Whether to report to GitHub: as asked, or because GitHub Actions runs this."""
    return os.environ.get("GITHUB_ACTIONS") == "true" if asked is None else asked


class GitHubReport:
    """Collects failed rows of one run and reports at its end.

    Args:
        note: told when the step summary cannot be written.
        stream: stderr if not given.
        redact: applied to every message and path before it is shown.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        stream: TextIO | None = None,
        redact: Callable[[str], str] = str,
    ) -> None:
        self._note = note
        self._stream = stream if stream is not None else sys.stderr
        self._redact = redact
        self._first: list[FailedRow] = []
        self._num_failed = 0

    def add_error(self, file: str, line: int | None, code: str, message: str) -> None:
        """One failed row."""
        self._num_failed += 1
        if len(self._first) < _NUM_SHOWN:
            self._first.append(FailedRow(self._redact(file), line, code, self._redact(message)))

    def finish(self, summary: dict[str, Any]) -> None:
        """Annotate the failed rows, and append the table to the step summary."""
        self._print(format_annotations(self._first, self._num_failed, os.environ.get("GITHUB_WORKSPACE", "")))
        self._append(self._redact(format_step_summary(summary, self._first)))

    def fail(self, message: str, level: Level = "error") -> None:
        """The run ended early: one annotation with the reason."""
        self._print([format_annotation(self._redact(message), level=level)])

    def _print(self, lines: list[str]) -> None:
        if self._stream is None or not lines:
            return
        with contextlib.suppress(OSError, ValueError):
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()

    def _append(self, text: str) -> None:
        path = os.environ.get("GITHUB_STEP_SUMMARY")
        if not path:
            return
        try:
            with Path(path).open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except (OSError, ValueError) as error:
            self._note(f"the step summary cannot be written to {path}: {getattr(error, 'strerror', error)}")


# -- pure -------------------------------------------------------------------------------------------------------------


def escape_data(text: str) -> str:
    """A message as a workflow command carries it, on one line."""
    return printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def escape_property(text: str) -> str:
    """A property, such as a file name, as a workflow command carries it."""
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def format_annotation(message: str, file: str = "", line: int | None = None, level: Level = "error") -> str:
    """One annotation; without a file it belongs to the whole step."""
    properties = [f"file={escape_property(file)}"] if file else []
    if file and line is not None:
        properties.append(f"line={line}")
    return f"::{level}{' ' if properties else ''}{','.join(properties)}::{escape_data(_shortened(message))}"


def format_annotations(rows: list[FailedRow], num_failed: int, workspace: str = "") -> list[str]:
    """One annotation for each row, and one more for the number of those that are not shown."""
    lines = [format_annotation(row.message, _in_workspace(row.file, workspace), row.line) for row in rows]
    more = num_failed - len(rows)
    if more > 0:
        failed = "row" if more == 1 else "rows"
        lines.append(format_annotation(f"and {more:,} more {failed} failed, see the step summary"))
    return lines


def format_step_summary(summary: dict[str, Any], rows: list[FailedRow]) -> str:
    """Markdown: figures of the run in one table, its first failed rows in another."""
    state = "complete" if summary["complete"] else "stopped; the same command continues"
    facts = [
        ("output", f"{_cell(str(summary['settings'].get('output', '')))} ({state})"),
        ("rows", f"{summary['rows']:,}: {summary['rows_ok']:,} ok, {summary['rows_failed']:,} failed"),
        *((f"failed: {code}", f"{count:,}") for code, count in summary["errors"].items()),
        ("tokens", f"{summary['prompt_tokens']:,} in, {summary['completion_tokens']:,} out"),
        ("throughput", f"{summary['output_tokens_per_second']:,.0f} tok/s out"),
        ("time", f"{summary['load_seconds']:,.1f} s to load, {summary['total_seconds']:,.1f} s in all"),
    ]
    lines = ["### cbgen", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts)]
    if rows:
        lines += ["", "| first failed rows | code | message |", "|---|---|---|"]
        lines += [f"| {_cell(_place(row))} | {row.code} | {_cell(_shortened(row.message))} |" for row in rows]
    text = "\n".join(lines) + "\n\n"
    return text if len(text.encode("utf-8", "replace")) < _SUMMARY_BYTES else _cut(text)


def _place(row: FailedRow) -> str:
    return row.file if row.line is None else f"{row.file} line {row.line}"


def _cell(text: str) -> str:
    """Text that cannot end a table's cell, or begin markup of its own."""
    text = printable(text.replace("\r", " ").replace("\n", " "))
    return "".join(f"&#{ord(character)};" if character in "&<>|`[*\\" else character for character in text)


def _shortened(text: str) -> str:
    return text if len(text) <= _MESSAGE_LENGTH else f"{text[:_MESSAGE_LENGTH]}..."


def _cut(text: str) -> str:
    """As many whole lines as fit."""
    lines, size = [], 0
    for line in text.splitlines():
        size += len(line.encode("utf-8", "replace")) + 1
        if size > _SUMMARY_BYTES:
            break
        lines.append(line)
    return "\n".join([*lines, "", ""])


def _in_workspace(file: str, workspace: str) -> str:
    """The path from the root of the checkout, as annotations need it; empty for what is no file."""
    if file in ("", "-") or "://" in file:
        return ""
    relative = os.path.relpath(file, workspace) if workspace else file
    return file if relative.startswith("..") else relative
