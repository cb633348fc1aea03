"""Reports to GitHub Actions: escaping, ten annotations at most, a table below 64 KiB, and no failure of its own."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.report.github import (
    FailedRow,
    GitHubReport,
    escape_data,
    escape_property,
    format_annotation,
    format_annotations,
    format_step_summary,
    runs_here,
)
from cbgen.report.metrics import summarize
from tests.report.test_metrics import run_of


def summary_of(**changes: Any) -> dict[str, Any]:
    return {**summarize(run_of(settings={"output": "out.jsonl"})), **changes}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[GitHubReport, io.StringIO, Path, list[str]]:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    stream, notes = io.StringIO(), list[str]()
    return GitHubReport(notes.append, stream), stream, tmp_path / "summary.md", notes


@pytest.mark.parametrize(
    ("asked", "environment", "expected"),
    [(None, "true", True), (None, "", False), (False, "true", False), (True, "", True)],
)
def test_it_reports_where_actions_runs_it_or_when_asked(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, environment: str, expected: bool
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", environment)
    assert runs_here(asked) is expected


def test_an_annotation_names_file_and_line() -> None:
    assert format_annotation("bad: x, y", "prompts.jsonl", 6) == "::error file=prompts.jsonl,line=6::bad: x, y"
    assert format_annotation("bad", "data.parquet") == "::error file=data.parquet::bad"
    assert format_annotation("bad") == "::error::bad"


def test_messages_and_properties_are_escaped_as_github_reads_them() -> None:
    assert escape_data("100%\r\n::error::x") == "100%25%0D%0A::error::x"
    assert escape_property("a,b:c%") == "a%2Cb%3Ac%25"
    assert escape_data("\x1b[31m") == "\\x1b[31m"


@given(st.text(), st.text(), st.integers(0))
def test_whatever_a_row_holds_an_annotation_is_one_line(message: str, file: str, line: int) -> None:
    text = format_annotation(message, file, line)
    assert "\n" not in text
    assert "\r" not in text
    properties = re.match(r"::error(?: file=([^,:]*),line=\d+)?::", text)
    assert properties
    assert bool(properties.group(1) is not None) is bool(file)


def test_nine_rows_and_one_line_for_the_rest(
    report: tuple[GitHubReport, io.StringIO, Path, list[str]],
) -> None:
    github, stream, path, notes = report
    for number in range(1, 122):
        github.add_error("prompts.jsonl", number, "invalid_json", f"prompts.jsonl line {number}: bad")
    github.finish(summary_of())

    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "::error file=prompts.jsonl,line=1::prompts.jsonl line 1: bad"
    assert lines[9] == "::error::and 112 more rows failed, see the step summary"
    table = path.read_text()
    assert "| prompts.jsonl line 9 | invalid_json | prompts.jsonl line 9: bad |" in table
    assert "line 10" not in table
    assert notes == []


def test_one_more_row_is_singular_and_none_is_silence() -> None:
    row = FailedRow("a", 1, "x", "m")
    assert format_annotations([row], 2)[-1] == "::error::and 1 more row failed, see the step summary"
    assert len(format_annotations([row], 1)) == 1
    assert format_annotations([], 0) == []


def test_the_table_has_the_figures_of_the_run() -> None:
    text = format_step_summary(summary_of(), [])
    for cell in (
        "| output | out.jsonl (complete) |",
        "| rows | 100: 97 ok, 3 failed |",
        "| failed: prompt_too_long | 2 |",
        "| tokens | 5,000 in, 2,000 out |",
        "| throughput | 20 tok/s out |",
        "| time | 2.0 s to load, 63.0 s in all |",
    ):
        assert cell in text
    assert "stopped" in format_step_summary(summary_of(complete=False), [])


def test_a_row_cannot_break_out_of_its_cell() -> None:
    text = format_step_summary(summary_of(), [FailedRow("a|b", 1, "x", "one | two\n<b>`three`</b> [a](b)")])
    row = text.splitlines()[-2]
    assert row == "| a&#124;b line 1 | x | one &#124; two &#60;b&#62;&#96;three&#96;&#60;/b&#62; &#91;a](b) |"


def test_the_table_stays_below_64_kib_whatever_is_in_it() -> None:
    rows = [FailedRow("f" * 20_000, 1, "x", "m" * 100_000) for _ in range(9)]
    assert len(format_step_summary(summary_of(), rows).encode()) < 64 * 1024


def test_the_step_summary_is_appended_to(report: tuple[GitHubReport, io.StringIO, Path, list[str]]) -> None:
    github, _, path, _ = report
    path.write_text("before\n")
    github.finish(summary_of())
    assert path.read_text().startswith("before\n### cbgen\n")


def test_a_step_summary_that_cannot_be_written_is_a_note(
    report: tuple[GitHubReport, io.StringIO, Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    github, _, path, notes = report
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path.parent))
    github.finish(summary_of())
    assert len(notes) == 1
    assert "step summary" in notes[0]


def test_without_a_step_summary_there_are_annotations_only(
    report: tuple[GitHubReport, io.StringIO, Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    github, stream, path, notes = report
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    github.fail("disk full")
    github.finish(summary_of())
    assert stream.getvalue() == "::error::disk full\n"
    assert not path.exists()
    assert notes == []


def test_names_that_are_not_utf8_are_written_all_the_same(
    report: tuple[GitHubReport, io.StringIO, Path, list[str]],
) -> None:
    github, _, path, notes = report
    github.add_error("a\udcff.jsonl", 1, "invalid_json", "bad")
    github.finish(summary_of())
    assert "a?.jsonl line 1" in path.read_text()
    assert notes == []


def test_files_are_named_from_the_root_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    rows = [FailedRow(name, 1, "x", "m") for name in ("p.jsonl", str(tmp_path / "q.jsonl"), "/elsewhere/r.jsonl")]
    assert [line.split(",")[0] for line in format_annotations(rows, 3, str(tmp_path))] == [
        "::error file=sub/p.jsonl", "::error file=q.jsonl", "::error file=/elsewhere/r.jsonl",
    ]  # fmt: skip


@pytest.mark.parametrize("file", ["-", "", "s3://bucket/a.jsonl"])
def test_what_is_no_file_is_not_named_as_one(file: str) -> None:
    assert format_annotations([FailedRow(file, 3, "x", "m")], 1) == ["::error::m"]


def test_secrets_are_redacted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "s.md"))
    stream = io.StringIO()
    github = GitHubReport(lambda text: None, stream, redact=lambda text: text.replace("hunter2", "***"))
    github.add_error("a.jsonl", 1, "x", "password hunter2")
    github.finish(summary_of(settings={"output": "s3://k:hunter2@b"}))
    github.fail("hunter2")
    assert "hunter2" not in stream.getvalue() + (tmp_path / "s.md").read_text()


def test_a_closed_stderr_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    GitHubReport(lambda text: None).fail("x")
