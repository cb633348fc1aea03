"""A comparison as JSON values: everything that was measured."""

from __future__ import annotations

import contextlib
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cbgen
from cbgen.bench.comparison import Comparison, Entry


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
