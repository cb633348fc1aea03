"""What the two attention kernels share: a softmax that runs over tiles of a paged cache.

Enters: queries of one KV head, in registers, and the block table of one sequence. Leaves: the running maximum, the
running sum and the weighted values, float32, after some range of positions.

The running softmax is that of FlashAttention (arXiv 2205.14135), in base two as in Triton's own examples: logits carry
the factor log2(e), because the hardware's exponential is that of two. Tiles begin at multiples of their size, counted
from the sequence's first position: what a query sees is added up in the same order wherever its range begins.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def _capped(logits, softcap):
    """softcap * tanh(logits / softcap), by an exponential that cannot overflow."""
    fallen = tl.exp(tl.abs(logits) * (-2.0 / softcap))
    magnitude = softcap * (1.0 - fallen) / (1.0 + fallen)
    return tl.where(logits < 0.0, -magnitude, magnitude)


@triton.jit
def begin_softmax(sinks_ptr, heads, takes_sink, ROWS: tl.constexpr):  # noqa: ANN201
    """(Running maximum, running sum) of rows that have seen nothing but, some of them, the sink of their head."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        running_max = tl.load(sinks_ptr + heads, mask=takes_sink, other=float("-inf")).to(tl.float32) * LOG2_E
        running_sum = tl.where(takes_sink, 1.0, 0.0)
    return running_max, running_sum


@triton.jit
def attend(  # noqa: ANN201
    running_max,  # [ROWS]
    running_sum,  # [ROWS]
    values,  # [ROWS, V_PAD]
    query,  # [ROWS, D_PAD]
    key_ptr,  # the cache [num_blocks, Hkv, BLOCK_SIZE, D], at its own head
    value_ptr,
    table_ptr,  # of the sequence
    begin,  # a multiple of TILE
    first,  # what lies before it, or from `last` on, is not read
    last,
    row_first,  # [ROWS] what each row sees: from here ..
    row_last,  # [ROWS] .. to before here
    scale,  # with the factor log2(e), unless there is a cap
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    ALL_SEEN: tl.constexpr,  # every row sees every position from `begin` to `last`, a multiple of TILE
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Go on with a softmax over the positions from `begin` to `last`."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    in_tile = tl.arange(0, TILE)
    key_dims, value_dims = tl.arange(0, D_PAD), tl.arange(0, V_PAD)
    for start in range(begin, last, TILE):
        positions = start + in_tile
        # Never read what was not written: it may be NaN, and 0 x NaN is NaN.
        if ALL_SEEN:
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
            key_mask, value_mask = key_dims[None, :] < KEY_DIM, value_dims[None, :] < VALUE_DIM
        else:
            held = (positions >= first) & (positions < last)
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=held, other=0)
            key_mask = held[:, None] & (key_dims[None, :] < KEY_DIM)
            value_mask = held[:, None] & (value_dims[None, :] < VALUE_DIM)
        slots = blocks.to(tl.int64) * (NUM_KV_HEADS * BLOCK_SIZE) + positions % BLOCK_SIZE  # [TILE]
        key = tl.load(key_ptr + slots[:, None] * KEY_DIM + key_dims[None, :], mask=key_mask, other=0.0)
        value = tl.load(value_ptr + slots[:, None] * VALUE_DIM + value_dims[None, :], mask=value_mask, other=0.0)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [ROWS, TILE]
        if HAS_SOFTCAP:
            logits = _capped(logits, softcap) * LOG2_E
        if not ALL_SEEN:
            seen = (positions[None, :] >= row_first[:, None]) & (positions[None, :] < row_last[:, None])
            logits = tl.where(seen, logits, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen nothing yet: -inf less -inf
        weights = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(running_max - shift)
        running_sum = running_sum * decay + tl.sum(weights, 1)
        values = values * decay[:, None]
        values = tl.dot(weights.to(value.dtype), value, values, input_precision="ieee")
        running_max = new_max
    return running_max, running_sum, values
