"""Several engines on one workload, with a fake one in their place: grid, rounds, failures, table, JSON, SVG."""

import json
import random
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from cbgen.bench import compare as comparing
from cbgen.bench.compare import compare
from cbgen.bench.comparison import BenchConfig
from cbgen.bench.document import as_document
from cbgen.bench.engines import ENGINES, PEERS_DIRECTORY, Engine, ablations, parse_engine, parse_engines
from cbgen.bench.findings import predicted_gain
from cbgen.bench.report import align, breakdown, format_comparison, render_svg
from cbgen.cli import main
from cbgen.config import OPTIMIZATIONS
from cbgen.errors import CbgenError, ModelError

FAKE = Path(__file__).parent / "fake_peer.py"
STATS = {
    "num_steps": 10,
    "num_active": 60,
    "num_preemptions": 0,
    "num_cached_tokens": 0,
    "schedule_seconds": 0.5,
    "build_seconds": 0.25,
    "run_seconds": 4.0,
    "sample_seconds": 0.0,
    "update_seconds": 0.25,
    "admit_seconds": 0.0,
    "write_seconds": 0.0,
}
STEP_COST = {"step_ms": 5.0, "row_ms": 2.0, "prefill_ms_per_token": 1.0}
SHAPE = {
    "layer_weights": 100_000, "head_weights": 100, "num_layers": 2, "num_kv_heads": 1, "head_dim": 4, "itemsize": 4,
    "vocab_size": 50,
}  # fmt: skip


def fake(name, speed=None, behaviour="good", grid=({},), **more):
    """An engine that emits `speed` tokens a second; without one, `batch_size` of its grid."""
    fixed = {"behaviour": behaviour, "facts": {"stats": STATS, "engine": {"max_num_seqs": 8}, "step_cost": STEP_COST}}
    if speed is not None:
        fixed["batch_size"] = speed
    return Engine(name, name.partition(":")[0], FAKE, fixed, grid, **more)


@pytest.fixture
def prepared(monkeypatch):
    def answer(script, question):
        if script == "prepare.py":
            return {"directory": "m", "description": "a model", "prompts": None, "shape": SHAPE, "threads": 2}
        return {"bandwidth": 1e8, "flops": 1e12, "device": "cpu", "versions": {}}

    monkeypatch.setattr(comparing, "_ask_one", answer)


def run(*engines, told=None, **changes):
    values = {"rows": 6, "repeats": 2, "dtype": "float32", **changes}
    return compare(BenchConfig(engines=list(engines), **values), (told if told is not None else []).append)


def test_peers_run_at_the_best_point_of_their_grid_and_take_turns(prepared):
    told = []
    grid = ({"batch_size": 5}, {"batch_size": 20}, {"batch_size": 10})
    result = run(fake("cbgen", 40), fake("hf-generate", grid=grid, grid_share=0.5), told=told)
    own, peer = result.entries
    assert own.median == pytest.approx(40)
    assert peer.knobs["batch_size"] == 20
    assert peer.speeds == pytest.approx([20, 20])
    assert [speed for _, speed in peer.tried] == pytest.approx([5, 20, 10])
    turns = [line.split(": ")[0:2] for line in told if line.startswith("round")]
    assert [turn[1] for turn in turns] == ["cbgen", "hf-generate"] * 2
    assert result.reference is own


def test_engines_that_fail_or_are_missing_are_told_of_and_the_others_go_on(prepared):
    result = run(
        fake("cbgen", 40), fake("vllm", 90, "wrong count"), fake("openvino", 90, "missing"), fake("hf-cb", 9, "crash")
    )
    assert [entry.status for entry in result.entries] == ["ok", "failed", "skipped", "failed"]
    text = format_comparison(result)
    assert "vllm failed: row 5 has" in text
    assert "openvino skipped: No module named 'fake'" in text
    assert "hf-cb failed: it ended with code 1: RuntimeError: the engine broke" in text
    assert [entry["status"] for entry in as_document(result)["engines"]] == ["ok", "failed", "skipped", "failed"]


def test_a_missing_engine_is_asked_once_and_a_failing_point_leaves_the_rest_of_its_grid(prepared):
    grid = ({"behaviour": "crash"}, {"behaviour": "good", "batch_size": 3})
    engine = fake("hf-cb", grid=grid)
    engine.fixed.pop("behaviour")
    told = []
    result = run(engine, fake("vllm", 1, "missing", grid=({"a": 1}, {"a": 2})), told=told)
    assert result.entries[0].knobs["batch_size"] == 3
    assert result.entries[0].status == "ok"
    assert sum("vllm" in line for line in told) == 1


def test_the_table_says_what_was_measured(prepared):
    result = run(fake("cbgen", 40), fake("hf-generate", 10))
    lines = format_comparison(result).splitlines()
    head = next(line for line in lines if line.startswith("engine"))
    assert head.split("  ")[0] == "engine"
    row = next(line for line in lines if line.startswith("hf-generate"))
    assert row.split() == [
        "hf-generate",
        "-",
        "10",
        "10",
        "-",
        "10",
        "4.00x",
        "0.01",
        "GB",
        f"{10 / result.bound.pessimistic:.2f}",
    ]
    assert any(line.startswith("W1 (small, seed 0): 6 rows") for line in lines)
    assert "0.1 GB/s read, 1.00 TFLOP/s" in lines[2]
    assert "at 8 slots" in lines[2]  # as our engine said


def test_the_breakdown_adds_up_to_the_wall_time(prepared):
    result = run(fake("cbgen", 40), repeats=1)
    entry = result.entries[0]
    phases = breakdown(entry)
    assert sum(seconds for _, seconds in phases) == pytest.approx(entry.middle_run.wall_seconds)
    assert dict(phases)["schedule"] == 0.5
    entry.middle_run.facts["stats"] |= {"sample_seconds": 1.5, "admit_seconds": 0.25, "write_seconds": 0.125}
    phases = dict(breakdown(entry))
    assert sum(phases.values()) == pytest.approx(entry.middle_run.wall_seconds)
    assert (phases["take rows in, wait for them"], phases["make texts, write"]) == (0.25, 0.125)
    assert (phases["forward"], phases["sample"]) == (2.5, 1.5)
    assert "occupancy 75.0%" in format_comparison(result)


def test_continuous_over_static_stands_beside_what_the_simulator_says(prepared):
    result = run(fake("cbgen", 40), fake("cbgen-static", 10), workload="W3", rows=40)
    lengths = result.workload.lengths.tolist()
    in_steps = predicted_gain(lengths, 8, [1] * 40, {"step_ms": 1.0})
    assert in_steps > 1.2
    in_time = predicted_gain(lengths, 8, [len(ids) for ids in result.prompts], STEP_COST)
    assert 1 < in_time < in_steps
    text = "\n".join(result.findings)
    assert (
        f"continuous (cbgen) over static batching: 4.00x at 8 slots\n  `simulate` predicts {in_steps:.2f}x if" in text
    )
    assert (
        f"(5.0 ms + 2.000 ms a row + 1.000 ms a prompt token) it predicts {in_time:.2f}x: {4 / in_time:.2f} of" in text
    )


def test_predicted_gain_by_hand():
    lengths = [100, 20, 50, 200, 30]
    assert predicted_gain(lengths, 4, [1] * 5, {"step_ms": 7.0}) == pytest.approx(230 / 200)
    cost = {"step_ms": 1.0, "row_ms": 0.5, "prefill_ms_per_token": 0.0}
    assert predicted_gain(lengths, 4, [1] * 5, cost) == pytest.approx((230 + 200) / (200 + 200))


def test_the_cost_of_a_step_is_found_again():
    sys.path.insert(0, str(PEERS_DIRECTORY))
    try:
        from run_cbgen import step_cost
    finally:
        sys.path.remove(str(PEERS_DIRECTORY))
    rng = random.Random(5)
    sizes = [(rng.randrange(1, 129), rng.choice([0, 0, rng.randrange(400)])) for _ in range(200)]
    costs = [(0.004 + 0.0003 * rows + 0.0002 * tokens, rows, tokens) for rows, tokens in sizes]
    found = step_cost(costs)
    assert found == pytest.approx({"step_ms": 4.0, "row_ms": 0.3, "prefill_ms_per_token": 0.2})
    assert step_cost([(0.01, 4, 0)] * 3)["step_ms"] >= 0


def test_w2_tells_how_much_of_what_could_be_shared_was(prepared):
    stats = {**STATS, "num_cached_tokens": 480}
    engine = fake("cbgen", 40)
    engine.fixed["facts"]["stats"] = stats
    result = run(engine, fake("cbgen:disable=prefix-cache", 10), workload="W2", rows=3)
    text = "\n".join(result.findings)
    assert "prompt tokens that could be shared (whole blocks of 16):" in text
    assert "cbgen served 480 of them from its cache" in text
    assert "prefix cache on over off: 4.00x" in text


def test_longest_first_and_file_order_are_compared_with_their_ids(prepared):
    result = run(fake("cbgen:order=longest", 44), fake("cbgen:order=file", 40), workload="W3", rows=60)
    text = "\n".join(result.findings)
    assert "longest first over file order: 1.10x, token ids identical; in steps" in text


def test_the_whole_command_beside_the_engine_alone(prepared):
    result = run(fake("cbgen", 40), fake("cbgen-run", 38))
    assert "reader, tokenizer, detokenizer and writer add +5.0%" in "\n".join(result.findings)


def test_json_and_svg_hold_every_engine(prepared):
    result = run(fake("cbgen", 40), fake("vllm", 30), fake("hf-cb", 5))
    document = json.loads(json.dumps(as_document(result)))
    assert [entry["median_tokens_per_second"] for entry in document["engines"]] == pytest.approx([40, 30, 5])
    assert document["workload"]["rows"] == 6
    assert document["bound"]["pessimistic_tokens_per_second"] == pytest.approx(result.bound.pessimistic)
    root = ElementTree.fromstring(render_svg(result))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [
        f"{name}: median {s}, {s} to {s} tok/s" for name, s in (("cbgen", 40), ("vllm", 30), ("hf-cb", 5))
    ]
    widths = [float(bar.get("width")) for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("rx")]
    assert widths[1] / widths[0] == pytest.approx(30 / 40, rel=0.01)


def test_nothing_that_ran_is_no_table(prepared):
    result = run(fake("vllm", 1, "missing"))
    assert result.reference is None
    assert "no engine ran" in format_comparison(result)
    assert ElementTree.fromstring(render_svg(result)) is not None


def test_knobs_of_our_engine_and_of_those_that_must_be_told(prepared):
    shares = run(
        fake("cbgen", 1), fake("vllm", 1, prefix_knob="prefix_caching", kv_knob="kv_gib"), workload="W2", slots=3
    )
    own, vllm = shares.entries
    assert own.knobs["max_num_seqs"] == 3
    assert vllm.knobs["prefix_caching"] is True
    assert vllm.knobs["kv_gib"] == 1
    alone = run(fake("vllm", 1, prefix_knob="prefix_caching"), workload="W1")
    assert alone.entries[0].knobs["prefix_caching"] is False


# -- what people type -------------------------------------------------------------------------------------------------


def test_engines_with_settings():
    first, second, third = parse_engines("cbgen, cbgen:disable=fusion+packing,max-num-seqs=8, vllm:max_num_seqs=128")
    assert (first.name, first.fixed) == ("cbgen", {})
    assert second.fixed == {"disabled": ["fusion", "packing"], "max_num_seqs": 8}
    assert second.is_own
    assert third.grid == ({},)
    assert third.fixed == {"max_num_seqs": 128}
    assert parse_engine("hf-cb:max_requests=4").grid == ({"max_batch_tokens": 256}, {"max_batch_tokens": 1024})
    assert parse_engine("cbgen-static").fixed == {"batching": "static"}


def test_ablations_switch_each_optimization_off_and_then_all():
    switched_off = [engine.fixed["disabled"] for engine in ablations("auto")]
    assert switched_off == [*([name] for name in OPTIMIZATIONS), list(OPTIMIZATIONS)]


def test_ablations_are_those_of_the_device():
    assert set(ablations("cpu")[-1].fixed["disabled"]) == OPTIMIZATIONS.keys() - {"triton", "graphs"}
    assert set(ablations("cuda:1")[-1].fixed["disabled"]) == OPTIMIZATIONS.keys() - {"native", "packing"}


def test_every_engine_has_its_script():
    assert all(engine.script.is_file() for engine in ENGINES.values())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--engines", "nonesuch"),
        ("--engines", ""),
        ("--engines", "cbgen,cbgen"),
        ("--engines", "cbgen:disable"),
        ("--engines", "cbgen:disable=magic"),
        ("--peer-python", "vllm"),
        ("--peer-python", "nonesuch=/bin/true"),
        ("--json", "/nowhere/at/all.json"),
        ("--svg", "/nowhere/at/all.svg"),
        ("--rows", "0"),
        ("--workload", "W9"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_runs(arguments, capsys, monkeypatch):
    monkeypatch.setattr(comparing, "compare", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message.startswith("cbgen: ")
    assert message.count("\n") == 1


def test_the_command_prints_and_writes(prepared, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(ENGINES, "cbgen", fake("cbgen", 40))
    monkeypatch.setitem(ENGINES, "vllm", fake("vllm", 20))
    arguments = ["--engines", "cbgen,vllm", "--rows", "4", "--repeats", "1", "--json", str(tmp_path / "b.json")]
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments, "--svg", str(tmp_path / "b.svg"), "--peer-python", f"vllm={sys.executable}"])
    assert exit_.value.code == 0
    printed = capsys.readouterr()
    assert "2.00x" in printed.out
    assert "round 1 of 1: vllm: 20 tok/s" in printed.err
    assert json.loads((tmp_path / "b.json").read_text())["engines"][0]["engine"] == "cbgen"
    assert (tmp_path / "b.svg").read_text().startswith("<svg")


def test_no_engine_at_all_exits_1(prepared, monkeypatch, capsys):
    monkeypatch.setitem(ENGINES, "vllm", fake("vllm", 20, "missing"))
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--engines", "vllm", "--rows", "4"])
    assert exit_.value.code == 1
    assert "vllm skipped" in capsys.readouterr().out


def test_a_model_that_is_not_there_has_its_own_exit_code(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--model", "/nowhere", "--rows", "4"])
    assert exit_.value.code == ModelError.exit_code
    assert capsys.readouterr().err.splitlines()[-1].startswith("cbgen: --model /nowhere: no such file")


def test_a_script_of_ours_that_breaks_is_said_so(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('nothing works')")
    monkeypatch.setattr(comparing, "PEERS_DIRECTORY", tmp_path)
    with pytest.raises(CbgenError, match=r"broken\.py failed: .*nothing works"):
        comparing._ask_one("broken.py", {})


def test_columns_are_aligned():
    assert align([["a", "1"], ["bbb", "22"]], left=1) == "a     1\nbbb  22"
