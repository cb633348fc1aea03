"""Prefill chunks over the paged cache: any number of new tokens per sequence, which the cache holds already.

Enters: the packed queries after those of the decodes, and the offsets of each sequence's tokens. Leaves: their outputs.
A program takes a block of consecutive tokens of one sequence, each with the query heads that share a KV head, as the
rows of one matrix product. Which sequence and tokens are its own, it finds by a binary search over the offsets, so
that the grid depends on nothing but the number of tokens and of sequences (the idea of vLLM's unified kernel, arXiv
2511.11581). Tokens past the last sequence's are treated as one more sequence that holds nothing: they give 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cbgen.engine.triton.tiles import attend, begin_softmax


def num_query_blocks(num_tokens: int, num_seqs: int, block_tokens: int) -> int:
    """Enough for any way of cutting `num_tokens` into `num_seqs` sequences and a rest.

    Sequence i begins at block cu[i] // block_tokens + i: each has the room of its tokens, rounded up, and some are
    left empty.
    """
    return num_tokens // block_tokens + num_seqs + 1


@triton.jit
def _first_block(cu_seqlens_ptr, seq, before, BLOCK_TOKENS: tl.constexpr):
    """The number of a sequence's first query block."""
    return (tl.load(cu_seqlens_ptr + seq) - before) // BLOCK_TOKENS + seq


@triton.jit
def _sequence_of(cu_seqlens_ptr, query_block, num_seqs, before, BLOCK_TOKENS: tl.constexpr):
    """The last sequence that begins at or before a query block; `num_seqs` is the padding's."""
    low = 0
    high = num_seqs + 1
    while high - low > 1:
        middle = (low + high) // 2
        begins_after = _first_block(cu_seqlens_ptr, middle, before, BLOCK_TOKENS) > query_block
        low = tl.where(begins_after, low, middle)
        high = tl.where(begins_after, middle, high)
    return low


@triton.jit
def _place(cu_seqlens_ptr, context_ptr, query_block, num_seqs, before, num_tokens, BLOCK_TOKENS: tl.constexpr):
    """What a query block is made of.

    Returns:
        (sequence, its first token, the token after its last, positions it holds, the block's first token); tokens are
        counted as they lie in the packed row, and the last may come after the sequence's own.
    """
    seq = _sequence_of(cu_seqlens_ptr, query_block, num_seqs, before, BLOCK_TOKENS)
    start = tl.load(cu_seqlens_ptr + seq)
    stop = tl.load(cu_seqlens_ptr + seq + 1, mask=seq < num_seqs, other=num_tokens)
    context_len = tl.load(context_ptr + seq, mask=seq < num_seqs, other=0)
    block_start = start + (query_block - _first_block(cu_seqlens_ptr, seq, before, BLOCK_TOKENS)) * BLOCK_TOKENS
    return seq, start, stop, context_len, block_start


@triton.jit(do_not_specialize=["table_stride", "num_decodes", "num_seqs", "num_tokens", "window"])
def extend_kernel(
    query_ptr,  # [T, Hq, D], strided
    key_ptr,  # [num_blocks, Hkv, BLOCK_SIZE, D]
    value_ptr,  # [num_blocks, Hkv, BLOCK_SIZE, Dv]
    table_ptr,  # [num_decodes + num_seqs, max_blocks] int32
    cu_seqlens_ptr,  # [num_decodes + num_seqs + 1] int32
    context_ptr,  # [num_decodes + num_seqs] int32
    sinks_ptr,  # [Hq] or None
    output_ptr,  # [T, Hq, Dv]
    query_token_stride,
    query_head_stride,
    table_stride,
    num_decodes,  # sequences that are not looked at, each of one token
    num_seqs,  # the others
    num_tokens,  # T, padding included
    window,
    scale,
    softcap,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEADS: tl.constexpr,  # of them, in one program
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    ROWS: tl.constexpr,  # at least BLOCK_TOKENS * HEADS
    TILE: tl.constexpr,
) -> None:
    """Grid: (num_query_blocks, Hkv * cdiv(GROUP, HEADS))."""
    query_block = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last tokens see most: they begin first
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    cu_seqlens_ptr += num_decodes
    seq, start, stop, context_len, block_start = _place(
        cu_seqlens_ptr, context_ptr + num_decodes, query_block, num_seqs, num_decodes, num_tokens, BLOCK_TOKENS
    )
    if block_start >= stop:
        return
    row = tl.arange(0, ROWS)
    tokens = block_start + row // HEADS  # [ROWS]
    in_group = tl.program_id(1) // NUM_KV_HEADS * HEADS + row % HEADS
    is_query = (row < BLOCK_TOKENS * HEADS) & (tokens < stop) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group
    key_dims, value_dims = tl.arange(0, D_PAD), tl.arange(0, V_PAD)
    query = tl.load(
        query_ptr + (tokens.to(tl.int64) * query_token_stride + heads * query_head_stride)[:, None] + key_dims[None, :],
        mask=is_query[:, None] & (key_dims[None, :] < KEY_DIM),
        other=0.0,
    )
    computed = context_len - (stop - start)  # positions before this chunk
    row_last = computed + tokens - start + 1  # [ROWS]
    first_last = computed + block_start - start + 1
    last = tl.minimum(context_len, first_last + BLOCK_TOKENS - 1)
    first = 0
    row_first = tl.zeros([ROWS], tl.int32)
    if HAS_WINDOW:
        first = tl.maximum(first_last - window, 0)
        row_first = tl.maximum(row_last - window, 0)
    running_max, running_sum = begin_softmax(sinks_ptr, heads, is_query, ROWS)
    values = tl.zeros([ROWS, V_PAD], tl.float32)
    key_ptr += kv_head * (BLOCK_SIZE * KEY_DIM)
    value_ptr += kv_head * (BLOCK_SIZE * VALUE_DIM)
    table_ptr += (num_decodes + seq).to(tl.int64) * table_stride
    begin = first // TILE * TILE
    if not HAS_WINDOW:  # first what all rows see
        begin = tl.maximum(first_last, 0) // TILE * TILE
        running_max, running_sum, values = attend(
            running_max, running_sum, values, query, key_ptr, value_ptr, table_ptr, 0, 0, begin, row_first, row_last,
            scale, softcap, HAS_SOFTCAP, True,
            NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, D_PAD, V_PAD, TILE,
        )  # fmt: skip
    running_max, running_sum, values = attend(
        running_max, running_sum, values, query, key_ptr, value_ptr, table_ptr, begin, first, last, row_first, row_last,
        scale, softcap, HAS_SOFTCAP, False,
        NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, D_PAD, V_PAD, TILE,
    )  # fmt: skip
    values = values / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]  # a row of nothing gives 0
    tl.store(
        output_ptr + (tokens.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads)[:, None] * VALUE_DIM + value_dims[None, :],
        values.to(output_ptr.dtype.element_ty),
        mask=is_query[:, None] & (value_dims[None, :] < VALUE_DIM),
    )
