"""What a comparison was asked for, and what came of it: plain values that runs fill and reports read."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cbgen.bench.engines import Engine, Knobs
from cbgen.bench.roofline import Bound, Machine, ModelShape
from cbgen.bench.runner import Measurement
from cbgen.bench.workloads import Scale, Workload


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
