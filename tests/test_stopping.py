"""Ends before the end: signals, budgets, errors, faults. What is finished stays; the next run does only the rest."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen.config import ErrorAllowance, StopConfig
from cbgen.data.feed import PromptFeed
from cbgen.data.prompts import PromptBuilder
from cbgen.output import writers
from cbgen.output.journal import Journal
from cbgen.output.tape import Tape
from cbgen.signals import StopSignals
from cbgen.stopping import StopRules
from tests.quick import Quick, SteadyEngine

REPOSITORY = Path(__file__).parent.parent
NUM_ROWS = 20
SIGNALS = ["SIGTERM", "SIGINT", "SIGHUP"]


@pytest.fixture
def quick(tmp_path):
    """20 rows; four are in a slot at once, for three steps each."""
    return make_quick(tmp_path)


def make_quick(directory, *, bad=(), num_rows=NUM_ROWS):
    quick = Quick(directory)
    quick.write([{"id": i, "prompt": f"p{i}{'~' if i in bad else ''}"} for i in range(num_rows)])
    use_engine(quick)
    return quick


def use_engine(quick, **attributes):
    quick.make_engine = lambda: quick.engine(SteadyEngine, slots=4, **attributes)


def signal_in_step(number, name="SIGTERM"):
    def before_step(step):
        if step == number:
            os.kill(os.getpid(), getattr(signal, name))

    return before_step


def check_the_rest(quick, num_kept, *options, num_rows=NUM_ROWS):
    """The next run generates only what is missing, and the output is whole then."""
    use_engine(quick)
    outcome = quick.run(*options)
    assert outcome.code == 0, outcome.message
    assert len(quick.asked) == num_rows - num_kept
    assert [(row["id"], row["completion"]) for row in quick.records()] == [(i, f"re:p{i}") for i in range(num_rows)]
    assert quick.summary()["complete"] is True


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize(("grace", "num_kept"), [("0", 4), ("60", 8)])
def test_rows_in_flight_have_the_grace_and_all_others_wait(quick, name, grace, num_kept):
    use_engine(quick, before_step=signal_in_step(4, name))
    outcome = quick.run("--grace", grace)
    assert outcome.code == 75
    assert outcome.message == f"stopped by {name} after row {num_kept}; the same command continues"
    assert len(quick.records()) == len(quick.asked) == num_kept
    assert quick.summary()["complete"] is False
    check_the_rest(quick, num_kept)


def test_a_signal_when_all_rows_are_in_flight_is_no_stop(tmp_path):
    quick = make_quick(tmp_path, num_rows=4)
    use_engine(quick, before_step=signal_in_step(1))
    assert quick.run().code == 0
    assert len(quick.records()) == 4
    assert quick.summary()["complete"] is True


@pytest.mark.parametrize("output", ["out.parquet", "parts/"])
def test_outputs_of_parts_stop_and_go_on(quick, output):
    use_engine(quick, before_step=signal_in_step(7))
    options = ("--rows-per-part", "3")
    assert quick.run(*options, output=output).code == 75
    assert len(quick.asked) == 12
    use_engine(quick)
    assert quick.run(*options, output=output).code == 0
    assert len(quick.asked) == 8


def test_a_signal_while_the_model_loads_leaves_nothing_behind(quick):
    def make_engine():
        os.kill(os.getpid(), signal.SIGTERM)
        return pytest.fail("went on")

    quick.make_engine = make_engine
    outcome = quick.run()
    assert outcome.code == 75
    assert outcome.message == "stopped by SIGTERM before the first row; the same command starts again"
    assert sorted(path.name for path in quick.directory.iterdir()) == ["in.jsonl", "model"]


def test_the_way_on_is_without_overwrite(quick):
    quick.run()
    use_engine(quick, before_step=signal_in_step(4))
    outcome = quick.run("--overwrite")
    assert outcome.message == "stopped by SIGTERM after row 8; the same command without --overwrite continues"
    check_the_rest(quick, 8)


def test_what_went_to_stdout_cannot_be_continued(quick):
    use_engine(quick, before_step=signal_in_step(4))
    outcome = quick.run(output="-")
    assert (outcome.code, outcome.stdout.count("\n")) == (75, 8)
    assert outcome.message == "stopped by SIGTERM after row 8; what went to stdout cannot be continued"


def test_a_commit_that_is_asked_for_comes_at_once(quick, monkeypatch):
    monkeypatch.setattr(writers, "_COMMIT_SECONDS", 1e9)
    committed = []

    def before_step(step):
        committed.append(json.loads((quick.path("out.jsonl.cbgen") / "state.json").read_text())["rows"])
        if step == 7:
            os.kill(os.getpid(), signal.SIGUSR1)

    use_engine(quick, before_step=before_step)
    assert quick.run().code == 0
    assert committed[:8] == [0] * 8
    assert committed[8:] == [8] * 7


def test_a_stop_while_failed_rows_are_tried_again_keeps_them(tmp_path):
    quick = make_quick(tmp_path, bad=range(0, 20, 2))
    assert quick.run().code == 3
    before = quick.path("out.jsonl").read_bytes()
    quick.write([{"id": i, "prompt": f"p{i}"} for i in range(NUM_ROWS)])
    use_engine(quick, before_step=signal_in_step(4))
    assert quick.run("--retry-errors").code == 75
    assert len(quick.asked) == 8
    assert quick.path("out.jsonl").read_bytes() == before
    check_the_rest(quick, NUM_ROWS - 2, "--retry-errors")


# -- in a process of its own ------------------------------------------------------------------------------------------


def start(quick, step_seconds, *arguments):
    command = [sys.executable, "-m", "tests.quick", str(quick.directory), str(step_seconds)]
    paths = [str(quick.path("in.jsonl")), "-o", str(quick.path("out.jsonl")), "--model", str(quick.path("model"))]
    return subprocess.Popen([*command, "run", *paths, *arguments], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)


def num_journalled(quick):
    return sum(path.read_bytes().count(b"\n") for path in quick.path("out.jsonl.cbgen").glob("wal-*"))


def wait_for_rows(quick, process, num_rows):
    deadline = time.monotonic() + 60
    while num_journalled(quick) < num_rows and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_real_process_stops_in_time_and_keeps_every_finished_row(tmp_path, name):
    quick = make_quick(tmp_path, num_rows=400)
    process = start(quick, 0.02, "--grace", "60")
    wait_for_rows(quick, process, 8)
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=30)
    num_kept = len(quick.records())
    assert process.returncode == 75
    assert f"stopped by {name} after row {num_kept}; the same command continues\n" in errors
    assert 8 <= num_kept < 400
    check_the_rest(quick, num_kept, num_rows=400)


def test_a_second_signal_ends_it_at_once_and_finished_rows_are_safe(tmp_path):
    quick = make_quick(tmp_path, num_rows=400)
    process = start(quick, 0.5, "--grace", "600")
    wait_for_rows(quick, process, 4)
    time.sleep(0.7)  # the next four rows are in their slots now, for another second
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130
    process.stderr.close()
    num_safe = num_journalled(quick)
    assert num_safe >= 4
    check_the_rest(quick, num_safe, num_rows=400)


def test_a_real_process_commits_when_asked_and_goes_on(tmp_path):
    quick = make_quick(tmp_path, num_rows=40)
    process = start(quick, 0.05)
    wait_for_rows(quick, process, 4)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert len(quick.records()) == 40


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason", "num_kept"),
    [
        (("--max-time", "0"), "--max-time (0 s)", 0),
        (("--max-output-tokens", "1"), "--max-output-tokens (1)", 4),
        (("--max-output-tokens", "26"), "--max-output-tokens (26)", 8),
    ],
)
def test_a_budget_stops_the_run(quick, options, reason, num_kept):
    outcome = quick.run(*options)
    assert outcome.code == 75
    assert outcome.message == f"stopped by {reason} after row {num_kept}; the same command continues"
    assert len(quick.asked) == num_kept
    check_the_rest(quick, num_kept)


def test_a_budget_is_of_each_run(quick):
    kept = []
    for _ in range(4):
        quick.run("--max-output-tokens", "20")
        kept.append(len(quick.records()))
    assert kept == [4, 8, 12, 16]
    assert quick.run("--max-output-tokens", "20").code == 0


def test_time_runs_out(quick):
    use_engine(quick, step_seconds=0.02)
    outcome = quick.run("--max-time", "0.15", "--grace", "0")
    assert outcome.code == 75
    assert "--max-time (0.15 s)" in outcome.message
    check_the_rest(quick, len(quick.records()))


def test_no_model_is_loaded_when_there_is_no_time(quick):
    quick.make_engine = lambda: pytest.fail("the model was loaded")
    assert quick.run("--max-time", "0").code == 75


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "code"),
    [("0", 3), ("1", 3), ("2", 0), ("9%", 3), ("10%", 0), ("0.05", 3), ("0.1", 0), ("100%", 0)],
)
def test_so_many_errors_are_fine(tmp_path, allowed, code):
    quick = make_quick(tmp_path, bad=(3, 9))
    assert quick.run("--fail-on-error", allowed).code == code
    assert len(quick.records()) == NUM_ROWS
    assert quick.run("--fail-on-error", allowed).code == code, "a finished output counts its errors too"


@pytest.mark.parametrize(("allowed", "errors", "num_kept"), [("0", "an error", 4), ("1", "2 errors", 12)])
def test_fail_fast_stops_at_the_first_error_too_many(tmp_path, allowed, errors, num_kept):
    quick = make_quick(tmp_path, bad=(3, 9))
    options = ("--fail-fast", "--fail-on-error", allowed)
    message = (
        f"stopped by {errors} (--fail-fast) after row {num_kept}; to continue, mend what failed and use "
        "--retry-errors, or leave --fail-fast out"
    )
    outcome = quick.run(*options, "--grace", "60")
    assert (outcome.code, outcome.message) == (3, message)
    assert len(quick.records()) == num_kept
    use_engine(quick)
    quick.make_engine = lambda: pytest.fail("the model was loaded")
    outcome = quick.run(*options)
    assert (outcome.code, outcome.message) == (3, message), "the output already holds the errors"
    quick.write([{"id": i, "prompt": f"p{i}"} for i in range(NUM_ROWS)])
    num_failed = int(allowed) + 1
    check_the_rest(quick, num_kept - num_failed, *options, "--retry-errors")


def test_without_fail_fast_it_goes_on_behind_the_error(tmp_path):
    quick = make_quick(tmp_path, bad=(3,))
    quick.run("--fail-fast")
    assert quick.run().code == 3
    assert len(quick.asked) == NUM_ROWS - 4
    assert [row["error"] is None for row in quick.records()] == [i != 3 for i in range(NUM_ROWS)]


def test_fail_fast_needs_a_count(quick):
    outcome = quick.run("--fail-fast", "--fail-on-error", "0.1")
    assert (outcome.code, "give --fail-on-error as a count" in outcome.message) == (2, True)


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_reader_thread_that_dies_ends_the_run(quick, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(PromptFeed, "_work", lambda *_: None)
        outcome = quick.run()
    assert (outcome.code, "died" in outcome.message, "\n" in outcome.message) == (1, True, False)
    check_the_rest(quick, 0)


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (MemoryError(), "reading and preparing rows failed (MemoryError);"),
        (SystemExit(3), "reading and preparing rows failed (SystemExit: 3);"),
        (ValueError("one\n  two"), "reading and preparing rows failed (ValueError: one two);"),
    ],
    ids=repr,
)
def test_a_reader_thread_that_fails_ends_the_run_after_its_rows(quick, monkeypatch, failure, says):
    build, calls = PromptBuilder.build, []

    def failing(self, rows):
        calls.append(rows)
        if len(calls) == 2:
            raise failure
        return build(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(PromptBuilder, "build", failing)
        outcome = quick.run()
    assert outcome.code == 1
    assert outcome.message == f"{says} every committed row is safe, and the same command continues"
    assert len(quick.records()) == 8
    check_the_rest(quick, 8)


def test_an_engine_that_fails_ends_the_run_in_one_sentence(quick):
    def before_step(step):
        if step == 7:
            raise RuntimeError("device-side assert\nand more")

    use_engine(quick, before_step=before_step)
    outcome = quick.run()
    assert outcome.code == 1
    assert outcome.message.startswith(
        "internal fault (RuntimeError: device-side assert and more; test_stopping.py line"
    )
    assert outcome.message.endswith("every committed row is safe, and the same command continues")
    assert "Traceback" not in outcome.stderr
    check_the_rest(quick, 8)


@pytest.mark.parametrize(
    ("owner", "name", "num_kept"), [(Journal, "append", 8), (Journal, "sync", 20), (Tape, "append", 20)]
)
def test_a_full_disk_ends_the_run_and_nothing_is_lost(quick, monkeypatch, owner, name, num_kept):
    method, calls = getattr(owner, name), []

    def failing(self, *arguments):
        calls.append(arguments)
        if arguments and arguments[0] and len(calls) < 3 and owner is Journal:
            return method(self, *arguments)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        outcome = quick.run()
    assert outcome.code == 1
    assert outcome.message.startswith(f"cannot write {quick.path('out.jsonl')}: No space left on device (")
    assert "\n" not in outcome.message
    check_the_rest(quick, num_kept)


# -- all of it, in any order ------------------------------------------------------------------------------------------


def varied_rows(rng):
    rows = []
    for number in range(rng.choice([3, 30, 120])):
        row = {"id": number, "prompt": f"p{number}{rng.choice(['', '', '', '~'])}"}
        if rng.random() < 0.2:
            row = {"messages": [{"role": "user", "content": f"m{number}"}]}
        if rng.random() < 0.3:
            row["x"] = rng.choice([1, "text", None, 1.5, [1], {"a": 1}])
        if rng.random() < 0.1:
            row["sampling_params"] = {"n": rng.choice([1, 2])}
        rows.append(row if rng.random() > 0.05 else "{cut")
    return rows


def one_stop(rng, quick, *options, output):
    """A run that stops, ends at a limit, or breaks; its exit code."""
    kind = rng.choice(["tokens", "limit", "fault", "signal"])
    if kind == "tokens":
        options = (*options, "--max-output-tokens", rng.choice([1, 40, 200]), "--grace", rng.choice([0, 9]))
    elif kind == "limit":
        options = (*options, "--limit", rng.randrange(40))
    else:
        at = rng.randrange(1, 9)

        def before_step(step):
            if step == at and kind == "fault":
                raise RuntimeError("as planned")
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)

        use_engine(quick, num_steps=2, before_step=before_step)
    outcome = quick.run(*options, output=output)
    use_engine(quick, num_steps=2)
    assert "internal fault" not in outcome.message or "as planned" in outcome.message
    return outcome.code


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_any_sequence_of_stops_ends_in_the_same_output(tmp_path, seed, form):
    rng = random.Random(f"{seed} {form}")
    quick = Quick(tmp_path)
    quick.write(varied_rows(rng))
    use_engine(quick, num_steps=2)
    options = ["--format", form, "--rows-per-part", rng.choice([1, 3, 10, 100])]
    for more in (["--source"], ["--token-ids"], ["--result-prefix", "g_"], ["--keep", "id,x"], ["--append-message"]):
        options += more if rng.random() < 0.3 else []
    end = rng.choice(["", "/"])
    code = quick.run(*options, output=f"whole{end}").code
    for _ in range(6):
        assert one_stop(rng, quick, *options, output=f"out{end}") in (0, 1, 3, 75)
    assert quick.run(*options, output=f"out{end}").code == code
    assert read(quick.path("out")) == read(quick.path("whole"))
    for option in ("--verify", "--retry-errors", "--verify"):
        assert quick.run(*options, option, output=f"out{end}").code == (0 if option == "--verify" else code)
    assert read(quick.path("out")) == read(quick.path("whole"))


def read(path):
    """What every file of an output holds; of compressed ones, where frames end depends on when they were committed."""
    if path.is_dir():
        return {part.name: read(part) for part in path.glob("part-*")}
    if path.read_bytes()[:4] == b"PAR1":
        return pq.read_table(path).to_pydict()
    codec = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}.get(path.read_bytes()[:2])
    return pa.input_stream(str(path), compression=codec).read()


# -- the rules alone --------------------------------------------------------------------------------------------------


def test_the_first_reason_stays_and_can_be_withdrawn():
    rules = StopRules(StopConfig(max_output_tokens=5, grace_seconds=0), StopSignals(), time.monotonic(), 0)
    assert not rules.check(4, 0)
    assert rules.check(5, 0)
    assert rules.check(0, 0)
    assert rules.grace_is_over
    rules.withdraw()
    assert not rules.check(4, 0)


def test_fail_fast_counts_the_errors_of_earlier_runs_and_gives_no_grace():
    config = StopConfig(fail_fast=True, fail_on_error=ErrorAllowance(2), grace_seconds=60)
    rules = StopRules(config, StopSignals(), time.monotonic(), 1)
    assert not rules.check(0, 1)
    assert rules.check(0, 2)
    assert rules.stop.exit_code == 3
    assert rules.grace_is_over


def test_rows_in_flight_have_their_grace():
    rules = StopRules(StopConfig(max_seconds=0, grace_seconds=60), StopSignals(), time.monotonic(), 0)
    assert rules.check(0, 0)
    assert not rules.grace_is_over


# -- long stretches of rows without work ------------------------------------------------------------------------------


def broken_lines(quick, num_rows):
    quick.write([f'{{"cut off": {i}' for i in range(num_rows)])


def test_fail_fast_stops_at_the_first_of_many_broken_rows(quick):
    broken_lines(quick, 5000)
    assert quick.run("--fail-fast").code == 3
    assert len(quick.records()) == 1


def test_a_signal_amid_broken_rows_is_heard_and_what_is_done_is_kept(quick, monkeypatch):
    broken_lines(quick, 20_000)
    put = writers.OrderedWriter.put

    def put_and_stop(self, row, record):
        put(self, row, record)
        if row.index == 3000:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(writers.OrderedWriter, "put", put_and_stop)
    assert quick.run().code == 75
    assert 3000 < len(quick.records()) < 4000
    monkeypatch.setattr(writers.OrderedWriter, "put", put)
    assert quick.run().code == 3
    assert len(quick.records()) == 20_000


def test_broken_rows_reach_the_journal_as_they_come(quick, monkeypatch):
    broken_lines(quick, 5000)
    sizes = []
    append = Journal.append

    def append_and_note(self, records):
        sizes.append(len(records))
        append(self, records)

    monkeypatch.setattr(Journal, "append", append_and_note)
    assert quick.run().code == 3
    assert sum(sizes) == 5000
    assert max(sizes) <= 512
