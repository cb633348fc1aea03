"""Attention of one layer over one packed step, on the CPU: `kernels/attention.cpp` as a Python function.

Enters: the step's queries and its ragged shape; K and V are in the paged cache already, those of this step's tokens
included. Leaves: [T, Hq, Dv]. A sequence's result depends neither on what else is in the step nor on the number of
threads, and a prompt token's not on how the prompt was cut into chunks: all to the bit.

Shapes: T tokens of B sequences in one packed row, Hq query heads, Hkv KV heads, D and Dv sizes of a key and a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cbgen.engine.native.library import DTYPE_CODES, Float, Int, Int64, NativeLibrary, Pointer

MAX_HEAD_DIM = 256
_ARGUMENTS = [Pointer] * 8 + [Int64] * 3 + [Int] * 7 + [Float, Int, Float, Int, Int]


class PagedAttention:
    """The kernel of one library. Reentrant."""

    def __init__(self, library: NativeLibrary) -> None:
        self._attention = library.function("cbgen_attention", _ARGUMENTS)

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
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        num_threads: int = 1,
    ) -> Tensor:
        """Attend. What lies in the cache beyond a sequence's length, or before its window, is never looked at.

        Args:
            query: [T, Hq, D] float32, bfloat16 or float16; heads and tokens at any stride, D contiguous.
            key_cache: [num_blocks, Hkv, block_size, D]; value_cache: [.., Dv]; contiguous, of the query's dtype.
            block_tables: [B, max_blocks] int32; entries past a sequence's own blocks are not read.
            cu_seqlens_q: [B + 1] int32 offsets of each sequence's tokens in the packed row.
            context_lens: [B] int32 positions each sequence holds, its tokens of this step being the last of them.
            num_decodes: the first that many sequences have exactly one token.
            scale: factor of the dot products.
            window: a query sees the last `window` positions, itself included; None for all.
            softcap: logits become softcap * tanh(logits / softcap); None for as they are.
            sinks: [Hq] one extra logit per head in the softmax's denominator.
            num_threads: at most that many threads work.

        Returns:
            [T, Hq, Dv], contiguous, in the dtype of `query`.

        Raises:
            ValueError: shapes, dtypes or strides the kernel does not take.
        """
        _check(query, key_cache, value_cache, block_tables, cu_seqlens_q, context_lens)
        num_tokens, num_heads, key_dim = query.shape
        _, num_kv_heads, block_size, value_dim = value_cache.shape
        output = query.new_empty(num_tokens, num_heads, value_dim)
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
        self._attention(
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            output.data_ptr(),
            block_tables.data_ptr(),
            cu_seqlens_q.data_ptr(),
            context_lens.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            query.stride(0),
            query.stride(1),
            block_tables.stride(0),
            context_lens.shape[0],
            num_decodes,
            num_heads,
            num_kv_heads,
            key_dim,
            value_dim,
            block_size,
            scale,
            window or 0,
            softcap or 0.0,
            DTYPE_CODES[query.dtype],
            num_threads,
        )
        return output


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
) -> None:
    """Refuse what would make the kernel read elsewhere. Values are the caller's word; shapes and strides are not."""
    _, num_heads, key_dim = query.shape
    if query.dtype not in DTYPE_CODES or not query.dtype == key_cache.dtype == value_cache.dtype:
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
