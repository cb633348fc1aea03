"""Attention of one layer over one packed step, on CUDA: the decode and the extend kernel as one Python function.

Enters: the step's queries and its ragged shape; K and V are in the paged cache already, those of this step's tokens
included. Leaves: [T, Hq, Dv]. Nothing is read from the device and nothing but outputs and partial results is
allocated: a call can be part of a CUDA graph, which then serves any step of the same shapes and the same bound of the
lengths. Accumulation is float32; float32 inputs are multiplied at full precision.

What a sequence's result depends on beside its own tokens, to the bit: a prompt token's on nothing, however the prompt
was cut into chunks; a decode's on the length of a split alone, which follows from the number of decodes, the KV heads
and `max_context_len` (see `split_length`). Decodes cut differently differ as float32 sums in another order do.

Shapes: T tokens of B sequences in one packed row, Hq query heads, Hkv KV heads, D and Dv sizes of a key and a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cbgen.engine.triton.decode import COMBINE_CHUNK, combine_kernel, decode_kernel, split_count, split_length
from cbgen.engine.triton.extend import extend_kernel, num_query_blocks
from cbgen.engine.triton.tables import DecodeConfig, ExtendConfig, decode_config, extend_config
from cbgen.engine.triton.tiles import LOG2_E

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PagedAttention:
    """The kernels for one kind of GPU. Reentrant.

    Args:
        capability: its CUDA compute capability, as (9, 0).
        num_multiprocessors: how many it has.
        decode, extend: configurations in place of those of the tables, for whoever looks for better ones.
    """

    def __init__(
        self,
        capability: tuple[int, int],
        num_multiprocessors: int,
        *,
        decode: DecodeConfig | None = None,
        extend: ExtendConfig | None = None,
    ) -> None:
        self._capability = capability
        self._num_multiprocessors = num_multiprocessors
        self._decode_config = decode
        self._extend_config = extend

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        context_lens: Tensor,
        *,
        num_decodes: int,
        max_context_len: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend. What lies in the cache beyond a sequence's length, or before its window, is never looked at.

        Args:
            query: [T, Hq, D] float32, bfloat16 or float16; heads and tokens at any stride, D contiguous. Tokens past
                those of the last sequence are padding.
            key_cache: [num_blocks, Hkv, block_size, D]; value_cache: [.., Dv]; contiguous, of the query's dtype.
            block_tables: [B, max_blocks] int32; entries past a sequence's own blocks are not read.
            cu_seqlens_q: [B + 1] int32 offsets of each sequence's tokens in the row; not read when all are decodes'.
            context_lens: [B] int32 positions each sequence holds, its tokens of this step being the last of them.
            num_decodes: the first that many sequences have exactly one token. The others may have none.
            max_context_len: positions that a decode holds at most; it decides how decodes are split, and one that is
                too low costs time only.
            scale: factor of the dot products.
            window: a query sees the last `window` positions, itself included; None for all.
            softcap: logits become softcap * tanh(logits / softcap); None for as they are.
            sinks: [Hq] one extra logit per head in the softmax's denominator.

        Returns:
            [T, Hq, Dv], contiguous, in the dtype of `query`; 0 for padding and for who holds nothing.

        Raises:
            ValueError: shapes, dtypes or strides the kernels do not take.
        """
        _check(query, key_cache, value_cache, block_tables, cu_seqlens_q, context_lens)
        output = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
        if num_decodes:
            self._decode(
                query,
                key_cache,
                value_cache,
                block_tables,
                context_lens,
                output,
                num_decodes,
                max_context_len,
                scale,
                window or 0,
                softcap or 0.0,
                sinks,
            )
        if query.shape[0] > num_decodes:
            self._extend(
                query,
                key_cache,
                value_cache,
                block_tables,
                cu_seqlens_q,
                context_lens,
                output,
                num_decodes,
                scale,
                window or 0,
                softcap or 0.0,
                sinks,
            )
        return output

    def _decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        output: Tensor,
        num_decodes: int,
        max_context_len: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> None:
        """Fill the first rows of the output, [num_decodes, Hq, Dv]."""
        _, num_heads, key_dim = query.shape
        _, num_kv_heads, block_size, value_dim = value_cache.shape
        widest = max(key_dim, value_dim)
        config = self._decode_config or decode_config(self._capability, widest, query.element_size())
        group = num_heads // num_kv_heads
        rows = min(config.rows, _padded(group))
        programs_per_seq = num_kv_heads * -(-group // rows)
        split_len = split_length(
            num_decodes * programs_per_seq,
            min(max_context_len, window or max_context_len),
            self._num_multiprocessors,
            config.tile,
        )
        num_splits = split_count(max_context_len, window, split_len)
        target, sums = output, None
        if num_splits > 1:
            target = output.new_empty((num_splits, num_decodes, num_heads, value_dim), dtype=torch.float32)
            sums = output.new_empty((num_splits, num_decodes, num_heads), dtype=torch.float32)
        decode_kernel[(num_decodes, programs_per_seq, num_splits)](
            query,
            key_cache,
            value_cache,
            block_tables,
            context_lens,
            sinks,
            target,
            sums,
            query.stride(0),
            query.stride(1),
            block_tables.stride(0),
            window,
            split_len,
            scale if softcap else scale * LOG2_E,
            softcap,
            HAS_WINDOW=window > 0,
            HAS_SOFTCAP=softcap > 0,
            HAS_SPLITS=num_splits > 1,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            BLOCK_SIZE=block_size,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            D_PAD=_padded(key_dim),
            V_PAD=_padded(value_dim),
            ROWS=rows,
            TILE=config.tile,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if num_splits > 1:
            combine_kernel[(num_decodes, num_heads)](
                target,
                sums,
                context_lens,
                output,
                num_splits,
                window,
                split_len,
                HAS_WINDOW=window > 0,
                VALUE_DIM=value_dim,
                V_PAD=_padded(value_dim),
                CHUNK=COMBINE_CHUNK,
                num_warps=4,
            )

    def _extend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        context_lens: Tensor,
        output: Tensor,
        num_decodes: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> None:
        """Fill the rest of the output, [T - num_decodes, Hq, Dv]."""
        num_tokens, num_heads, key_dim = query.shape
        _, num_kv_heads, block_size, value_dim = value_cache.shape
        widest = max(key_dim, value_dim)
        config = self._extend_config or extend_config(self._capability, widest, query.element_size())
        group = num_heads // num_kv_heads
        heads = min(group, config.rows)  # of a group, in one program
        block_tokens = config.rows // heads
        num_seqs = context_lens.shape[0] - num_decodes
        num_blocks = num_query_blocks(num_tokens - num_decodes, num_seqs, block_tokens)
        extend_kernel[(num_blocks, num_kv_heads * -(-group // heads))](
            query,
            key_cache,
            value_cache,
            block_tables,
            cu_seqlens_q,
            context_lens,
            sinks,
            output,
            query.stride(0),
            query.stride(1),
            block_tables.stride(0),
            num_decodes,
            num_seqs,
            num_tokens,
            window,
            scale if softcap else scale * LOG2_E,
            softcap,
            HAS_WINDOW=window > 0,
            HAS_SOFTCAP=softcap > 0,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEADS=heads,
            BLOCK_TOKENS=block_tokens,
            BLOCK_SIZE=block_size,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            D_PAD=_padded(key_dim),
            V_PAD=_padded(value_dim),
            ROWS=config.rows,
            TILE=config.tile,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def _padded(size: int) -> int:
    """The power of two from 16 that holds it: what a tile of a matrix product can be."""
    return max(16, 1 << (size - 1).bit_length())


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
) -> None:
    """Refuse what would make the kernels read elsewhere. Values are the caller's word; shapes and strides are not."""
    _, num_heads, key_dim = query.shape
    if query.dtype not in DTYPES or not query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(f"no attention over {query.dtype}, {key_cache.dtype} and {value_cache.dtype}")
    if key_cache.shape[3] != key_dim or key_cache.shape[:3] != value_cache.shape[:3] or num_heads % key_cache.shape[1]:
        raise ValueError(f"shapes {query.shape}, {key_cache.shape} and {value_cache.shape} do not fit")
    if max(key_dim, value_cache.shape[3]) > MAX_HEAD_DIM:
        raise ValueError(f"heads of more than {MAX_HEAD_DIM} values")
    contiguous = key_cache.is_contiguous() and value_cache.is_contiguous() and query.stride(2) == 1
    ragged = (cu_seqlens_q, context_lens)
    tables = block_tables.stride(1) == 1 or block_tables.shape[1] == 1  # the stride of a single column is arbitrary
    if not (contiguous and tables and all(t.is_contiguous() for t in ragged)):
        raise ValueError("the caches, each query and the step's lengths must be contiguous")
    if any(t.dtype != torch.int32 for t in (block_tables, *ragged)):
        raise ValueError("block tables and lengths must be int32")
    if block_tables.shape[0] < context_lens.shape[0] or cu_seqlens_q.shape[0] != context_lens.shape[0] + 1:
        raise ValueError("block tables and lengths are of different steps")
