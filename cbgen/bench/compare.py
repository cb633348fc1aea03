"""`cbgen bench`: several engines on the same work, in turn, and what came of it.

    workload -> prepare (model directory, token ids) -> probe of the machine
    -> one pass over each peer's grid -> rounds A/B/C, A/B/C, ... -> `Comparison` -> report

Every run is a process of its own. Enters: a `BenchConfig`. Leaves: a `Comparison`; nothing here prints but through
`tell`. No torch: what needs it runs in other processes.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cbgen
from cbgen.bench.engines import PEERS_DIRECTORY, Engine, Knobs, describe_knobs
from cbgen.bench.roofline import Bound, Machine, ModelShape, bound, continuous_steps
from cbgen.bench.runner import EngineFailure, Measurement, ask, run_engine
from cbgen.bench.simulate import Workload as Schedule
from cbgen.bench.simulate import simulate
from cbgen.bench.workloads import Scale, Workload, make_workload, random_ids, shareable_tokens
from cbgen.errors import CbgenError, UsageError

Tell = Callable[[str], None]
_DEFAULT_SLOTS = 64  # of the bound, when none of our own engines ran
_LEAST_GRID_ROWS = 16
_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What is compared, and on what.

    Attributes:
        engines: in the order in which they take turns.
        slots: of our own engines; None is their default.
        pythons: interpreter by kind of engine, where it is not this one.
        time_limit: seconds for one run, loading included.
    """

    engines: list[Engine]
    workload: str = "W1"
    scale: Scale = "small"
    rows: int | None = None
    seed: int = 0
    model: str = "demo"
    shape: str | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    slots: int | None = None
    repeats: int = 3
    pythons: Mapping[str, str] = field(default_factory=dict)
    time_limit: float = 1800.0


@dataclass(slots=True)
class Entry:
    """One engine's runs. `reason` says why it has none, with `status` `skipped` or `failed`."""

    engine: Engine
    knobs: Knobs = field(default_factory=dict)
    runs: list[Measurement] = field(default_factory=list)
    tried: list[tuple[Knobs, float]] = field(default_factory=list)
    status: str = "ok"
    reason: str = ""

    @property
    def speeds(self) -> list[float]:
        """Output tokens a second of each run, in the order of the rounds."""
        return [run.tokens_per_second for run in self.runs]

    @property
    def median(self) -> float:
        return statistics.median(self.speeds)

    @property
    def peak_bytes(self) -> int:
        return max(run.peak_bytes for run in self.runs)

    @property
    def middle_run(self) -> Measurement:
        """The run whose speed is the median, or next below it."""
        return sorted(self.runs, key=lambda run: run.tokens_per_second)[(len(self.runs) - 1) // 2]


@dataclass(slots=True)
class Comparison:
    """All that is reported.

    Attributes:
        prompts: [N] token ids of each row.
        findings: sentences about what the figures mean, in the order to print.
    """

    config: BenchConfig
    workload: Workload
    prompts: list[list[int]]
    model: str
    threads: int
    machine: Machine
    model_shape: ModelShape
    entries: list[Entry]
    slots: int
    bound: Bound
    findings: list[str] = field(default_factory=list)
    probe: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> Entry | None:
        """What others are compared with: our engine as it is by default, else the first that ran."""
        ran = [entry for entry in self.entries if entry.runs]
        return next((entry for entry in ran if entry.engine.name == "cbgen"), ran[0] if ran else None)


def compare(config: BenchConfig, tell: Tell) -> Comparison:
    """Run everything.

    Raises:
        UsageError: the workload makes no sense.
        CbgenError: the model cannot be prepared, or the machine not be measured.
    """
    try:
        workload = make_workload(config.workload, scale=config.scale, rows=config.rows, seed=config.seed)
    except ValueError as error:
        raise UsageError(str(error)) from error
    tell(f"preparing {config.shape or config.model} and {workload.num_rows:,} rows of {workload.name}")
    prepared = _ask_one("prepare.py", _question(config, workload))
    threads = int(prepared["threads"])
    shape = ModelShape(**prepared["shape"])
    prompts = prepared["prompts"] or random_ids(workload, shape.vocab_size)
    tell("measuring this machine's bandwidth and arithmetic")
    probe = _ask_one("probe.py", {"device": config.device, "dtype": config.dtype, "threads": threads})
    task = _task(config, workload, prepared, prompts, threads)
    session = _Session(config, task, shape, workload.shares_prefixes, tell)
    entries = session.run()
    machine = Machine(probe["bandwidth"], probe["flops"])
    slots = _slots(config, entries)
    lengths = workload.lengths.tolist()
    shared = shareable_tokens(prompts, _BLOCK) if workload.shares_prefixes else 0
    limit = bound(shape, machine, [len(ids) for ids in prompts], lengths, slots, shared)
    comparison = Comparison(
        config, workload, prompts, prepared["description"], threads, machine, shape, entries, slots, limit, probe=probe
    )
    comparison.findings = [*_batching_gain(comparison), *_cache_use(comparison), *_orders(comparison)]
    comparison.findings += [*_host_share(comparison), *_same_ids(comparison)]
    return comparison


# -- what every engine is given ---------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """Where converted models of benchmarks are kept."""
    root = Path(os.environ.get("CBGEN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "cbgen")
    return root.expanduser() / "bench"


def _question(config: BenchConfig, workload: Workload) -> dict[str, Any]:
    return {
        "model": config.model,
        "shape": config.shape,
        "dtype": config.dtype,
        "texts": workload.texts,
        "cache": str(cache_directory()),
    }


def _task(
    config: BenchConfig, workload: Workload, prepared: Mapping[str, Any], prompts: list[list[int]], threads: int
) -> dict[str, Any]:
    """Fields of `protocol.Task`, but for the knobs."""
    lengths = workload.lengths.tolist()
    longest = max(len(ids) + length for ids, length in zip(prompts, lengths, strict=True))
    return {
        "model": prepared["directory"],
        "prompts": prompts,
        "lengths": lengths,
        "dtype": config.dtype,
        "threads": threads,
        "max_model_len": -(-longest // 64) * 64,
        "texts": workload.texts if prepared["prompts"] else None,
    }


def _environment() -> dict[str, str]:
    return {"CBGEN_BENCH_CACHE": str(cache_directory()), "TOKENIZERS_PARALLELISM": "false"}


def _own_environment() -> dict[str, str]:
    """This package must be found by scripts that run as plain files."""
    root = str(Path(cbgen.__file__).parent.parent)
    return {**_environment(), "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _ask_one(script: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """The one answer of a script of ours.

    Raises:
        CbgenError: it has none.
    """
    with contextlib.closing(
        ask(sys.executable, PEERS_DIRECTORY / script, question, _own_environment(), time_limit=1800)
    ) as answers:
        try:
            answer = next(answers)
        except EngineFailure as failure:
            raise CbgenError(f"{script} failed: {failure}") from failure
    if "error" in answer:
        raise _told(answer)
    return answer


def _told(answer: Mapping[str, Any]) -> CbgenError:
    """An error of the other process, with its exit code."""
    error = CbgenError(str(answer["error"]))
    error.exit_code = int(answer.get("exit_code", error.exit_code))
    return error


# -- the runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Session:
    config: BenchConfig
    task: dict[str, Any]
    shape: ModelShape
    shares_prefixes: bool
    tell: Tell

    def run(self) -> list[Entry]:
        """Grid first, then rounds in which every engine has one turn."""
        entries = [Entry(engine) for engine in self.config.engines]
        for entry in entries:
            self._choose(entry)
        for number in range(self.config.repeats):
            for entry in entries:
                if entry.status == "ok":
                    self._turn(entry, number)
        return entries

    def _choose(self, entry: Entry) -> None:
        """The fastest point of the grid, by one run each; a grid of one point needs none."""
        engine = entry.engine
        if len(engine.grid) == 1:
            entry.knobs = self._knobs(engine, engine.grid[0])
            return
        count = len(self.task["lengths"])
        rows = min(count, max(_LEAST_GRID_ROWS, math.ceil(count * engine.grid_share)))
        failure = EngineFailure("failed", "its grid is empty")
        for point in engine.grid:
            knobs = self._knobs(engine, point)
            try:
                measurement = self._measure(engine, knobs, rows)
            except EngineFailure as error:
                failure = error
                if error.kind == "missing":
                    break
                self.tell(f"grid: {engine.name}, {describe_knobs(point)}: failed: {error}")
                continue
            entry.tried.append((knobs, measurement.tokens_per_second))
            self.tell(f"grid: {engine.name}, {describe_knobs(point)}: {_told_speed(measurement)}")
        if entry.tried:
            entry.knobs = max(entry.tried, key=lambda tried: tried[1])[0]
        else:
            self._give_up(entry, failure)

    def _turn(self, entry: Entry, number: int) -> None:
        try:
            measurement = self._measure(entry.engine, entry.knobs, len(self.task["lengths"]))
        except EngineFailure as error:
            self._give_up(entry, error)
            return
        entry.runs.append(measurement)
        self.tell(f"round {number + 1} of {self.config.repeats}: {entry.engine.name}: {_told_speed(measurement)}")

    def _give_up(self, entry: Entry, failure: EngineFailure) -> None:
        entry.status = "skipped" if failure.kind == "missing" else "failed"
        entry.reason, entry.runs = str(failure), []
        self.tell(f"{entry.engine.name} is {entry.status}: {failure}")

    def _measure(self, engine: Engine, knobs: Knobs, rows: int) -> Measurement:
        task = {**self.task, "knobs": knobs}
        for name in ("prompts", "lengths", "texts"):
            task[name] = None if task[name] is None else task[name][:rows]
        if engine.kind != "cbgen-run":
            task["texts"] = None
        python = self.config.pythons.get(engine.kind, sys.executable)
        environment = _own_environment() if engine.is_own else _environment()
        return run_engine(python, engine.script, task, environment, self.config.time_limit)

    def _knobs(self, engine: Engine, point: Knobs) -> Knobs:
        """A point of the grid with what holds for all runs; what was typed wins."""
        knobs: Knobs = dict(point)
        if engine.is_own:
            if self.config.slots is not None:
                knobs["max_num_seqs"] = self.config.slots
            if self.config.device != "auto":
                knobs["device"] = self.config.device
        if engine.prefix_knob is not None:
            knobs[engine.prefix_knob] = self.shares_prefixes
        if engine.kv_knob is not None:
            slots = int({**knobs, **engine.fixed}.get("max_num_seqs", _DEFAULT_SLOTS))
            wanted = slots * int(self.task["max_model_len"]) * self.shape.kv_bytes
            knobs[engine.kv_knob] = max(1, min(16, math.ceil(wanted / (1 << 30))))
        return {**knobs, **engine.fixed}


def _told_speed(measurement: Measurement) -> str:
    return (
        f"{measurement.tokens_per_second:,.0f} tok/s ({measurement.num_tokens:,} tokens in "
        f"{measurement.wall_seconds:.1f} s; loaded in {measurement.load_seconds:.1f} s)"
    )


def _slots(config: BenchConfig, entries: list[Entry]) -> int:
    """Slots of our engine, as it says itself."""
    own = [entry for entry in entries if entry.runs and entry.engine.is_own]
    plain = next((entry for entry in own if entry.engine.name == "cbgen"), own[0] if own else None)
    if plain is None:
        return config.slots or _DEFAULT_SLOTS
    return int(plain.runs[0].facts["engine"]["max_num_seqs"])


# -- what the figures mean --------------------------------------------------------------------------------------------


def predicted_gain(lengths: list[int], slots: int, prompt_lengths: list[int], cost: Mapping[str, float]) -> float:
    """Time of static over time of continuous batching in file order, by the real scheduler on a virtual clock.

    Args:
        lengths, prompt_lengths: [N] tokens of each row.
        slots: rows at once.
        cost: of a step: `step_ms`, `row_ms`, `prefill_ms_per_token`.

    Raises:
        ValueError: too large to simulate.
    """
    arrivals = [0.0] * len(lengths)
    schedule = Schedule(lengths=lengths, prompt_lengths=prompt_lengths, arrivals_ms=arrivals, slots=slots, **cost)
    static, continuous = simulate(schedule, "static"), simulate(schedule, "continuous")
    return static.total_ms / continuous.total_ms


def pairwise(first: Entry, second: Entry) -> list[float]:
    """Speed of `first` over that of `second`, round by round, sorted."""
    return sorted(a / b for a, b in zip(first.speeds, second.speeds, strict=False))


def _named(comparison: Comparison, name: str) -> Entry | None:
    return next((entry for entry in comparison.entries if entry.engine.name == name and entry.runs), None)


def _batching_gain(comparison: Comparison) -> list[str]:
    """Continuous beside static as measured, and as `simulate` predicts from the lengths: were every step alike, and
    with what a step costs by the continuous engine's own steps (the static engine's are not looked at).
    """
    static = _named(comparison, "cbgen-static")
    continuous = _named(comparison, "cbgen:order=file") or _named(comparison, "cbgen")
    if continuous is None or static is None:
        return []
    measured = statistics.median(pairwise(continuous, static))
    lengths, slots = comparison.workload.lengths.tolist(), comparison.slots
    prompt_lengths = [len(ids) for ids in comparison.prompts]
    cost = continuous.middle_run.facts["step_cost"]
    try:
        in_steps = predicted_gain(lengths, slots, [1] * len(lengths), {"step_ms": 1.0})
        in_time = predicted_gain(lengths, slots, prompt_lengths, {**cost, "step_ms": max(cost["step_ms"], 0.001)})
    except ValueError:
        return [f"continuous over static batching: {measured:.2f}x (too large to simulate)"]
    return [
        f"continuous ({continuous.engine.name}) over static batching: {measured:.2f}x at {slots} slots",
        f"  `simulate` predicts {in_steps:.2f}x if every step takes the same time: {measured / in_steps:.2f} of it",
        f"  with this engine's steps ({cost['step_ms']:.1f} ms + {cost['row_ms']:.3f} ms a row + "
        f"{cost['prefill_ms_per_token']:.3f} ms a prompt token) it predicts {in_time:.2f}x: {measured / in_time:.2f} "
        "of it",
    ]


def _cache_use(comparison: Comparison) -> list[str]:
    if not comparison.workload.shares_prefixes:
        return []
    could = shareable_tokens(comparison.prompts, _BLOCK)
    total = sum(map(len, comparison.prompts))
    lines = [f"prompt tokens that could be shared (whole blocks of {_BLOCK}): {could:,} of {total:,}"]
    for entry in comparison.entries:
        cached = entry.middle_run.facts.get("stats", {}).get("num_cached_tokens") if entry.runs else None
        if cached is not None:
            lines.append(f"{entry.engine.name} served {cached:,} of them from its cache: {cached / max(could, 1):.1%}")
    without = _named(comparison, "cbgen:disable=prefix-cache")
    plain = _named(comparison, "cbgen")
    if plain is not None and without is not None:
        lines.append(f"prefix cache on over off: {statistics.median(pairwise(plain, without)):.2f}x")
    return lines


def _orders(comparison: Comparison) -> list[str]:
    longest, by_file = _named(comparison, "cbgen:order=longest"), _named(comparison, "cbgen:order=file")
    if longest is None or by_file is None:
        return []
    lengths = comparison.workload.lengths.tolist()
    steps = [continuous_steps(order, comparison.slots) for order in (lengths, sorted(lengths, reverse=True))]
    same = "identical" if longest.runs[0].checksums == by_file.runs[0].checksums else "DIFFERENT"
    return [
        f"longest first over file order: {statistics.median(pairwise(longest, by_file)):.2f}x, token ids {same}; in "
        f"steps {steps[0]:,} over {steps[1]:,} is {steps[0] / steps[1]:.2f}x ({comparison.workload.num_rows:,} rows, "
        f"{comparison.slots} slots)"
    ]


def _host_share(comparison: Comparison) -> list[str]:
    whole, engine = _named(comparison, "cbgen-run"), _named(comparison, "cbgen")
    if whole is None or engine is None:
        return []
    pairs = zip(whole.runs, engine.runs, strict=False)
    share = statistics.median(1 - b.wall_seconds / a.wall_seconds for a, b in pairs)
    return [f"reader, tokenizer, detokenizer and writer add {share:+.1%} of the whole command's wall time"]


def _same_ids(comparison: Comparison) -> list[str]:
    """Greedy rows agree exactly only in float32; in 16 bits a near tie may fall either way."""
    reference = comparison.reference
    if reference is None:
        return []
    own = reference.runs[0].checksums
    parts = []
    for entry in comparison.entries:
        if entry is not reference and entry.runs:
            equal = sum(a == b for a, b in zip(entry.runs[0].checksums, own, strict=True))
            parts.append(f"{entry.engine.name} {equal:,}")
    if not parts:
        return []
    return [
        f"rows of {comparison.workload.num_rows:,} with the same token ids as {reference.engine.name} "
        f"({comparison.config.dtype}): " + ", ".join(parts)
    ]


def as_document(comparison: Comparison) -> dict[str, Any]:
    """Everything as JSON values."""
    config, workload, limit = comparison.config, comparison.workload, comparison.bound
    return {
        "version": 1,
        "cbgen": cbgen.__version__,
        "python": platform.python_version(),
        "workload": {
            "name": workload.name,
            "scale": workload.scale,
            "seed": workload.seed,
            "rows": workload.num_rows,
            "prompt_tokens": sum(map(len, comparison.prompts)),
            "output_tokens": int(workload.lengths.sum()),
        },
        "model": comparison.model,
        "dtype": config.dtype,
        "threads": comparison.threads,
        "machine": {"processor": processor_name(), **comparison.probe},
        "bound": {
            **asdict(limit),
            "slots": comparison.slots,
            "pessimistic_tokens_per_second": limit.pessimistic,
            "optimistic_tokens_per_second": limit.optimistic,
        },
        "engines": [_entry_document(entry) for entry in comparison.entries],
        "findings": comparison.findings,
    }


def _entry_document(entry: Entry) -> dict[str, Any]:
    document: dict[str, Any] = {
        "engine": entry.engine.name,
        "status": entry.status,
        "reason": entry.reason,
        "knobs": entry.knobs,
        "grid": [{"knobs": knobs, "tokens_per_second": speed} for knobs, speed in entry.tried],
        "runs": [
            {
                "tokens_per_second": run.tokens_per_second,
                "wall_seconds": run.wall_seconds,
                "load_seconds": run.load_seconds,
                "peak_bytes": run.peak_bytes,
                "facts": run.facts,
            }
            for run in entry.runs
        ],
    }
    if entry.runs:
        document |= {"median_tokens_per_second": entry.median, "versions": entry.runs[0].versions}
    return document


def processor_name() -> str:
    """As the kernel names it; else the architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
