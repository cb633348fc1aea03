"""What a run tells: records on stdout, tables and annotations for GitHub, lines on stderr, and never a credential."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import Quick, SteadyEngine, strict_lines

REPOSITORY = Path(__file__).parent.parent
HUB_TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
API_KEY = "sk-proj-abcdefghijklmnopqrstuv"
ACCESS_KEY = "AKIAABCDEFGHIJKLMNOP"
PASSWORD = "correct-horse-battery"


@pytest.fixture
def quick(tmp_path):
    quick = Quick(tmp_path)
    quick.write([{"prompt": f"p{number}"} for number in range(12)])
    return quick


def records(outcome):
    return list(strict_lines(outcome.stdout))


def kinds(outcome):
    return [record["type"] for record in records(outcome)]


# -- records for programs ---------------------------------------------------------------------------------------------


def test_a_good_run_is_a_start_and_a_summary(quick):
    outcome = quick.run("--json")
    start, done = records(outcome)
    assert (outcome.code, start["type"], done["type"]) == (0, "start", "done")
    assert (start["version"], start["output"]) == (1, str(quick.path("out.jsonl")))
    assert start["sampling"]["max_tokens"] == 1024
    assert {"complete": True, "rows": 12, "rows_ok": 12, "errors": {}}.items() <= done.items()
    assert {key: done[key] for key in quick.summary()} == quick.summary()


def test_progress_comes_at_intervals(quick):
    quick.make_engine = lambda: quick.engine(SteadyEngine, slots=2, step_seconds=0.03)
    outcome = quick.run("--json", "--progress-interval", "0.1")
    found = records(outcome)
    progress = [record for record in found if record["type"] == "progress"]
    assert kinds(outcome) == ["start", *["progress"] * len(progress), "done"]
    assert len(progress) >= 2
    assert all(0 <= record["fraction"] <= 1 and record["running"] <= 2 for record in progress)
    rows = [record["rows"] for record in progress]
    assert rows == sorted(rows)


def test_a_run_with_error_rows_is_done_with_their_codes(quick):
    quick.write([{"prompt": "a"}, {"prompt": "~"}, "{cut"])
    outcome = quick.run("--json")
    assert (outcome.code, kinds(outcome)) == (3, ["start", "done"])
    assert records(outcome)[-1]["errors"] == {"invalid_json": 1, "nan_logits": 1}


def test_a_stopped_run_gives_its_summary_and_the_reason(quick):
    outcome = quick.run("--json", "--max-output-tokens", "1")
    start, done, error = records(outcome)
    assert (outcome.code, start["type"], done["type"], error["type"]) == (75, "start", "done", "error")
    assert done["complete"] is False
    assert error == {"type": "error", "exit_code": 75, "message": outcome.message}


@pytest.mark.parametrize(
    ("options", "code", "before"),
    [
        (("--limit", "x"), 2, []),
        (("--model", "./nowhere"), 5, []),
        (("--temperature", "-1"), 2, []),
        (("--fail-fast", "--fail-on-error", "0.5"), 2, []),
    ],
)
def test_a_run_that_does_not_begin_is_one_record(quick, options, code, before):
    outcome = quick.command("run", str(quick.path("in.jsonl")), "-o", str(quick.path("out.jsonl")), "--json", *options)
    assert outcome.code == code
    if options[0] == "--limit":  # click's own: before it is known that somebody listens
        assert outcome.stdout == ""
    else:
        assert records(outcome) == [*before, {"type": "error", "exit_code": code, "message": outcome.message}]


def test_a_run_that_breaks_is_a_start_and_an_error(quick):
    def before_step(step):
        if step == 4:
            raise RuntimeError("broken")

    quick.make_engine = lambda: quick.engine(SteadyEngine, before_step=before_step)
    outcome = quick.run("--json")
    assert (outcome.code, kinds(outcome)) == (1, ["start", "error"])
    assert records(outcome)[-1]["message"] == outcome.message


def test_a_run_with_nothing_to_do_is_done_too(quick):
    quick.run()
    outcome = quick.run("--json")
    assert (outcome.code, kinds(outcome)) == (0, ["start", "done"])
    assert records(outcome)[-1]["resumed_rows"] == 12


def test_an_output_that_is_verified_is_a_record(quick):
    quick.run()
    outcome = quick.run("--json", "--verify")
    (record,) = records(outcome)
    assert (outcome.code, record["type"]) == (0, "verified")
    assert record["message"] in outcome.stderr
    quick.path("out.jsonl").write_text("edited")
    assert kinds(quick.run("--json", "--verify")) == ["error"]


def test_stdout_is_empty_unless_asked_for(quick):
    assert quick.run().stdout == ""
    outcome = quick.run(output="-")
    assert [row["completion"] for row in records(outcome)] == [f"re:p{number}" for number in range(12)]


# -- GitHub -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def github(quick, monkeypatch):
    """As in a step of a workflow whose checkout is the directory; the summary's path."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(quick.directory))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(quick.path("summary.md")))
    return quick.path("summary.md")


def annotations(outcome):
    return [line for line in outcome.stderr.splitlines() if line.startswith("::")]


def test_failed_rows_are_annotated_at_their_lines(quick, github):
    quick.write(["", {"prompt": "a"}, {"prompt": "~"}, "", "{cut"], "data/my rows.jsonl")
    outcome = quick.run(quick.path("data/my rows.jsonl"))
    assert outcome.code == 3
    nan, cut = sorted(annotations(outcome))
    assert nan.startswith("::error file=data/my rows.jsonl,line=3::my rows.jsonl line 3: the model's logits")
    assert cut.startswith("::error file=data/my rows.jsonl,line=5::my rows.jsonl line 5: not valid JSON")
    text = github.read_text()
    assert "| rows | 3: 1 ok, 2 failed |" in text
    assert "| failed: nan_logits | 1 |" in text


def test_at_most_ten_annotations(quick, github):
    quick.write([{"prompt": "~"}] * 30)
    outcome = quick.run()
    assert len(annotations(outcome)) == 10
    assert annotations(outcome)[-1] == "::error::and 21 more rows failed, see the step summary"


def test_rows_of_parquet_are_annotated_without_a_line(quick, github):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["~"]}), quick.path("in.parquet"))
    (line,) = annotations(quick.run(quick.path("in.parquet")))
    assert line.startswith("::error file=in.parquet::in.parquet row 1: ")


def test_rows_cannot_forge_commands_or_markup(quick, github):
    evil = "x\n::error::forged\r::add-mask::a | <img src=x> `b` \x1b[31m"
    quick.write([{"messages": [{"role": "user", "content": [{"type": evil}]}]}], "in|<b>.jsonl")
    outcome = quick.run(quick.path("in|<b>.jsonl"))
    assert len(annotations(outcome)) == 1
    assert "\x1b" not in outcome.stderr
    rows = [line for line in github.read_text().splitlines() if "invalid_messages |" in line and "failed:" not in line]
    assert len(rows) == 1
    assert "<" not in rows[0]
    assert rows[0].count("|") == 4


def test_a_stop_is_a_warning_and_a_failure_an_error(quick, github):
    outcome = quick.run("--max-output-tokens", "1")
    assert annotations(outcome) == [f"::warning::{outcome.message}"]
    assert "stopped; the same command continues" in github.read_text()
    outcome = quick.run("--max-tokens", "3")
    (line,) = annotations(outcome)
    assert outcome.code == 4
    assert line.startswith("::error::")
    assert "sampling.max_tokens: 1024 before, 3 now" in line


def test_a_summary_that_cannot_be_written_is_a_note(quick, github, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(quick.directory))
    outcome = quick.run()
    assert outcome.code == 0
    assert "the step summary cannot be written" in outcome.stderr


def test_github_can_be_declined_and_asked_for(quick, github, monkeypatch):
    quick.write([{"prompt": "~"}])
    assert annotations(quick.run("--no-github")) == []
    assert not github.exists()
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert annotations(quick.run("--overwrite")) == []
    assert len(annotations(quick.run("--overwrite", "--github"))) == 1


# -- stderr -----------------------------------------------------------------------------------------------------------


def on_a_terminal(quick, *options, **environment):
    """What a terminal gets to see."""
    command = [sys.executable, "-m", "tests.quick", str(quick.directory), "0.05", "run", str(quick.path("in.jsonl"))]
    command += ["-o", str(quick.path("out.jsonl")), "--model", str(quick.path("model")), *options]
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "GITHUB_ACTIONS")}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env={**kept, "TERM": "xterm", **environment}, stderr=theirs, stdout=subprocess.DEVNULL
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        seen += block
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return seen.decode().replace("\r\n", "\n")


def test_a_terminal_has_a_live_line(quick):
    seen = on_a_terminal(quick)
    assert "\r" in seen
    assert "tok/s out" in seen


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ((), {"CI": "true"}),
        ((), {"NO_COLOR": "1"}),
        ((), {"TERM": "dumb"}),
        (("--progress", "plain"), {}),
        (("--progress", "none"), {}),
        (("--progress", "bar"), {"CI": "true"}),
    ],
    ids=str,
)
def test_plain_lines_hold_no_control_characters(quick, options, environment):
    seen = on_a_terminal(quick, *options, "--progress-interval", "0.1", **environment)
    assert all(character.isprintable() or character == "\n" for character in seen)
    assert ("running" in seen) is ("none" not in options)


def test_no_terminal_means_plain_lines(quick):
    quick.make_engine = lambda: quick.engine(SteadyEngine, slots=2, step_seconds=0.03)
    outcome = quick.run("--progress-interval", "0.1")
    lines = [line for line in outcome.stderr.splitlines() if "running" in line]
    assert len(lines) >= 2
    assert all(character.isprintable() or character == "\n" for character in outcome.stderr)


# -- credentials ------------------------------------------------------------------------------------------------------


def everything_written(quick, outcome):
    """stdout, stderr, and every file that is not an input."""
    files = [path for path in quick.directory.rglob("*") if path.is_file() and "secret" not in path.name]
    texts = {str(path): path.read_text(errors="replace") for path in files}
    return {**texts, "stdout": outcome.stdout, "stderr": outcome.stderr}


@pytest.mark.parametrize("ends", ["well", "stopped", "broken", "refused", "missing"])
def test_no_credential_is_written_anywhere(quick, github, monkeypatch, ends):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, PASSWORD)
    rows = [{"messages": [{"role": "user", "content": f"row {number}"}]} for number in range(9)]
    path = quick.write([*rows, '{"cut": ', {"prompt": "~"}], "secret.jsonl")
    kwargs = {
        "note": API_KEY,
        "url": f"https://user:{PASSWORD}@host/x",
        "api_key": PASSWORD,
        "deep": {"list": [{"password": PASSWORD, "hf_token": PASSWORD}]},
        HUB_TOKEN: "a name",
    }
    if ends == "broken":

        def before_step(step):
            if step == 3:
                raise RuntimeError(f"failed at https://user:{PASSWORD}@host/ with {HUB_TOKEN}")

        quick.make_engine = lambda: quick.engine(SteadyEngine, before_step=before_step)
    options = ["--chat-template-kwargs", json.dumps(kwargs), "--system", f"use {HUB_TOKEN} or {ACCESS_KEY}", "--json"]
    options += ["--stop", API_KEY, "--max-output-tokens", "1" if ends == "stopped" else "100000"]
    source = f"file://user:{PASSWORD}@{path if ends != 'missing' else '/nowhere'}?token={PASSWORD}&sig={PASSWORD}"
    if ends == "refused":
        quick.run()
    outcome = quick.run(source, *options)
    assert outcome.code == {"well": 3, "stopped": 75, "broken": 1, "refused": 4, "missing": 2}[ends]
    for place, text in everything_written(quick, outcome).items():
        for secret in (HUB_TOKEN, API_KEY, ACCESS_KEY, PASSWORD):
            assert secret not in text, place


def test_names_that_only_look_like_secrets_are_shown(quick):
    quick.run("--chat-template-kwargs", '{"eos_token": "<end>", "num_tokens": 3}', "--token-ids")
    settings = quick.summary()["settings"]
    assert settings["prompt"]["chat_template_kwargs"] == {"eos_token": "<end>", "num_tokens": 3}
    assert settings["output_options"]["token_ids"] is True


def test_a_secret_in_a_setting_does_not_come_in_the_way_of_going_on(quick):
    options = ("--system", f"use {HUB_TOKEN}", "--chat-template-kwargs", json.dumps({"api_key": PASSWORD}))
    quick.run(*options, "--limit", "3")
    assert quick.run(*options).code == 0
    assert len(quick.records()) == 12
