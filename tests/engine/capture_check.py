"""Whether a model's forward could be captured as a CUDA graph, found out without a GPU.

The forward runs once on tensors that have shapes and no values ("meta"), below a mode that sees every operator. What a
graph cannot hold shows there: a value that the host asks for, a result whose shape depends on values, and a tensor
that is made on the host and carried to the device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cbgen.engine.attention.base import AttentionCall, AttentionContext, AttentionMetadata
from cbgen.engine.fusion import FusedAttention
from cbgen.engine.loader import LoadedModel, forward
from cbgen.engine.operators.backend import PagedBackend
from cbgen.engine.operators.base import HeadLayout
from cbgen.engine.operators.reference import ReferenceOperators

META = torch.device("meta")


class _Shapes(ReferenceOperators):
    """Operators whose kernels are our own: they give shapes, and are looked at elsewhere."""

    def attention(
        self, call: AttentionCall, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return query.new_empty(*query.shape[:2], value_cache.shape[-1])

    def store(self, key: Tensor, value: Tensor, *_: Tensor) -> None:
        pass

    def rope_and_store(self, qkv: Tensor, layout: HeadLayout, *_: Tensor) -> Tensor:
        return qkv[:, : layout.num_heads * layout.head_dim].view(-1, layout.num_heads, layout.head_dim)


_COPIES = (torch.ops.aten.to, torch.ops.aten._to_copy, torch.ops.aten.copy_)


class _Watch(TorchDispatchMode):
    """Keeps the names of operators that carry tensors from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, result) if isinstance(t, Tensor)]
        # A number on the host may take part in arithmetic: it becomes an argument of the kernel.
        counting = [t for t in tensors if t.dim() or func.overloadpacket in _COPIES]
        if len({t.device for t in counting}) > 1:
            self.transfers.append(str(func))
        return result


class _Cache:
    """Shapes of a KV cache."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._specs = {spec.layer_idx: spec for spec in loaded.layers}
        self._dtype = loaded.dtype

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        spec = self._specs[layer_idx]
        return tuple(
            torch.empty(4, spec.num_kv_heads, 16, size, dtype=self._dtype, device=META)
            for size in (spec.key_dim, spec.value_dim)
        )


def obstacle_to_capture(loaded: LoadedModel, num_tokens: int = 5) -> str:
    """What stands in the way of capturing a decode step of so many rows, or nothing.

    The model is useless afterwards: its weights are gone.
    """
    _take_values_away(loaded.model)
    ids = torch.empty(num_tokens, dtype=torch.int64, device=META)
    lengths = torch.empty(num_tokens, dtype=torch.int32, device=META)
    metadata = object.__new__(AttentionMetadata)
    object.__setattr__(metadata, "slot_mapping", lengths)
    backend = PagedBackend(_Shapes(), _Cache(loaded), metadata)
    watch = _Watch()
    try:
        with watch:
            logits = forward(loaded.model, ids, ids, ids, AttentionContext(backend, loaded.windows))
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert logits.shape == (num_tokens, loaded.vocab_size)
    return ", ".join(watch.transfers)


def _take_values_away(model: nn.Module) -> None:
    """Everything on the meta device: parameters, buffers, and tensors that modules hold like any other attribute."""
    model.to(META)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                setattr(module, name, value.to(META))
            elif isinstance(value, ReferenceOperators):
                setattr(module, name, _Shapes())
        if isinstance(module, FusedAttention):
            norms = module.layout.norms
            if norms is not None:
                weights = {name: getattr(norms, name).to(META) for name in ("query_weight", "key_weight")}
                module.layout = dataclasses.replace(module.layout, norms=dataclasses.replace(norms, **weights))
