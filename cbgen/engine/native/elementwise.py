"""The small operators of a layer on CPU: tensors in, `kernels/elementwise.cpp` does the work.

Shapes and meaning as in `cbgen.engine.operators.base`. Tensors are float32, bfloat16 or float16, on the CPU, their last
dimensions contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cbgen.engine.native.library import DTYPE_CODES, Float, Int, Int64, NativeLibrary, Pointer

MAX_HEAD_DIM = 1024  # kMaxHeadDim in the kernel


class NativeElementwise:
    """The kernels, for one loaded library."""

    def __init__(self, library: NativeLibrary) -> None:
        strided = [Pointer, Int64]
        self._rms_norm = library.function(
            "cbgen_rms_norm", [*strided, *strided, Pointer, Float, *strided, Int64, Int64, Int, Int]
        )
        self._activation_mul = library.function(
            "cbgen_activation_mul", [*strided, *strided, Int64, Int64, Int, Int, Int]
        )
        self._rope_and_store = library.function(
            "cbgen_rope_and_store",
            [*strided * 3, Int, Int, Pointer, Pointer, Float, *[Pointer] * 3, Int64, Int, Int, Int, Int64, Int, Int],
        )
        self._store = library.function(
            "cbgen_store", [Pointer, Int64, Int64, Pointer, Pointer, Int64, Int, Int, Int64, Int, Int]
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
        """See `Operators.rms_norm`."""
        num_rows, size = x.shape
        y = torch.empty(num_rows, size, dtype=x.dtype)
        pointer, stride = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
        self._rms_norm(
            x.data_ptr(), x.stride(0), pointer, stride, weight.data_ptr(), eps, y.data_ptr(), size, num_rows, size,
            DTYPE_CODES[x.dtype], torch.get_num_threads(),
        )  # fmt: skip
        return y

    def activation_mul(self, gate_up: Tensor, is_gelu: bool) -> Tensor:
        """See `Operators.activation_mul`."""
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty(num_rows, size, dtype=gate_up.dtype)
        self._activation_mul(
            gate_up.data_ptr(), gate_up.stride(0), y.data_ptr(), size, num_rows, size, int(is_gelu),
            DTYPE_CODES[gate_up.dtype], torch.get_num_threads(),
        )  # fmt: skip
        return y

    def rope_and_store(
        self,
        qkv: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """See `Operators.rope_and_store`; `norms` are the weights of queries and keys, and the epsilon."""
        _, num_kv_heads, block_size, head_dim = key_cache.shape
        query_norm, key_norm, eps = (
            (0, 0, 0.0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr(), norms[2])
        )
        self._rope_and_store(
            qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0),
            DTYPE_CODES[cos.dtype], cos.shape[1], query_norm, key_norm, eps, key_cache.data_ptr(),
            value_cache.data_ptr(), slot_mapping.data_ptr(), len(slot_mapping), num_heads, num_kv_heads, head_dim,
            block_size, DTYPE_CODES[qkv.dtype], torch.get_num_threads(),
        )  # fmt: skip

    def store(self, x: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        """Write [T, Hkv, D] into a cache [num_blocks, Hkv, block_size, D] of the same dtype."""
        num_tokens, num_kv_heads, head_dim = x.shape
        self._store(
            x.data_ptr(), x.stride(0), x.stride(1), cache.data_ptr(), slot_mapping.data_ptr(), num_tokens,
            num_kv_heads, head_dim, cache.shape[2], x.element_size(), torch.get_num_threads(),
        )  # fmt: skip
