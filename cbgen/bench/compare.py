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
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cbgen
from cbgen.bench.comparison import BenchConfig, Comparison, Entry
from cbgen.bench.engines import PEERS_DIRECTORY, Engine, Knobs, describe_knobs
from cbgen.bench.findings import BLOCK, find
from cbgen.bench.roofline import Machine, ModelShape, bound
from cbgen.bench.runner import EngineFailure, Measurement, ask, run_engine
from cbgen.bench.workloads import Workload, make_workload, random_ids, shareable_tokens
from cbgen.errors import CbgenError, UsageError

Tell = Callable[[str], None]
_DEFAULT_SLOTS = 64  # of the bound, when none of our own engines ran
_LEAST_GRID_ROWS = 16


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
    shared = shareable_tokens(prompts, BLOCK) if workload.shares_prefixes else 0
    limit = bound(shape, machine, [len(ids) for ids in prompts], lengths, slots, shared)
    comparison = Comparison(
        config, workload, prompts, prepared["description"], threads, machine, shape, entries, slots, limit, probe=probe
    )
    comparison.findings = find(comparison)
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
