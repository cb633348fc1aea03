"""The operators on CPU, by the library that `cbgen.engine.native` compiles.

The kernels take tensors as a model's layers make them; the rare other one (an unusual dtype, a strange layout) goes to
the reference, with the same result.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.native.attention import MAX_HEAD_DIM as MAX_ATTENTION_HEAD_DIM
from cbgen.engine.native.attention import PagedAttention
from cbgen.engine.native.elementwise import MAX_HEAD_DIM, NativeElementwise
from cbgen.engine.native.gemm import NativeGemm
from cbgen.engine.native.library import DTYPE_CODES, NativeLibrary
from cbgen.engine.native.sampling import NativeSampling
from cbgen.engine.operators.base import Activation, DrawParams, HeadLayout
from cbgen.engine.operators.reference import ReferenceOperators


class NativeOperators(ReferenceOperators):
    """See `Operators`; what has no kernel is done as in the reference.

    Attributes:
        library: for those who have kernels of their own in it.
        gemm: its linear layers.
    """

    name = "native"

    def __init__(self, library: NativeLibrary) -> None:
        self.library = library
        self.gemm = NativeGemm(library)
        self._attention = PagedAttention(library)
        self._elementwise = NativeElementwise(library)
        self._sampling = NativeSampling(library)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """See `Operators.rms_norm`."""
        if not _accepts(x) or (residual is not None and not _accepts(residual, x.dtype)):
            return super().rms_norm(x, weight, eps, residual)
        return self._elementwise.rms_norm(x, weight, eps, residual)

    def activation_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See `Operators.activation_mul`."""
        if not _accepts(gate_up):
            return super().activation_mul(gate_up, activation)
        return self._elementwise.activation_mul(gate_up, activation == "gelu_tanh")

    def rope_and_store(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """See `Operators.rope_and_store`."""
        fits = layout.head_dim <= MAX_HEAD_DIM and _accepts(cos) and _accepts(sin, cos.dtype)
        if not fits or not _accepts(qkv, key_cache.dtype):
            return super().rope_and_store(qkv, layout, cos, sin, key_cache, value_cache, slot_mapping)
        norms = layout.norms
        weights = None if norms is None else (norms.query_weight, norms.key_weight, norms.eps)
        self._elementwise.rope_and_store(qkv, layout.num_heads, cos, sin, weights, key_cache, value_cache, slot_mapping)
        return qkv[:, : layout.num_heads * layout.head_dim].view(len(qkv), layout.num_heads, layout.head_dim)

    def store(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `Operators.store`."""
        if not _accepts(key, key_cache.dtype) or not _accepts(value, value_cache.dtype):
            super().store(key, value, key_cache, value_cache, slot_mapping)
            return
        self._elementwise.store(key, key_cache, slot_mapping)
        self._elementwise.store(value, value_cache, slot_mapping)

    def attention(
        self, call: AttentionCall, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `Operators.attention`."""
        widest = max(key_cache.shape[3], value_cache.shape[3])
        if widest > MAX_ATTENTION_HEAD_DIM or not _accepts(query, key_cache.dtype):
            return super().attention(call, query, key_cache, value_cache, metadata)
        return self._attention(
            query,
            key_cache,
            value_cache,
            metadata.block_tables,
            metadata.cu_seqlens_q,
            metadata.context_lens,
            num_decodes=metadata.num_decodes,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
            num_threads=torch.get_num_threads(),
        )

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Operators.argmax`."""
        return self._sampling.argmax(logits) if _accepts(logits) else super().argmax(logits)

    def draw(self, logits: Tensor, rows: npt.NDArray[np.int64], params: DrawParams) -> Tensor:
        """See `Operators.draw`."""
        if not _accepts(logits):
            return super().draw(logits, rows, params)
        log_min_p = torch.log(torch.from_numpy(params.min_p)).numpy()  # by torch: the reference compares with it, too
        return self._sampling.draw(
            logits, rows, params.temperature, params.top_k, params.top_p, log_min_p, params.uniforms
        )


def _accepts(tensor: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether the kernels can read it: their dtypes (or just this one), the last dimension contiguous."""
    known = tensor.dtype in DTYPE_CODES if dtype is None else tensor.dtype is dtype and dtype in DTYPE_CODES
    return known and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
