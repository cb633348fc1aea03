"""Where transformers' attention modules meet our KV cache.

`attention_forward` is registered with transformers under the name "cbgen". Every attention module of a model calls it
with the queries, keys and values of the packed batch; the step's `AttentionContext` travels beside them as one model
kwarg, so there is no global state. What a module asks for and we do not implement raises `UnsupportedAttentionError`:
never ignored.

Shapes: T tokens of B sequences in one packed row, Hq query heads, Hkv KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cbgen.engine.model_input import ModelInput

ATTENTION_NAME = "cbgen"

# Keyword arguments of attention calls that change nothing here: bookkeeping of transformers, or facts we know already.
_HARMLESS = frozenset(
    {"dropout", "is_causal", "position_ids", "use_cache", "cache", "past_key_values", "position_embeddings"}
    | {"output_attentions", "output_hidden_states", "return_dict", "output_router_logits", "cache_position"}
    | {"layer_idx", "attention_mask", "logits_to_keep", "head_mask", "training", "labels", "deterministic"}
)


class UnsupportedAttentionError(Exception):
    """An attention module asked for something this engine does not do; the message names it."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The options of one layer's attention. `sinks` is [Hq], one extra logit per head in the softmax's denominator."""

    layer_idx: int
    scale: float
    window: int | None = None  # a query sees the last `window` positions, itself included
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    """Attention of one layer over one packed step."""

    def forward(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value, attend, and return [T, Hq, Dv].

        Args:
            call: the layer and its options.
            query: [T, Hq, D]; key: [T, Hkv, D]; value: [T, Hkv, Dv].
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A step's ragged shape: tensors on the device, and the lengths on the host for backends that loop.

    Attributes:
        slot_mapping: [T] int64.
        block_tables: [B, max_blocks] int32; entries past a sequence's own blocks are stale.
        context_lens: [B] int32, positions a sequence holds, this step's included.
        cu_seqlens_q: [B + 1] int32, offsets of the sequences' tokens in the packed row.
        num_decodes: the first that many sequences have exactly one token.
        max_context_len: none of `context_lens` is above it. The same in all steps of a CUDA graph.
        query_starts, host_context_lens: `cu_seqlens_q` and `context_lens` as plain ints, for operators that loop over
            prompts on the host. The lengths of decodes may be missing (0), and all of it in steps that are recorded.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    num_decodes: int
    max_context_len: int
    query_starts: list[int]
    host_context_lens: list[int]

    @classmethod
    def from_model_input(cls, model_input: ModelInput, device: torch.device) -> AttentionMetadata:
        return cls(
            slot_mapping=torch.from_numpy(model_input.slot_mapping).to(device),
            block_tables=torch.from_numpy(model_input.block_tables).contiguous().to(device),
            context_lens=torch.from_numpy(model_input.context_lens).to(device),
            cu_seqlens_q=torch.from_numpy(model_input.cu_seqlens_q).to(device),
            num_decodes=model_input.num_decodes,
            max_context_len=int(model_input.context_lens.max(initial=0)),
            query_starts=model_input.cu_seqlens_q.tolist(),
            host_context_lens=model_input.context_lens.tolist(),
        )


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What travels through the model as the kwarg `cbgen_context`.

    Attributes:
        windows: per layer, the sliding window of layers whose module does not pass one itself.
    """

    backend: AttentionBackend
    windows: dict[int, int]


def attention_forward(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    *,
    cbgen_context: AttentionContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls for every layer. Returns ([1, T, Hq, Dv], None).

    Raises:
        UnsupportedAttentionError: an option we do not implement, or a module that lost our context.
    """
    if cbgen_context is None:
        raise UnsupportedAttentionError("its layers do not pass keyword arguments on to attention")
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _HARMLESS)
    if unknown or attention_mask is not None:
        raise UnsupportedAttentionError(f"its attention needs {unknown[0] if unknown else 'a mask of its own'}")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise UnsupportedAttentionError("its attention is not causal")
    layer_idx = getattr(module, "layer_idx", None)
    if layer_idx is None:
        raise UnsupportedAttentionError("its attention modules do not say which layer they are")
    call = AttentionCall(
        layer_idx=layer_idx,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or cbgen_context.windows.get(layer_idx),
        softcap=softcap,
        sinks=s_aux,
    )
    output = cbgen_context.backend.forward(
        call, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    return output.unsqueeze(0), None
