"""Decoding over the paged cache: one query token per sequence, in parts where one program each would leave GPUs idle.

Enters: queries [B, Hq, D] and the cache's block tables; K and V of the query's own position are in the cache already.
Leaves: [B, Hq, Dv]. The query heads that share a KV head are the rows of one matrix product, padded to what tensor
cores take, so that K and V are read once whatever the ratio. With few sequences a context is cut into splits, one
program each, whose results a second kernel joins by their log-sum-exp (Flash-Decoding,
https://pytorch.org/blog/flash-decoding/). The grid is a matter of shapes and of a bound that the host knows, so that a
CUDA graph can hold it; programs of splits past the end of a context leave at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cbgen.engine.triton.tiles import attend, begin_softmax

COMBINE_CHUNK: int = 16


def split_length(num_programs: int, longest: int, num_multiprocessors: int, least: int) -> int:
    """Positions per split; 0 for no splits.

    A power of two, and as long as it can be while two programs come to each multiprocessor: few lengths, so that a
    row is mostly cut alike in steps of different sizes.

    Args:
        num_programs: that there would be without splits.
        longest: positions that a row sees at most.
        num_multiprocessors: of the GPU.
        least: the shortest split; a power of two.
    """
    wanted = -(-2 * num_multiprocessors // num_programs)
    if wanted <= 1 or longest <= least:
        return 0
    length = least
    while -(-longest // (2 * length)) >= wanted:
        length *= 2
    return length


def split_count(longest: int, window: int, length: int) -> int:
    """Splits of a row that holds at most `longest` positions and sees the last `window` (0 for all) of them."""
    if length == 0:
        return 1
    held = -(-longest // length)
    return min(held, -(-(window - 1) // length) + 1) if window else held


@triton.jit(do_not_specialize=["table_stride", "window", "split_len"])
def decode_kernel(
    query_ptr,  # [B, Hq, D], strided
    key_ptr,  # [num_blocks, Hkv, BLOCK_SIZE, D]
    value_ptr,  # [num_blocks, Hkv, BLOCK_SIZE, Dv]
    table_ptr,  # [B, max_blocks] int32
    context_ptr,  # [B] int32
    sinks_ptr,  # [Hq] or None
    output_ptr,  # [B, Hq, Dv]; with splits [num_splits, B, Hq, Dv] float32
    sum_ptr,  # [num_splits, B, Hq] float32, log2 of the sums of exponentials; None without splits
    query_token_stride,
    query_head_stride,
    table_stride,
    window,
    split_len,
    scale,
    softcap,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid: (B, Hkv * row blocks of a group, num_splits)."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    part = tl.program_id(2)
    context_len = tl.load(context_ptr + seq)
    seen_from = tl.maximum(context_len - window, 0) if HAS_WINDOW else 0
    first, last = seen_from, context_len
    if HAS_SPLITS:
        split = seen_from // split_len + part
        first = tl.maximum(first, split * split_len)
        if part < tl.num_programs(2) - 1:  # the last one takes what is left, should the bound have been too low
            last = tl.minimum(last, (split + 1) * split_len)
        if first >= last:
            return
    in_group = tl.program_id(1) // NUM_KV_HEADS * ROWS + tl.arange(0, ROWS)
    is_head = in_group < GROUP
    heads = kv_head * GROUP + in_group  # [ROWS]
    key_dims, value_dims = tl.arange(0, D_PAD), tl.arange(0, V_PAD)
    query = tl.load(
        query_ptr + seq * query_token_stride + heads[:, None] * query_head_stride + key_dims[None, :],
        mask=is_head[:, None] & (key_dims[None, :] < KEY_DIM),
        other=0.0,
    )
    running_max, running_sum = begin_softmax(sinks_ptr, heads, in_group < tl.where(part == 0, GROUP, 0), ROWS)
    running_max, running_sum, values = attend(
        running_max,
        running_sum,
        tl.zeros([ROWS, V_PAD], tl.float32),
        query,
        key_ptr + kv_head * (BLOCK_SIZE * KEY_DIM),
        value_ptr + kv_head * (BLOCK_SIZE * VALUE_DIM),
        table_ptr + seq * table_stride,
        first // TILE * TILE,
        first,
        last,
        tl.zeros([ROWS], tl.int32) + first,
        tl.zeros([ROWS], tl.int32) + last,
        scale,
        softcap,
        HAS_SOFTCAP,
        False,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        KEY_DIM,
        VALUE_DIM,
        D_PAD,
        V_PAD,
        TILE,
    )
    values = values / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]  # a row of nothing gives 0
    row = seq * (NUM_KV_HEADS * GROUP) + heads  # [ROWS]
    if HAS_SPLITS:
        row += part.to(tl.int64) * tl.num_programs(0) * (NUM_KV_HEADS * GROUP)
        tl.store(sum_ptr + row, running_max + tl.log2(running_sum), mask=is_head)
    tl.store(
        output_ptr + row[:, None] * VALUE_DIM + value_dims[None, :],
        values.to(output_ptr.dtype.element_ty),
        mask=is_head[:, None] & (value_dims[None, :] < VALUE_DIM),
    )


@triton.jit(do_not_specialize=["num_splits", "window", "split_len"])
def combine_kernel(
    partial_ptr,  # [num_splits, B, Hq, Dv] float32
    sum_ptr,  # [num_splits, B, Hq] float32
    context_ptr,  # [B] int32
    output_ptr,  # [B, Hq, Dv]
    num_splits,
    window,
    split_len,
    HAS_WINDOW: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Grid: (B, Hq). What splits that had nothing to see have left in the buffers is not looked at."""
    seq = tl.program_id(0)
    num_rows = tl.num_programs(0) * tl.num_programs(1)
    row = seq.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    context_len = tl.load(context_ptr + seq)
    seen_from = tl.maximum(context_len - window, 0) if HAS_WINDOW else 0
    count = tl.cdiv(context_len, split_len) - seen_from // split_len
    count = tl.minimum(count, num_splits)
    value_dims = tl.arange(0, V_PAD)
    running_max = float("-inf")
    running_sum = 0.0
    values = tl.zeros([V_PAD], tl.float32)
    for start in range(0, count, CHUNK):
        parts = start + tl.arange(0, CHUNK)
        held = parts < count
        part_rows = row + parts.to(tl.int64) * num_rows  # [CHUNK]
        sums = tl.load(sum_ptr + part_rows, mask=held, other=float("-inf"))
        partial = tl.load(
            partial_ptr + part_rows[:, None] * VALUE_DIM + value_dims[None, :],
            mask=held[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        new_max = tl.maximum(running_max, tl.max(sums, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(sums - shift)  # [CHUNK]
        decay = tl.exp2(running_max - shift)
        running_sum = running_sum * decay + tl.sum(weights, 0)
        values = values * decay + tl.sum(weights[:, None] * partial, 0)
        running_max = new_max
    values = values / tl.where(running_sum == 0.0, 1.0, running_sum)
    tl.store(
        output_ptr + row * VALUE_DIM + value_dims,
        values.to(output_ptr.dtype.element_ty),
        mask=value_dims < VALUE_DIM,
    )
