"""The check for GPUs, rehearsed on CPU: every stage runs, faults and hangs are noticed, little has to be installed."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")  # torch on other systems has none

from tests.engine.parity import Reference
from tests.gpu_check import candidates, clock, machine
from tests.gpu_check.clock import covered, summarize
from tests.gpu_check.driver import RunOptions, StageResult, _collect, run_stages
from tests.gpu_check.engine import compare
from tests.gpu_check.kernels import difference, equal_ids
from tests.gpu_check.report import format_report
from tests.gpu_check.stages import STAGES

REPOSITORY = Path(__file__).parents[1]
MISSING = ("gguf", "hypothesis", "moto", "orjson", "pytest")  # what a GPU machine may lack
STAGE_KEYS = {"name", "status", "seconds", "limit_seconds", "facts", "cases", "error"}
CASE_KEYS = {  # of the first case; the plain form
    "machine": {"name", "gb_per_s"},
    "kernels": {"operator", "name", "dtype", "worst", "error", "ok", "seconds"},
    "engine": {
        *("architecture", "dtype", "mode", "slots", "rows", "wrong_rows", "ties"),
        *("num_graphs", "graphs_off", "launch_errors", "operators", "replaced", "fused", "ok"),
    },
    "decode-kernel": {"layout", "batch", "context", "us", "gb_per_s", "share_of_copy"},
    "w1-8b": {
        *("mode", "is_complete", "seconds", "output_tokens_per_s", "step_ms", "bound", "share_of_bound", "slots"),
        *("num_graphs", "graphs_off", "launch_errors", "stats", "engine", "peak_bytes", "ready_seconds"),
    },
    "hf-cb": {"engine", "mode", "seconds", "output_tokens_per_s"},
    "memory": {"mode", "rows", "out_of_memory", "equal_share", "ok"},
}
CASE_KEYS["w5-0.6b"] = CASE_KEYS["w1-8b"]


def gpu_check(out, *arguments, path=""):
    paths = os.pathsep.join(filter(None, [path, str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.run(
        [sys.executable, "-m", "tests.gpu_check", "--dry", "--out", str(out), *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    return process, json.loads(out.read_text())


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """All of it, on a Python whose imports of some packages fail."""
    directory = tmp_path_factory.mktemp("gpu-check")
    for name in MISSING:
        (directory / f"{name}.py").write_text(f"raise ImportError('{name} is not on that machine')\n")
    return gpu_check(directory / "check.json", path=str(directory))


def test_a_rehearsal_runs_every_stage_and_finds_nothing_wrong(rehearsal):
    process, document = rehearsal
    told = {stage["name"]: (stage["status"], stage["error"]) for stage in document["stages"]}
    assert told == {stage.name: ("ok", "") for stage in STAGES}
    assert process.returncode == 0, process.stdout
    assert document["ok"]


def test_the_document_has_its_form(rehearsal):
    _, document = rehearsal
    assert set(document) == {"form", "dry", "ok", "seconds", "budget_seconds", "stages"}
    for stage in document["stages"]:
        assert set(stage) == STAGE_KEYS
        assert set(stage["cases"][0]) == CASE_KEYS[stage["name"]]
        assert not any("skipped" in case for case in stage["cases"]), "a rehearsal leaves nothing out"
    facts = document["stages"][0]["facts"]
    assert all(facts[f"{name}_flops"] > 0 for name in ("bfloat16", "float16", "float32"))
    assert facts["copy_bytes_per_s"] > 0


def test_every_mode_is_run_and_graphs_are_used(rehearsal):
    stages = {stage["name"]: stage for stage in rehearsal[1]["stages"]}
    for name in ("w1-8b", "w5-0.6b"):
        cases = stages[name]["cases"]
        assert len({case["mode"] for case in cases}) == 6
        assert any("idle_share" in case for case in cases)
        for case in cases:
            if "stats" in case:
                assert case["is_complete"]
                assert (case["num_graphs"] > 0) == case["mode"].startswith("graphs")
    graphs = [case["num_graphs"] for case in stages["engine"]["cases"] if "num_graphs" in case]
    assert 0 in graphs
    assert max(graphs) > 0
    assert stages["kernels"]["facts"]["operators"] == "triton"
    assert stages["hf-cb"]["facts"]["ratio"] > 0


def test_the_table_names_every_stage_and_the_end(rehearsal):
    process, document = rehearsal
    for stage in STAGES:
        assert f"\n{stage.name}" in f"\n{process.stdout}"
    assert process.stdout.rstrip().splitlines()[-1].startswith("ok in ")
    assert format_report(document) in process.stdout


def test_a_wrong_kernel_is_noticed(tmp_path):
    process, document = gpu_check(tmp_path / "check.json", "--stages", "kernels", "--break", "rms_norm")
    assert process.returncode == 1
    stage = document["stages"][0]
    assert stage["status"] == "wrong"
    assert {case["operator"] for case in stage["cases"] if not case["ok"]} == {"rms_norm"}
    assert all(not case["ok"] for case in stage["cases"] if case["operator"] == "rms_norm")


def test_a_stage_that_hangs_is_ended_and_the_rest_goes_on(tmp_path):
    process, document = gpu_check(
        tmp_path / "check.json", "--stages", "machine,decode-kernel", "--hang", "machine", "--hang-seconds", "2"
    )
    assert process.returncode == 1
    assert [stage["status"] for stage in document["stages"]] == ["timeout", "ok"]
    assert document["stages"][1]["cases"][0]["share_of_copy"] is None, "nobody measured it"


def test_what_has_no_time_left_is_skipped_and_said(tmp_path):
    document = run_stages(STAGES[:2], RunOptions(out=tmp_path / "check.json", dry=True, seconds=3))
    assert [stage["status"] for stage in document["stages"]] == ["skipped: no time"] * 2
    assert not document["ok"]
    assert "skipped: no time" in format_report(document)


def test_a_torn_line_costs_no_other(tmp_path):
    (tmp_path / "0.jsonl").write_text('{"case": {"a": 1}}\n{"facts": {"b": 2}}\n{"case": {"a"')
    result = StageResult("stage", "ok")
    assert not _collect(tmp_path, 0, result), "it never said that it was done"
    assert (result.cases, result.facts) == ([{"a": 1}], {"b": 2})


def test_covered_is_the_length_of_the_union():
    rng = np.random.default_rng(0)
    for _ in range(200):
        starts = rng.integers(0, 60, rng.integers(0, 12))
        intervals = [
            (int(start), int(start + length)) for start, length in zip(starts, rng.integers(0, 20, 12), strict=False)
        ]
        assert covered(intervals) == len({place for start, stop in intervals for place in range(start, stop)})


def test_a_trace_is_idle_where_nothing_runs():
    def event(start, duration, category="kernel", name="a"):
        return {"ph": "X", "cat": category, "ts": start, "dur": duration, "name": name}

    events = [event(100, 50), event(120, 30, name="b"), event(180, 20), event(0, 500, "cpu_op"), {"ph": "M"}]
    trace = summarize(events, {"kernel"})
    assert trace.span_seconds == pytest.approx(100e-6)
    assert trace.busy_seconds == pytest.approx(70e-6)
    assert trace.idle_share == pytest.approx(0.3)
    assert trace.shares == {"a": 0.7, "b": 0.3}
    assert summarize([], {"kernel"}).idle_share is None


def test_an_error_is_told_in_ulps():
    expected = torch.ones(1000, dtype=torch.float64)
    for dtype, ulps in ((torch.float32, 16), (torch.bfloat16, 1), (torch.float16, 1)):
        eps = torch.finfo(dtype).eps
        got = expected.to(dtype)
        assert difference(got, expected).worst == 0
        got[7] += eps * ulps
        assert difference(got, expected).worst == pytest.approx(0.5, rel=0.1), "of a value and of a typical one"
        got[7] += eps * ulps * 2
        assert difference(got, expected).worst > 1
        got[7] = float("nan")
        assert difference(got, expected).worst == float("inf")
    assert difference(expected[:3], expected).worst == float("inf")


def test_ids_are_equal_but_for_few_draws():
    expected = torch.arange(1000)
    got = expected.clone()
    got[:4] += 1
    assert equal_ids(got, expected, most_different=0.005).worst <= 1
    assert equal_ids(got, expected).worst > 1
    got[4:6] += 1
    assert equal_ids(got, expected, most_different=0.005).worst > 1


def test_answers_are_compared_up_to_ties_and_stops():
    expected = [Reference([4, 5, 6, 7], [False, False, True, False])]
    assert compare([[4, 5, 6, 7]], expected, ()) == ([], 0)
    assert compare([[4, 5, 9, 9]], expected, ()) == ([], 1)
    assert compare([[4, 9, 6, 7]], expected, ()) == ([0], 0)
    assert compare([[4, 5]], expected, (5,)) == ([], 0)
    assert compare([[4, 5, 6]], expected, (5,)) == ([0], 0), "it went on past a stop"
    assert compare([[4, 5, 6]], expected, ()) == ([0], 0), "it ended early"


def test_what_only_a_gpu_can_run_exists_in_torch():
    names = set()
    for path in (REPOSITORY / "tests/gpu_check").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda":
                names.add(node.attr)
    assert len(names) > 8
    assert [name for name in names if not hasattr(torch.cuda, name)] == []


class StandIn:
    """Of `torch.cuda` what the check calls, without a GPU: each call is noted, and events are 2 ms apart."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*_, **__):
            self.calls.append(name)
            return {"mem_get_info": (3 << 30, 4 << 30), "get_device_capability": (9, 0), "elapsed_time": 2.0}.get(
                name, self
            )

        return call

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_lines_for_a_gpu_run_on_a_stand_in(monkeypatch):
    stand_in, runs, device = StandIn(), [], torch.device("cuda")
    monkeypatch.setattr(torch, "cuda", stand_in)
    assert (
        clock.median_seconds(lambda: runs.append("run"), device, repeats=3, before=lambda: runs.append("flush"))
        == 0.002
    )
    assert runs == ["run"] * 2 + ["flush", "run"] * 3
    assert stand_in.calls.count("record") == 6
    runs.clear()
    replay = clock.captured(lambda: runs.append("run"), device)
    assert runs == ["run"] * 3, "twice to warm up, once to record"
    replay()
    assert (runs, stand_in.calls[-1]) == (["run"] * 3, "replay")
    clock.free_memory(device)
    assert stand_in.calls[-2:] == ["synchronize", "empty_cache"]
    assert machine._describe_gpu(device)["capability"] == [9, 0]
    assert candidates._of_gpu(device)[0] == (9, 0)
