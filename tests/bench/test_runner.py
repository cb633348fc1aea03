"""One run of an engine in another process: what it may answer, and that nothing outlives it."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from cbgen.bench.runner import EngineFailure, run_engine

FAKE = Path(__file__).parent / "fake_peer.py"


def run(behaviour, *, lengths=(3, 4), model="m", limit=60.0, python=sys.executable, script=FAKE):
    task = {
        "model": model,
        "prompts": [[1]] * len(lengths),
        "lengths": list(lengths),
        "knobs": {"behaviour": behaviour},
    }
    return run_engine(python, script, task, {}, limit)


def test_a_good_answer_is_measured():
    measurement = run("good")
    assert measurement.num_tokens == 7
    assert measurement.load_seconds == 0.25
    assert measurement.tokens_per_second == pytest.approx(10)
    assert measurement.peak_bytes == 5_000_000
    assert measurement.versions == {"fake": "1.0"}


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [
        ("wrong count", "failed", "row 1 has 5 tokens instead of 4: not the same work"),
        ("fewer rows", "failed", "it answered 1 rows of 2"),
        ("crash", "failed", "RuntimeError: the engine broke"),
        ("silent", "failed", "it said nothing"),
        ("no json", "failed", "its answer is no JSON: INFO loading"),
        ("missing", "missing", "No module named 'fake'"),
    ],
)
def test_anything_else_is_one_sentence(behaviour, kind, words):
    with pytest.raises(EngineFailure) as failure:
        run(behaviour)
    assert failure.value.kind == kind
    assert words in str(failure.value)
    assert "\n" not in str(failure.value)


def test_an_interpreter_that_does_not_exist_is_missing():
    with pytest.raises(EngineFailure, match="cannot start") as failure:
        run("good", python="/nowhere/python")
    assert failure.value.kind == "missing"


def test_a_run_beyond_its_time_is_killed_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    with pytest.raises(EngineFailure, match="within the time limit"):
        run("hang", model=str(pids), limit=3.0)
    family = [int(pid) for pid in pids.read_text().split()]
    assert len(family) == 2
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in family) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_runs(pid) for pid in family)


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
