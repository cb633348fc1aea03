"""Stage `memory`: a step for which there is no memory is cut into smaller ones, and all rows end all the same.

On a GPU the memory is really gone: another tensor holds it. In a dry run the model says so itself when it is given more
tokens than a limit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cbgen.engine.engine import Engine
from cbgen.engine.loader import LoadedModel
from tests.gpu_check.clock import free_memory
from tests.gpu_check.context import Context
from tests.gpu_check.engine import equal_share
from tests.gpu_check.models import random_model
from tests.gpu_check.modes import EAGER, GRAPHS_4, Mode, generate, open_engine

_LEFT_BYTES = 384 << 20  # for the activations of a step, of which a full one needs some gigabytes


def run(context: Context) -> None:
    dtype = torch.float32 if context.dry else torch.bfloat16
    loaded = random_model("0.6b", dtype, context.device, dry=context.dry)
    num_rows, length, num_tokens = (4, 40, 4) if context.dry else (64, 512, 8)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, loaded.vocab_size, length).tolist() for _ in range(num_rows)]
    for mode in (EAGER, GRAPHS_4):
        expected, _ = _run(context, loaded, mode, prompts, num_tokens, short=False)
        got, engine = _run(context, loaded, mode, prompts, num_tokens, short=True)
        context.case(
            mode=mode.name,
            rows=num_rows,
            out_of_memory=engine.stats.num_out_of_memory,
            equal_share=equal_share(got, expected),
            ok=engine.stats.num_out_of_memory > 0 and all(len(ids) == num_tokens for ids in got),
        )
        del engine
        free_memory(context.device)


def _run(
    context: Context, loaded: LoadedModel, mode: Mode, prompts: list[list[int]], num_tokens: int, *, short: bool
) -> tuple[list[list[int]], Engine]:
    """Answers of a new engine whose steps may hold all prompts at once, with plenty of memory or short of it."""
    total = len(prompts) * len(prompts[0])
    watched = open_engine(
        loaded,
        mode,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=total,
        max_model_len=len(prompts[0]) + num_tokens,
        kv_cache_memory=(8 << 20) if context.dry else (6 << 30),
    )
    engine = watched.engine
    if not short:
        return generate(engine, prompts, [num_tokens] * len(prompts)).token_ids, engine
    held = _hold_memory(context.device) if context.is_cuda else _refuse_above(loaded, total // 2)
    try:
        return generate(engine, prompts, [num_tokens] * len(prompts)).token_ids, engine
    finally:
        if context.is_cuda:
            del held
            free_memory(context.device)
        else:
            held.remove()


def _hold_memory(device: torch.device) -> Any:
    """All but a little of what is free."""
    free_memory(device)
    free = torch.cuda.mem_get_info(device)[0]
    return torch.empty(max(0, free - _LEFT_BYTES), dtype=torch.uint8, device=device)


def _refuse_above(loaded: LoadedModel, num_tokens: int) -> Any:
    """A hook of the model; `remove()` takes it away."""

    def refuse(_module: Any, _arguments: Any, keywords: dict[str, Any]) -> None:
        if keywords["input_ids"].numel() > num_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory (a rehearsal)")

    return loaded.model.register_forward_pre_hook(refuse, with_kwargs=True)
