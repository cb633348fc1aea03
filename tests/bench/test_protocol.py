"""What peers' scripts share: the answer's form, and memory counted over a family of processes."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbgen.bench.peers.protocol import Task, peak_bytes

PEERS = Path(__file__).parent.parent.parent / "cbgen" / "bench" / "peers"
SCRIPT = """
import sys
sys.path.insert(0, {peers!r})
from protocol import Missing, serve

def load(task):
    print("a library talks")
    if task.knobs.get("missing"):
        raise Missing("not here")
    if task.knobs.get("broken"):
        raise ValueError("no such setting\\nand more")
    return (lambda work: [[7] * n for n in work.lengths]), (lambda: {{"rows": len(task.lengths)}})

serve(("pytest", "no-such-package"), load)
"""


def answers(**knobs):
    task = {"model": "m", "prompts": [[1, 2], [3]], "lengths": [2, 5], "knobs": knobs}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(peers=str(PEERS))],
        input=json.dumps(task) + "\n",
        capture_output=True,
        text=True,
    )
    return [json.loads(line) for line in result.stdout.splitlines()], result


def test_stdout_holds_answers_only_and_libraries_talk_to_stderr():
    (ready, result), process = answers()
    assert ready["event"] == "ready"
    assert result["counts"] == [2, 5]
    assert result["facts"] == {"rows": 2}
    assert result["versions"] == {"pytest": pytest.__version__}
    assert len(set(result["checksums"])) == 2
    assert result["peak_bytes"] > 1e6
    assert "a library talks" in process.stderr


@pytest.mark.parametrize(
    ("knob", "kind", "words"), [("missing", "missing", "not here"), ("broken", "failed", "no such")]
)
def test_a_failure_is_told_in_one_line(knob, kind, words):
    (failure,), process = answers(**{knob: True})
    assert (failure["event"], failure["kind"]) == ("error", kind)
    assert words in failure["message"]
    assert "and more" not in failure["message"]
    assert process.returncode != 0


def test_the_request_to_warm_up_is_the_same_for_every_engine():
    warm_up = Task("m", [[4, 5], [6]], [100, 200], knobs={"a": 1}).warm_up()
    assert (warm_up.prompts, warm_up.lengths, warm_up.knobs) == ([[4, 5, 4, 5, 4, 5, 4, 5]], [4], {"a": 1})


def test_memory_of_children_counts():
    before = peak_bytes()
    code = "data = bytearray(200_000_000); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        child.stdout.readline()
        grown = peak_bytes(os.getpid()) - before
        child.communicate("\n")
    assert 180_000_000 < grown < 300_000_000


def test_static_batches_hold_every_row_once_longest_first(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    batches = importlib.import_module("run_hf_generate").batches
    prompts, lengths = [[1] * n for n in (3, 9, 1, 5, 7)], [10, 40, 30, 50, 20]
    assert batches(prompts, lengths, 2, "length") == [[3, 1], [2, 4], [0]]
    assert batches(prompts, lengths, 2, "prompt") == [[1, 4], [3, 0], [2]]
    assert batches(prompts, lengths, 3, "none") == [[0, 1, 2], [3, 4]]
