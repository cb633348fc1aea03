"""What a run amounted to: one summary, as a JSON document for programs and a table for people. Pure.

The field names of `summarize` are documented in the README and read by people's scripts: add, do not rename.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cbgen.records import EngineStats, Tally

SUMMARY_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Wall-clock seconds. `generate` runs from the first prompt to the last commit, loading apart."""

    load: float = 0.0
    generate: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Facts of a finished or stopped run.

    Attributes:
        tally: of the whole output, earlier runs included.
        resumed_rows: rows that earlier runs had finished.
        prompt_tokens, completion_tokens: of this run.
        slots: max_num_seqs of the engine, 0 when none was needed.
    """

    complete: bool
    tally: Tally
    resumed_rows: int
    prompt_tokens: int
    completion_tokens: int
    timings: Timings
    stats: EngineStats
    slots: int
    peak_memory_bytes: int
    peak_device_memory_bytes: int
    settings: dict[str, Any]
    versions: dict[str, str]


def summarize(run: RunSummary) -> dict[str, Any]:
    """The content of summary.json."""
    stats, seconds = run.stats, run.timings.generate
    return {
        "version": SUMMARY_VERSION,
        "complete": run.complete,
        "rows": run.tally.rows,
        "rows_ok": run.tally.rows - run.tally.num_errors,
        "rows_failed": run.tally.num_errors,
        "errors": dict(sorted(run.tally.errors.items())),
        "resumed_rows": run.resumed_rows,
        "prompt_tokens": run.tally.prompt_tokens,
        "completion_tokens": run.tally.completion_tokens,
        "generated_tokens": run.completion_tokens,
        "output_tokens_per_second": _ratio(run.completion_tokens, seconds),
        "prompt_tokens_per_second": _ratio(run.prompt_tokens, seconds),
        "generate_seconds": round(seconds, 3),
        "load_seconds": round(run.timings.load, 3),
        "total_seconds": round(run.timings.total, 3),
        "steps": stats.num_steps,
        "occupancy": _ratio(stats.num_active, stats.num_steps * run.slots, 4),
        "occupancy_while_queued": _ratio(stats.num_queued_active, stats.num_queued_steps * run.slots, 4),
        "cached_prompt_tokens": stats.num_cached_tokens,
        "cached_prompt_share": _ratio(stats.num_cached_tokens, stats.num_prompt_tokens, 4),
        "preemptions": stats.num_preemptions,
        "recomputed_tokens": stats.num_recomputed_tokens,
        "out_of_memory_steps": stats.num_out_of_memory,
        "discarded_tokens": stats.num_discarded_tokens,
        "graphs_off": stats.graphs_off,
        "step_seconds": {
            "schedule": round(stats.schedule_seconds, 3),
            "build_input": round(stats.build_seconds, 3),
            "run": round(stats.run_seconds, 3),
            "update": round(stats.update_seconds, 3),
        },
        "peak_memory_bytes": run.peak_memory_bytes,
        "peak_device_memory_bytes": run.peak_device_memory_bytes,
        "settings": run.settings,
        "versions": run.versions,
    }


def format_summary(summary: dict[str, Any]) -> str:
    """The table printed at the end."""
    errors = ", ".join(f"{code} {count:,}" for code, count in summary["errors"].items())
    resumed = f", {summary['resumed_rows']:,} of them by earlier runs" if summary["resumed_rows"] else ""
    tokens = f"{summary['prompt_tokens']:,} in, {summary['completion_tokens']:,} out"
    speed = (
        f"{summary['output_tokens_per_second']:,.0f} tok/s out, {summary['prompt_tokens_per_second']:,.0f} tok/s in, "
        f"over {summary['generate_seconds']:,.1f} s"
    )
    used = (
        f"{summary['occupancy']:.1%} of slots over {summary['steps']:,} steps "
        f"({summary['occupancy_while_queued']:.1%} while rows were queued), {summary['preemptions']:,} preemptions"
    )
    cached, again = summary["cached_prompt_tokens"], summary["recomputed_tokens"]
    used += f" ({again:,} tokens computed again)" if again else ""
    shared = f"{cached:,} prompt tokens ({summary['cached_prompt_share']:.1%}) were there from rows that begin alike"
    too_large = summary["out_of_memory_steps"]
    rows = [
        ("rows", f"{summary['rows']:,}: {summary['rows_ok']:,} ok, {summary['rows_failed']:,} failed{resumed}"),
        ("errors", errors),
        ("tokens", tokens),
        ("throughput", speed if summary["steps"] else ""),
        ("occupancy", used if summary["steps"] else ""),
        ("shared", shared if cached else ""),
        ("retried", f"{too_large:,} steps ran out of memory and were done in smaller ones" if too_large else ""),
        ("graphs", f"off, each operator is launched: {summary['graphs_off']}" if summary["graphs_off"] else ""),
        ("time", f"{summary['load_seconds']:,.1f} s to load, {summary['total_seconds']:,.1f} s in all"),
        ("peak memory", _memory(summary)),
    ]
    return "\n".join(f"  {name:<12} {value}" for name, value in rows if value)


def _memory(summary: dict[str, Any]) -> str:
    text = f"{summary['peak_memory_bytes'] / 1e9:.2f} GB"
    device = summary["peak_device_memory_bytes"]
    return f"{text}, {device / 1e9:.2f} GB on the device" if device else text


def _ratio(numerator: float, denominator: float, digits: int = 2) -> float:
    return round(numerator / denominator, digits) if denominator else 0.0
