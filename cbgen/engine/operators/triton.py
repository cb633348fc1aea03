"""The operators on CUDA, by the Triton kernels of `cbgen.engine.triton`.

The kernels take tensors as a model's layers make them; the rare other one (an unusual dtype, a strange layout) goes to
the reference, with the same result. Nothing here waits for the device, so that CUDA graphs can hold all of it but
`argmax` and `draw` with parameters of the host.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.operators.base import Activation, DrawParams, HeadLayout, Penalties, SampleArguments, SampleTensors
from cbgen.engine.operators.reference import ReferenceOperators
from cbgen.engine.slot_state import SlotState, StepInput
from cbgen.engine.triton import elementwise
from cbgen.engine.triton import slots as slot_kernels
from cbgen.engine.triton.attention import MAX_HEAD_DIM as MAX_ATTENTION_HEAD_DIM
from cbgen.engine.triton.attention import PagedAttention
from cbgen.engine.triton.sampling import TritonSampling

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class TritonOperators(ReferenceOperators):
    """See `Operators`; what has no kernel is done as in the reference.

    Args:
        capability: the GPU's compute capability, by which tiles are chosen.
        num_multiprocessors: of the GPU.
    """

    name = "triton"
    is_capturable = True

    def __init__(self, capability: tuple[int, int], num_multiprocessors: int) -> None:
        self._attention = PagedAttention(capability, num_multiprocessors)
        self._sampling = TritonSampling()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """See `Operators.rms_norm`."""
        fits = x.shape[-1] <= elementwise.MAX_NORM_SIZE and _accepts(x)
        if not fits or (residual is not None and not _accepts(residual, x.dtype)):
            return super().rms_norm(x, weight, eps, residual)
        return elementwise.rms_norm(x, weight, eps, residual)

    def activation_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See `Operators.activation_mul`."""
        if not _accepts(gate_up):
            return super().activation_mul(gate_up, activation)
        return elementwise.activation_mul(gate_up, activation == "gelu_tanh")

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
        fits = layout.head_dim <= elementwise.MAX_HEAD_DIM and _accepts(cos) and _accepts(sin)
        if not fits or not _accepts(qkv, key_cache.dtype):
            return super().rope_and_store(qkv, layout, cos, sin, key_cache, value_cache, slot_mapping)
        norms = layout.norms
        weights = None if norms is None else (norms.query_weight, norms.key_weight, norms.eps)
        elementwise.rope_and_store(qkv, layout.num_heads, cos, sin, weights, key_cache, value_cache, slot_mapping)
        return qkv[:, : layout.num_heads * layout.head_dim].view(len(qkv), layout.num_heads, layout.head_dim)

    def store(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `Operators.store`."""
        if not _accepts(key, key_cache.dtype) or not _accepts(value, value_cache.dtype):
            super().store(key, value, key_cache, value_cache, slot_mapping)
            return
        elementwise.store(key, value, key_cache, value_cache, slot_mapping)

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
            max_context_len=metadata.max_context_len,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Operators.argmax`."""
        return self._sampling.argmax(logits) if _accepts(logits) else super().argmax(logits)

    def draw(self, logits: Tensor, rows: npt.NDArray[np.int64], params: DrawParams) -> Tensor:
        """See `Operators.draw`."""
        if not _accepts(logits):
            return super().draw(logits, rows, params)
        on_host = (rows, params.temperature, params.top_k, params.top_p, params.min_p, params.uniforms)
        # A copy even on CPU: arrays may be strided or read-only, as kernels and torch do not like them.
        numbers, temperature, top_k, top_p, min_p, uniforms = (
            torch.from_numpy(column.copy()).to(logits.device) for column in on_host
        )
        return self._sampling.draw(logits, numbers, (temperature, top_k, top_p, min_p), uniforms)

    def sample(
        self,
        logits: Tensor,
        params: SampleTensors,
        stop_token_ids: Tensor | None = None,
        forbids_stops: Tensor | None = None,
        penalties: Penalties | None = None,
    ) -> Tensor:
        """See `Operators.sample`."""
        if not _accepts(logits):
            return super().sample(logits, params, stop_token_ids, forbids_stops, penalties)
        columns = (params.temperature, params.top_k, params.top_p, params.min_p)
        seen = None if penalties is None else (penalties.factor, penalties.seen_tokens, penalties.seen_rows)
        return self._sampling.sample(
            logits, columns, params.random_state, params.position, stop_token_ids, forbids_stops, seen
        )

    def gather_step(self, state: SlotState, slots: Tensor, num_columns: int, block_size: int) -> StepInput:
        """See `Operators.gather_step`."""
        return slot_kernels.gather_step(state, slots, num_columns, block_size)

    def gather_sampling(self, state: SlotState, slots: Tensor) -> SampleArguments:
        """See `Operators.gather_sampling`."""
        columns = slot_kernels.gather_sampling(state, slots)
        penalties = Penalties(columns.repetition_penalty, state.seen_tokens, slots)
        return SampleArguments(SampleTensors(*columns[:6]), columns.stop_token_ids, columns.forbids_stops, penalties)

    def advance(self, state: SlotState, slots: Tensor, token_ids: Tensor, ring: Tensor, cursor: Tensor) -> None:
        """See `Operators.advance`."""
        slot_kernels.advance(state, slots, token_ids, ring, cursor)


def _accepts(tensor: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether the kernels can read it: their dtypes (or just this one), the last dimension contiguous."""
    known = tensor.dtype in _DTYPES if dtype is None else tensor.dtype is dtype and dtype in _DTYPES
    return known and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
