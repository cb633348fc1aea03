"""kill -9 and signals against the real command: run again, it ends in the same bytes, and nothing is done twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import crash_driver

REPOSITORY = Path(__file__).parent.parent


def write_rows(path, num_rows, seed=0):
    rng = random.Random(seed)
    rows = [{"id": i, "prompt": f"row {i} {rng.choice('1235')}"} for i in range(num_rows)]
    for row in rows[::7]:
        row["sampling_params"] = {"max_tokens": rng.randint(1, 40)}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def start(directory, model, name, *arguments):
    command = ["run", "in.jsonl", "-o", name, "--model", str(model), "--dtype", "float32", *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.crash_driver", str(directory / "log"), *command],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process, seconds=600):
    """Wait for the process; returns (exit code, stderr)."""
    _, errors = process.communicate(timeout=seconds)
    return process.returncode, errors


def finished(directory):
    log = directory / "log"
    return crash_driver.finished(log.read_text().split("\n")[:-1]) if log.exists() else []


def wait_for_rows(process, directory, num_rows, seconds=60):
    """Wait until so many rows are finished, or the process has ended."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and len(finished(directory)) < num_rows and time.monotonic() < deadline:
        time.sleep(0.001)


def kill_many_times(directory, model, num_rows, num_kills, *arguments):
    """Run to the end through `num_kills` kills at random moments; (killed, output, expected output, finished rows)."""
    write_rows(directory / "in.jsonl", num_rows)
    code, errors = end(start(directory, model, "unbroken.jsonl", *arguments))
    assert code == 0, errors
    (directory / "log").unlink()
    rng = random.Random(1)
    killed = 0
    while killed < num_kills:
        process = start(directory, model, "out.jsonl", *arguments)
        step = (num_rows - len(finished(directory))) // (num_kills - killed)
        wait_for_rows(process, directory, len(finished(directory)) + rng.randint(0, max(step, 1)))
        time.sleep(rng.random() * 0.05)
        process.kill()
        end(process)
        killed += 1
    code, errors = end(start(directory, model, "out.jsonl", *arguments))
    assert code == 0, errors
    assert "Traceback" not in errors
    output, expected = ((directory / name).read_bytes() for name in ("out.jsonl", "unbroken.jsonl"))
    return killed, output, expected, finished(directory)


def test_killed_at_random_moments_it_ends_in_the_same_bytes(tmp_path, chain_model):
    killed, output, expected, log = kill_many_times(tmp_path, chain_model, 3000, 6, "--max-num-seqs", "16")
    assert output == expected
    assert len(log) == len(set(log)), f"{len(log) - len(set(log))} finished rows were generated again"
    assert len(log) >= 3000 - killed  # a kill may fall between the journal and the note of it: one row each
    assert not list((tmp_path / "out.jsonl.cbgen").glob("wal-*"))


@pytest.mark.slow
def test_the_demo_model_survives_thirty_kills(tmp_path):
    """Real lengths, float32, greedy: 30 kills at random moments of one job."""
    arguments = ("--max-num-seqs", "16", "--max-tokens", "24", "--max-model-len", "256", "--ignore-eos")
    killed, output, expected, log = kill_many_times(tmp_path, "demo", 400, 30, *arguments)
    sys.stdout.write(f"{killed} kills, {len(log)} rows finished, {len(log) - len(set(log))} of them twice\n")
    output, expected = map(crash_driver.without_cached_tokens, (output, expected))
    assert output == expected
    assert len(log) == len(set(log))
    assert len(log) >= 400 - killed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_commits_and_exits_75_and_the_run_goes_on_later(tmp_path, chain_model, number):
    write_rows(tmp_path / "in.jsonl", 4000)
    process = start(tmp_path, chain_model, "out.jsonl", "--max-num-seqs", "8")
    wait_for_rows(process, tmp_path, 200)
    process.send_signal(number)
    began = time.monotonic()
    code, errors = end(process, 30)
    assert code == 75, errors
    assert time.monotonic() - began < 10
    committed = (tmp_path / "out.jsonl").read_bytes().count(b"\n")
    assert 100 < committed <= len(finished(tmp_path)) < 4000
    assert json.loads((tmp_path / "out.jsonl.cbgen" / "summary.json").read_text())["complete"] is False
    assert end(start(tmp_path, chain_model, "out.jsonl", "--max-num-seqs", "32"))[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(4000))
    assert len(finished(tmp_path)) == 4000


def test_a_second_run_on_the_same_output_is_refused_at_once(tmp_path, chain_model):
    write_rows(tmp_path / "in.jsonl", 3000)
    first = start(tmp_path, chain_model, "out.jsonl", "--max-num-seqs", "1")
    wait_for_rows(first, tmp_path, 5)
    code, errors = end(start(tmp_path, chain_model, "out.jsonl", "--max-num-seqs", "1"), 60)
    assert code == 4
    assert f"another run is writing out.jsonl (pid {first.pid}" in errors
    first.kill()
    end(first)


def test_chaos_in_short(tmp_path):
    """25 kills, 10 power cuts, rivals, signals and full disks on every kind of output; `make chaos` is ten times it."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--short"],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.endswith("no difference\n")
