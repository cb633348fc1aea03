"""What the figures mean. Enters: a `Comparison` whose runs are done. Leaves: sentences, in the order to print."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from cbgen.bench.comparison import Comparison, Entry
from cbgen.bench.roofline import continuous_steps
from cbgen.bench.simulate import Workload as Schedule
from cbgen.bench.simulate import simulate
from cbgen.bench.workloads import shareable_tokens

BLOCK = 16  # tokens of a block that a prefix cache shares


def find(comparison: Comparison) -> list[str]:
    """All that can be said with the engines that ran."""
    parts = (_batching_gain, _cache_use, _orders, _host_share, _same_ids)
    return [sentence for part in parts for sentence in part(comparison)]


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
    could = shareable_tokens(comparison.prompts, BLOCK)
    total = sum(map(len, comparison.prompts))
    lines = [f"prompt tokens that could be shared (whole blocks of {BLOCK}): {could:,} of {total:,}"]
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
