"""Progress: plain lines where nobody watches, a live line on a terminal, and an honest estimate of what is left."""

import io
import re
from typing import Any

import pytest

from cbgen.report import progress as progress_module
from cbgen.report.progress import Progress, Snapshot, is_live, printable


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Stands in for the time module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)


def snapshot(**changes: Any) -> Snapshot:
    facts: dict[str, Any] = {
        "rows": 1234,
        "errors": 0,
        "prompt_tokens": 0,
        "output_tokens": 0,
        "running": 3,
        "waiting": 4,
        "kv_usage": 0.5,
        "head": 0,
        "fraction": None,
    }
    return Snapshot(**{**facts, **changes})


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


# -- where it prints --------------------------------------------------------------------------------------------------


def test_without_a_terminal_there_are_plain_lines_and_no_control_characters() -> None:
    stream = io.StringIO()

    with Progress(30, stream) as progress:
        progress.note("loading")
        progress.update(snapshot(fraction=0.25, errors=2))
        progress.update(snapshot(fraction=0.5))

    text = stream.getvalue()
    assert len(lines_of(stream)) == 3
    assert text.endswith("\n")
    assert not re.search(r"[^\n -~]", text)


def test_in_ci_even_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    stream = Terminal()

    with Progress(30, stream) as progress:
        progress.update(snapshot())

    assert not re.search(r"[^\n -~]", stream.getvalue())
    assert len(lines_of(stream)) == 1


def test_terminal_gets_one_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    no_ci(monkeypatch)
    stream = Terminal()

    with Progress(30, stream) as progress:
        progress.update(snapshot(rows=1))
        progress.note("a note")
        progress.update(snapshot(rows=2))

    assert "\r" in stream.getvalue()
    assert "a note\n" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("terminal", "ci", "term", "live"),
    [
        (True, None, "xterm", True),
        (True, "", "xterm", True),
        (True, "true", "xterm", False),
        (True, "1", "xterm", False),
        (True, None, "dumb", False),
        (False, None, "xterm", False),
    ],
)
def test_live_means_a_terminal_that_can_redraw_and_no_ci(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, ci: str | None, term: str, live: bool
) -> None:
    no_ci(monkeypatch)
    monkeypatch.setenv("TERM", term)
    if ci is not None:
        monkeypatch.setenv("CI", ci)

    assert is_live(Terminal() if terminal else io.StringIO()) is live


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(30).note("hello")

    assert capsys.readouterr() == ("", "hello\n")


# -- when it prints ---------------------------------------------------------------------------------------------------


def test_plain_line_is_due_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    progress = Progress(30, io.StringIO())

    assert not progress.is_due()
    clock.now += 29.9
    assert not progress.is_due()
    clock.now += 0.2
    assert progress.is_due()
    progress.update(snapshot())
    assert not progress.is_due()
    clock.now += 30
    assert progress.is_due()


def test_live_line_is_due_several_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    no_ci(monkeypatch)
    clock = Clock(monkeypatch)
    progress = Progress(30, Terminal())

    clock.now += 0.1
    assert not progress.is_due()
    clock.now += 0.2
    assert progress.is_due()


# -- what it says -----------------------------------------------------------------------------------------------------


def updates(monkeypatch: pytest.MonkeyPatch, *steps: tuple[float, dict[str, Any]]) -> list[str]:
    """Lines of updates at so many seconds after the start."""
    clock, stream = Clock(monkeypatch), io.StringIO()
    progress = Progress(10, stream)
    start = clock.now
    for seconds, changes in steps:
        clock.now = start + seconds
        progress.update(snapshot(**changes))
    return lines_of(stream)


def test_line_names_rows_queue_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = updates(monkeypatch, (10, {}))

    assert "1,234 rows" in line
    assert "running 3 waiting 4" in line
    assert "kv 50%" in line
    assert "errors" not in line
    assert "eta" not in line


def test_errors_are_counted_once_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = updates(monkeypatch, (10, {"errors": 1200}))

    assert "errors 1,200" in line


def test_speed_is_of_the_last_seconds_beside_the_overall_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [{"output_tokens": 1000, "prompt_tokens": 500}, {"output_tokens": 1000, "prompt_tokens": 500}]

    first, *_, last = updates(monkeypatch, (10, tokens[0]), *((10 + 5 * n, tokens[1]) for n in range(1, 8)))

    assert "100 tok/s out (100 overall), 50 in" in first
    assert "0 tok/s out (22 overall), 0 in" in last


def test_row_that_holds_the_output_is_named_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = updates(monkeypatch, (10, {"head": 7}), (14, {"head": 7}), (22, {"head": 7}), (23, {"head": 8}))

    assert [re.findall(r"row 7 holds the output for \d+ s", line) for line in lines] == [
        [], [], ["row 7 holds the output for 12 s"], [],
    ]  # fmt: skip


def test_estimate_is_unknown_until_something_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = updates(monkeypatch, (10, {"fraction": 0.4}), (20, {"fraction": 0.4}))

    assert [line.endswith("eta ?") for line in lines] == [True, True]
    assert lines[0].startswith(" 40% | ")


def test_estimate_after_a_resume_counts_only_what_this_run_did(monkeypatch: pytest.MonkeyPatch) -> None:
    _, line = updates(monkeypatch, (0, {"fraction": 0.5}), (100, {"fraction": 0.6}))

    assert line.endswith("eta 6:40")  # a tenth in 100 s, four tenths are left


def test_estimate_leaves_out_the_time_before_the_first_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    _, line = updates(monkeypatch, (100, {"fraction": 0.5}), (110, {"fraction": 0.6}))  # 100 s to load the model

    assert line.endswith("eta 0:40")


def test_long_estimate_is_in_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    _, line = updates(monkeypatch, (0, {"fraction": 0.0}), (100, {"fraction": 0.01}))

    assert line.endswith("eta 2:45:00")


def test_finished_run_has_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    _, line = updates(monkeypatch, (0, {"fraction": 0.0}), (100, {"fraction": 1.0}))

    assert line.startswith("100% | ")
    assert line.endswith("eta 0:00")


def test_a_stream_that_went_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with Progress(0.1, Gone()) as progress:
        progress.note("nobody reads this")


def test_a_closed_stderr_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with Progress(0.1) as progress:
        progress.note("nobody reads this")


# -- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "terminal", "environment", "live"),
    [
        ("auto", True, {}, True),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"CI": "1"}, False),
        ("auto", False, {"FORCE_COLOR": "1"}, False),
        ("bar", True, {}, True),
        ("bar", True, {"NO_COLOR": "1"}, True),
        ("bar", True, {"CI": "1"}, False),
        ("bar", True, {"TERM": "dumb"}, False),
        ("bar", False, {"FORCE_COLOR": "1"}, False),
        ("plain", True, {}, False),
        ("none", True, {}, False),
    ],
)
def test_a_live_line_needs_a_terminal_that_can_and_a_mode_that_wants(
    monkeypatch: pytest.MonkeyPatch, mode: Any, terminal: bool, environment: dict[str, str], live: bool
) -> None:
    no_ci(monkeypatch)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Terminal() if terminal else io.StringIO()

    with Progress(30, stream, mode) as progress:
        progress.update(snapshot(rows=7))
        progress.note("a note")

    assert bool(re.search(r"[^\n -~]", stream.getvalue())) is live
    assert ("7 rows" in stream.getvalue()) is (mode != "none")
    assert "a note\n" in stream.getvalue()


def test_no_progress_is_never_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    progress = Progress(30, io.StringIO(), "none")
    clock.now += 1000

    assert not progress.is_due()


def test_notes_are_redacted_and_cannot_steer_a_terminal() -> None:
    stream = io.StringIO()

    Progress(30, stream, redact=lambda text: text.replace("secret", "***")).note("a secret\x1b[2J\r\x9b\tx\ny")

    assert stream.getvalue() == "a ***\\x1b[2J\\x0d\\x9b\tx\ny\n"
    assert printable("caf\u00e9 \U0001f600") == "caf\u00e9 \U0001f600"


@pytest.mark.parametrize("mode", ["auto", "plain", "none"])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), ValueError("closed"), OSError(5, "gone")])
def test_a_terminal_that_went_away_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, mode: Any, error: Exception
) -> None:
    no_ci(monkeypatch)

    class Flaky(Terminal):
        broken = False

        def write(self, text: str) -> int:
            if self.broken:
                raise error
            return super().write(text)

    stream = Flaky()
    with Progress(0.1, stream, mode) as progress:
        stream.broken = True
        progress.update(snapshot())
        progress.note("nobody reads this")


def test_a_stream_that_is_closed_is_no_terminal() -> None:
    stream = io.StringIO()
    stream.close()

    Progress(0.1, stream).note("nobody reads this")
