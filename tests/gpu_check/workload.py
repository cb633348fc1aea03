"""Stages `w1-8b` and `w5-0.6b`: a workload of forced lengths on a random model of a real shape, mode after mode.

Output tokens a second beside the pessimistic bound from this machine's own bandwidth and arithmetic. Last a trace of
the fastest mode: how long the device waited, and which kernels took its time.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cbgen.bench.roofline import Machine, bound
from cbgen.bench.workloads import make_workload, random_ids
from cbgen.engine.engine import Engine
from cbgen.engine.loader import LoadedModel
from cbgen.records import EngineStats
from tests.gpu_check.clock import free_memory, trace
from tests.gpu_check.context import Context
from tests.gpu_check.models import describe_operators, model_shape, random_model
from tests.gpu_check.modes import (
    CHOSEN,
    EAGER,
    GRAPHS_1,
    GRAPHS_4,
    GRAPHS_8,
    UNMIXED,
    Answers,
    Mode,
    Watched,
    generate,
    open_engine,
)

_ROWS = {"8b": 400, "0.6b": 256}  # half a minute or less in each mode
_SLOTS = 256
_TRACE_SECONDS = 2.0
_SECONDS_FOR_TRACE = 25.0  # kept for it: an engine, its graphs, the trace and the reading of it
_SPARE = 1.2  # the next mode may take so many times as long as the one before


@dataclass(frozen=True, slots=True)
class Rows:
    """Prompts and lengths of N rows."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def longest(self) -> int:
        return max(len(ids) + n for ids, n in zip(self.prompts, self.lengths, strict=True))

    def first(self, count: int) -> Rows:
        return Rows(self.prompts[:count], self.lengths[:count])


def make_rows(name: str, count: int, vocab_size: int, *, dry: bool) -> Rows:
    """The first rows of a workload; in a dry run few and short."""
    workload = make_workload(name, scale="small" if dry else "full", rows=6 if dry else count)
    prompts, lengths = random_ids(workload, vocab_size), [int(n) for n in workload.lengths]
    if dry:
        prompts, lengths = [ids[:30] for ids in prompts], [min(n, 5 + row) for row, n in enumerate(lengths)]
    return Rows(prompts, lengths)


def run(context: Context) -> None:
    name, shape = context.options
    dtype = torch.float32 if context.dry else torch.bfloat16
    loaded = random_model(shape, dtype, context.device, dry=context.dry)
    rows = make_rows(name, _ROWS[shape], loaded.vocab_size, dry=context.dry)
    context.facts(
        workload=name,
        shape=shape,
        rows=len(rows.prompts),
        prompt_tokens=sum(map(len, rows.prompts)),
        output_tokens=sum(rows.lengths),
        **describe_operators(loaded),
    )
    rates: dict[Mode, float] = {}
    took, reserved = 0.0, 0.0 if context.dry else _SECONDS_FOR_TRACE
    for mode in (GRAPHS_4, EAGER, GRAPHS_8, CHOSEN, GRAPHS_1, UNMIXED):
        if context.seconds_left - reserved < _SPARE * took:
            context.case(mode=mode.name, skipped="no time")
            continue
        before = context.seconds_left
        rates[mode] = _run_mode(context, loaded, mode, rows, shape)
        free_memory(context.device)
        took = before - context.seconds_left
    _trace(context, loaded, max(rates, key=lambda mode: rates[mode]), rows)


def _run_mode(context: Context, loaded: LoadedModel, mode: Mode, rows: Rows, shape: str) -> float:
    """One engine, of which nothing is left afterwards. Returns tokens a second."""
    started = time.monotonic()
    watched = open_engine(loaded, mode, **limits(mode, rows, dry=context.dry))
    engine = watched.engine
    warm_up(watched, rows)
    engine.stats = EngineStats()
    ready_seconds = time.monotonic() - started
    answers = generate(engine, rows.prompts, rows.lengths, seconds=max(context.seconds_left, 1))
    case = {"mode": mode.name, **speed(context, answers, rows, shape, engine)}
    context.case(
        **case,
        **watched.describe(),
        stats=asdict(engine.stats),
        engine=engine.describe(),
        peak_bytes=engine.peak_device_memory,
        ready_seconds=ready_seconds,
    )
    return float(case["output_tokens_per_s"])


def limits(mode: Mode, rows: Rows, *, dry: bool) -> dict[str, Any]:
    """Of the engine: the same slots in every mode but one; in a dry run also little memory."""
    slots = {} if mode is CHOSEN else {"max_num_seqs": 4 if dry else _SLOTS}
    memory = {"kv_cache_memory": 8 << 20} if dry else {}
    return {"max_model_len": rows.longest, **slots, **memory}


def warm_up(watched: Watched, rows: Rows) -> None:
    """A few short rows, so that kernels are compiled; launches must not wait for the device here. Most graphs are
    recorded while the clock runs, as in a job.
    """
    few = rows.first(4)
    watched.forbid_sync(forbids=True)
    generate(watched.engine, [ids[:8] for ids in few.prompts], [4] * len(few.prompts))
    watched.forbid_sync(forbids=False)


def speed(context: Context, answers: Answers, rows: Rows, shape: str, engine: Engine) -> dict[str, Any]:
    """Tokens a second and share of the bound. Where rows did not end in time, their tokens count all the same."""
    slots, stats = engine.limits.max_num_seqs, engine.stats
    num_tokens = sum(rows.lengths) if answers.is_complete else stats.num_sampled_tokens
    rate = num_tokens / answers.seconds
    bounds = _bound(context, rows, shape, slots)
    share = rate / bounds["pessimistic"] if bounds and answers.is_complete else None
    return {
        "is_complete": answers.is_complete,
        "seconds": answers.seconds,
        "output_tokens_per_s": rate,
        "step_ms": 1000 * answers.seconds / max(stats.num_steps, 1),
        "bound": bounds,
        "share_of_bound": share,
        "slots": slots,
    }


def _bound(context: Context, rows: Rows, shape: str, slots: int) -> dict[str, float] | None:
    dtype = torch.float32 if context.dry else torch.bfloat16
    flops = context.machine.get(f"{str(dtype).removeprefix('torch.')}_flops")
    if context.bandwidth is None or flops is None:
        return None
    machine, sizes = Machine(context.bandwidth, flops), model_shape(shape, dtype, dry=context.dry)
    limit = bound(sizes, machine, [len(ids) for ids in rows.prompts], rows.lengths, slots)
    return {
        "pessimistic": limit.pessimistic,
        "optimistic": limit.optimistic,
        "weights_seconds": limit.weights_seconds,
        "kv_seconds": limit.kv_seconds,
        "arithmetic_seconds": limit.arithmetic_seconds,
    }


def _trace(context: Context, loaded: LoadedModel, mode: Mode, rows: Rows) -> None:
    """In the middle of the same rows, once slots are full and graphs recorded. Last, since profilers have crashed."""
    watched = open_engine(loaded, mode, **limits(mode, rows, dry=context.dry))
    engine = watched.engine
    warm_up(watched, rows)
    generate(engine, rows.prompts, rows.lengths, seconds=0 if context.dry else _TRACE_SECONDS)
    num_before, seconds = engine.stats.num_steps, 0.1 if context.dry else _TRACE_SECONDS
    result = trace(lambda: generate(engine, (), (), seconds=seconds), context.device)
    context.case(
        mode=mode.name,
        trace_seconds=result.span_seconds,
        idle_share=result.idle_share,
        num_activities=result.num_activities,
        num_steps=engine.stats.num_steps - num_before,
        kernel_shares=result.shares,
    )
