"""Stage `decode-kernel`: bytes a second of decode attention over batches and contexts, beside those of a copy.

Bytes are those of the keys and values in the context, each counted once; queries, outputs and partial results come on
top and are not counted. Before each run other memory is read, so that the second-level cache holds nothing of use, nor
anything that has yet to be written back; launches are replayed as a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.operators.base import Operators
from tests.gpu_check.candidates import candidate
from tests.gpu_check.clock import captured, free_memory, median_seconds
from tests.gpu_check.context import Context

_BLOCK_SIZE = 16
_LAYOUTS = {"8b": (32, 8, 128), "0.6b": (16, 8, 128)}  # query heads, KV heads, head size
_FLUSH_BYTES = 256 << 20
_USABLE_SHARE = 0.6  # of free memory, for the two caches


@dataclass(frozen=True, slots=True)
class _Cache:
    """Random keys and values, and an order of their blocks that is not the one in memory.

    Attributes:
        key, value: [num_blocks, Hkv, block_size, D].
        order: [num_blocks] int32.
    """

    key: Tensor
    value: Tensor
    order: Tensor


def run(context: Context) -> None:
    operators = candidate(context)
    batches, lengths = ((1, 2), (20, 40)) if context.dry else ((64, 256, 16, 1, 1024), (512, 2048, 128, 8192))
    flush = torch.zeros((1 << 16) if context.dry else _FLUSH_BYTES // 4, device=context.device)  # float32
    with torch.inference_mode():
        for name, layout in _LAYOUTS.items():
            heads = (4, 2, 16) if context.dry else layout
            most = _most_blocks(context, heads)
            wanted = max(batches) * -(-max(lengths) // _BLOCK_SIZE)
            cache = _make_cache(context.device, heads, min(most, wanted))
            for length in lengths:
                for batch in batches:
                    _measure(context, operators, name, heads, cache, batch, length, flush)
            del cache
            free_memory(context.device)  # the next one asks how much there is


def _most_blocks(context: Context, heads: tuple[int, int, int]) -> int:
    block_bytes = 2 * heads[1] * _BLOCK_SIZE * heads[2] * 2
    free = torch.cuda.mem_get_info(context.device)[0] if context.is_cuda else 1 << 24
    return int(free * _USABLE_SHARE) // block_bytes


def _make_cache(device: torch.device, heads: tuple[int, int, int], num_blocks: int) -> _Cache:
    shape = num_blocks, heads[1], _BLOCK_SIZE, heads[2]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    key, value = (torch.empty(shape, dtype=dtype, device=device).normal_() for _ in range(2))
    return _Cache(key, value, torch.randperm(num_blocks, device=device).int())


def _measure(
    context: Context,
    operators: Operators,
    layout: str,
    heads: tuple[int, int, int],
    cache: _Cache,
    batch: int,
    length: int,
    flush: Tensor,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    columns = -(-length // _BLOCK_SIZE)
    case = {"layout": layout, "batch": batch, "context": length}
    if batch * columns > len(cache.order):
        context.case(**case, skipped="does not fit")
        return
    if context.seconds_left < 0:
        context.case(**case, skipped="no time")
        return
    query = torch.randn(batch, num_heads, head_dim, device=context.device).to(cache.key.dtype)
    call = AttentionCall(0, head_dim**-0.5)
    metadata = _metadata(cache.order[: batch * columns].view(batch, columns), batch, length)
    work = captured(lambda: operators.attention(call, query, cache.key, cache.value, metadata), context.device)
    repeats = 3 if context.dry else 10
    seconds = median_seconds(work, context.device, repeats=repeats, before=flush.sum)
    rate = 2 * batch * length * num_kv_heads * head_dim * cache.key.itemsize / seconds
    share = rate / context.bandwidth if context.bandwidth else None
    context.case(**case, us=seconds * 1e6, gb_per_s=rate / 1e9, share_of_copy=share)


def _metadata(block_tables: Tensor, batch: int, length: int) -> AttentionMetadata:
    device = block_tables.device
    return AttentionMetadata(
        slot_mapping=torch.zeros(batch, dtype=torch.int64, device=device),
        block_tables=block_tables,
        context_lens=torch.full((batch,), length, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device),
        num_decodes=batch,
        max_context_len=length,
        query_starts=[],
        host_context_lens=[],
    )
