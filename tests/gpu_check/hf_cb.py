"""Stage `hf-cb`: transformers' own continuous batching on the first rows of W1, and this engine on the same rows.

transformers runs with what is installed: without a flash-attention package that is `paged|sdpa`, which needs a dense
mask. Its cache is sized by hand, since by default it takes all memory for it and for that mask; as few or as many rows
at once as was fastest of a small grid.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.gpu_check.clock import free_memory
from tests.gpu_check.context import Context
from tests.gpu_check.models import random_model, random_module
from tests.gpu_check.modes import GRAPHS_4, generate, open_engine
from tests.gpu_check.workload import Rows, limits, make_rows, warm_up

_ROWS = 128
_GRID = (64, 128)  # rows at once
_BLOCK_SIZE = 32
_MAX_BATCH_TOKENS = 1024
_LEAST_SECONDS = 10.0
_STOP_SECONDS = 10.0
_WARM_UP_TOKENS = 4

Generate = Callable[[Rows, float], float | None]


def run(context: Context) -> None:
    name, shape = context.options
    dtype = torch.float32 if context.dry else torch.bfloat16
    vocab_size = 512 if context.dry else 128_000  # ids below the vocabulary of either shape
    rows = make_rows(name, _ROWS, vocab_size, dry=context.dry)
    num_tokens = sum(rows.lengths)
    context.facts(workload=name, shape=shape, rows=len(rows.prompts), output_tokens=num_tokens, ratio=None)
    own = _run_own(context, shape, dtype, rows)
    context.case(engine="cbgen", mode=GRAPHS_4.name, seconds=own, output_tokens_per_s=num_tokens / own)
    free_memory(context.device)
    best = None
    model = random_module(shape, dtype, context.device, "sdpa", dry=context.dry)
    for max_requests in (2,) if context.dry else _GRID:
        seconds = _run_transformers(context, model, rows, max_requests)
        if seconds is not None:
            best = min(seconds, best or seconds)
            context.facts(ratio=best / own)


def _run_transformers(context: Context, model: Any, rows: Rows, max_requests: int) -> float | None:
    """Seconds for all rows; None where they did not end in time."""
    case: dict[str, Any] = {"engine": "hf-cb", "max_requests": max_requests}
    if context.seconds_left < _LEAST_SECONDS:
        context.case(**case, skipped="no time")
        return None
    with _serving(model, rows, max_requests) as answer:
        answer(Rows([rows.prompts[0][:8]], [_WARM_UP_TOKENS]), context.seconds_left)
        seconds = answer(rows, context.seconds_left)
    free_memory(context.device)
    if seconds is None:
        context.case(**case, skipped="did not end in time")
    else:
        context.case(**case, seconds=seconds, output_tokens_per_s=sum(rows.lengths) / seconds)
    return seconds


@contextmanager
def _serving(model: Any, rows: Rows, max_requests: int) -> Iterator[Generate]:
    """A manager that stays for all rows, as `generate_batch` has one, but with a length for each row."""
    import transformers

    library: Any = transformers
    block_name = "page_size" if "page_size" in _fields(library.ContinuousBatchingConfig) else "block_size"
    config = library.ContinuousBatchingConfig(
        **{block_name: _BLOCK_SIZE},
        num_blocks=(max_requests + 1) * (-(-rows.longest // _BLOCK_SIZE) + 1),
        max_batch_tokens=max(_MAX_BATCH_TOKENS, max_requests),
        max_requests_per_batch=max_requests,
        allow_block_sharing=False,
    )
    greedy = library.GenerationConfig(do_sample=False, max_new_tokens=rows.longest, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
    manager.start()
    try:
        yield lambda work, seconds: _answer(manager, work, seconds)
    finally:
        manager.stop(block=True, timeout=_STOP_SECONDS, hard_stop=True)


def _fields(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _answer(manager: Any, rows: Rows, seconds: float) -> float | None:
    """Wall time until the last row has ended; None where that takes too long.

    Raises:
        RuntimeError: a row failed, or has another length than was asked for.
    """
    started = time.perf_counter()
    lengths = {
        manager.add_request(ids, max_new_tokens=length, eos_token_id=-1): length
        for ids, length in zip(rows.prompts, rows.lengths, strict=True)
    }
    for _ in rows.prompts:
        left = seconds - (time.perf_counter() - started)
        result = manager.get_result(timeout=left) if left > 0 else None
        if result is None:
            return None
        if result.error or len(result.generated_tokens) != lengths[result.request_id]:
            raise RuntimeError(f"a request failed: {result.error or 'wrong length'}")
    return time.perf_counter() - started


def _run_own(context: Context, shape: str, dtype: torch.dtype, rows: Rows) -> float:
    loaded = random_model(shape, dtype, context.device, dry=context.dry)
    watched = open_engine(loaded, GRAPHS_4, **limits(GRAPHS_4, rows, dry=context.dry))
    warm_up(watched, rows)
    return generate(watched.engine, rows.prompts, rows.lengths).seconds
