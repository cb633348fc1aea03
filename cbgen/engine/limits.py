"""How much fits: context, batch and KV blocks, from the model, the device's memory, and what the user asked for.

Memory = weights (loaded by now) + activations and logits of the largest step + KV cache. The KV cache gets what is
left, and never more than all slots could use.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from cbgen.config import EngineConfig
from cbgen.engine.kv_cache import bytes_per_block
from cbgen.engine.loader import LoadedModel, probe_step
from cbgen.errors import ModelError, UsageError

BLOCK_SIZE = 16  # tokens
_DEFAULT_SEQS = {"cpu": 128, "cuda": 256}
_DEFAULT_TOKENS = {"cpu": 512, "cuda": 4096}
_USABLE_SHARE = {"cpu": 0.5, "cuda": 0.9}  # of free memory; on CPU other programs live there too


@dataclass(frozen=True, slots=True)
class Limits:
    """Resolved limits of one engine.

    Attributes:
        max_model_len: longest sequence, prompt plus output, in tokens.
        num_blocks: KV blocks of `block_size` tokens.
        notices: the model's, and one sentence for each limit that is lower than the user might expect.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    notices: tuple[str, ...]


def choose_limits(loaded: LoadedModel, config: EngineConfig, free_bytes: int | None = None) -> Limits:
    """Fill in what the user left open.

    Args:
        loaded: the model, on its device.
        config: the user's wishes.
        free_bytes: free memory of the device; measured when None.

    Raises:
        UsageError: --max-model-len is beyond what the model can do.
        ModelError: the KV cache would be too small.
    """
    notices = list(loaded.notices)
    kind = loaded.device.type
    max_model_len = _context(loaded, config, notices)
    max_num_batched_tokens = config.max_num_batched_tokens or max(
        _DEFAULT_TOKENS.get(kind, 512), config.max_num_seqs or 0
    )
    max_num_seqs = config.max_num_seqs or min(_DEFAULT_SEQS.get(kind, 32), max_num_batched_tokens)
    block_bytes = bytes_per_block(loaded.layers, BLOCK_SIZE, loaded.dtype)
    wanted = max_num_seqs * -(-max_model_len // BLOCK_SIZE)
    if config.kv_cache_memory is None:
        free = _free_bytes(loaded.device) if free_bytes is None else free_bytes
        usable = int(free * _USABLE_SHARE.get(kind, 0.5))
        _check_step_fits(loaded, max_num_batched_tokens, max_num_seqs, usable)
        budget = usable - _step_bytes(loaded, max_num_batched_tokens, max_num_seqs)
    else:
        budget = config.kv_cache_memory
    num_blocks = min(wanted, max(budget, 0) // block_bytes)
    capacity = num_blocks * BLOCK_SIZE
    if capacity < max_model_len:
        if config.max_model_len is not None or capacity < 2:
            raise ModelError(
                f"the KV cache has room for {capacity} tokens, fewer than one row of {max_model_len}: free memory, "
                "raise --kv-cache-memory, or lower --max-model-len"
            )
        notices.append(f"context limited to {capacity} tokens (the model allows {max_model_len}): KV cache memory")
        max_model_len = capacity
    return Limits(
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        num_blocks,
        BLOCK_SIZE,
        num_blocks * block_bytes,
        tuple(notices),
    )


def _context(loaded: LoadedModel, config: EngineConfig, notices: list[str]) -> int:
    reason = f" ({loaded.max_context_reason})" if loaded.max_context_reason else ""
    if config.max_model_len is None:
        if reason:
            notices.append(f"context limited to {loaded.max_context} tokens{reason}")
        return loaded.max_context
    if config.max_model_len > loaded.max_context:
        raise UsageError(
            f"--max-model-len {config.max_model_len} is more than the model's {loaded.max_context} tokens{reason}"
        )
    return config.max_model_len


def _check_step_fits(loaded: LoadedModel, num_tokens: int, num_seqs: int, usable_bytes: int) -> None:
    """Before anything of that size is tried.

    Raises:
        ModelError: it does not fit.
    """
    needed = _estimated_activations(loaded, num_tokens) + _logits_bytes(loaded, num_seqs)
    if needed > usable_bytes:
        raise ModelError(
            f"a step of {num_tokens:,} tokens and {num_seqs:,} rows needs about {needed / 1e9:,.1f} GB, and "
            f"{usable_bytes / 1e9:,.1f} GB are usable: lower --max-num-batched-tokens or --max-num-seqs, or free memory"
        )


def _step_bytes(loaded: LoadedModel, num_tokens: int, num_seqs: int) -> int:
    """Peak memory of one step beyond weights and KV cache: activations of the widest layer, and logits while sampling.

    Measured by running such a step on CUDA, where memory is what decides; estimated on CPU.
    """
    activations = _estimated_activations(loaded, num_tokens)
    if loaded.device.type == "cuda":
        activations = max(activations, _measured_activations(loaded, num_tokens))
    return activations + _logits_bytes(loaded, num_seqs)


def _estimated_activations(loaded: LoadedModel, num_tokens: int) -> int:
    return num_tokens * (12 * loaded.hidden_size + 3 * loaded.intermediate_size) * loaded.dtype.itemsize


def _logits_bytes(loaded: LoadedModel, num_seqs: int) -> int:
    """In the model's dtype, then float32 copies in the sampler."""
    return num_seqs * loaded.vocab_size * (loaded.dtype.itemsize + 4 * 4)


def _measured_activations(loaded: LoadedModel, num_tokens: int) -> int:
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before = torch.cuda.memory_allocated(loaded.device)
    probe_step(loaded, num_tokens)
    return torch.cuda.max_memory_allocated(loaded.device) - before


def _free_bytes(device: torch.device) -> int:
    """Free memory of the device; on CPU also below the container's own limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or no limit ("max")
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return free
