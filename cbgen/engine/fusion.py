"""Joins the small operators of a loaded model, and packs its weights; what is joined is checked against the original.

Enters: transformers' model, and the operators of this device. Leaves: the same model with some of its modules changed
in place. Four forms are recognised by what a module holds, whatever its class is called:

    norm        one weight and an epsilon                              -> one operator
    attention   q_proj, k_proj, v_proj, o_proj (q_norm, k_norm)        -> one product, rotation + KV store, attention
    mlp         gate_proj, up_proj, down_proj, act_fn                  -> one product with the activation in it
    layer       norm, attention, add, norm, mlp, add                   -> all of it, the additions inside the products

A form is only a guess. The model runs once as it came, on a few tokens, and what goes in and out of each module is
kept; the joined module must give the same answer to the same input before it takes the place of the original. What is
not recognised, or differs, stays as it is: slower, and right. The idea of fusing transformers' modules after loading,
with no model code of one's own, is that of vLLM's transformers backend.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cbgen.engine.attention.base import AttentionCall, AttentionContext, AttentionMetadata
from cbgen.engine.kv_cache import KVCache
from cbgen.engine.linear import Linear, LinearFactory, is_plain_linear, joined_weights
from cbgen.engine.operators.backend import PagedBackend
from cbgen.engine.operators.base import Activation, HeadLayout, HeadNorms, Operators

_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
_TOLERANCE = {
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}  # relative; a wrong form is off by about 1


# -- what joined modules compute --------------------------------------------------------------------------------------


class FusedNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467)."""

    def __init__(self, operators: Operators, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.operators = operators
        self.weight = weight  # [H] float32
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.operators.rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.epsilon).view(x.shape)


class FusedMlp(nn.Module):
    """A gated feed-forward layer in two products."""

    def __init__(self, gated: nn.Module, down: Linear) -> None:
        super().__init__()
        self.gated = gated
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        result: Tensor = self.down(self.gated(x.reshape(-1, x.shape[-1])))
        return result.view(x.shape)


class FusedAttention(nn.Module):
    """Attention in two products and two operators."""

    def __init__(self, qkv: Linear, output: Linear, call: AttentionCall, layout: HeadLayout) -> None:
        super().__init__()
        self.qkv = qkv
        self.output = output
        self.call = call
        self.layout = layout

    def attend(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], context: AttentionContext) -> Tensor:
        """[T, H] -> [T, Hq * Dv], still to be projected."""
        cos, sin = position_embeddings  # [1, T, R]
        backend = context.backend
        assert isinstance(backend, PagedBackend)
        return backend.forward_projected(self.call, self.layout, self.qkv(x), cos[0], sin[0])

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cbgen_context: AttentionContext | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """As transformers calls it: [1, T, H] -> ([1, T, H], None)."""
        assert position_embeddings is not None
        assert cbgen_context is not None
        result: Tensor = self.output(self.attend(hidden_states[0], position_embeddings, cbgen_context))
        return result[None], None


class FusedLayer(nn.Module):
    """A decoder layer with the norms before, as in Llama. Works in place on the hidden states it is given."""

    def __init__(self, first: FusedNorm, attention: FusedAttention, second: FusedNorm, mlp: FusedMlp) -> None:
        super().__init__()
        self.first = first
        self.attention = attention
        self.second = second
        self.mlp = mlp

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cbgen_context: AttentionContext | None = None,
        **_: Any,
    ) -> Tensor:
        """As transformers calls it: [1, T, H] -> [1, T, H]."""
        assert position_embeddings is not None
        assert cbgen_context is not None
        x = hidden_states[0]  # [T, H]
        attended = self.attention.attend(self.first(x), position_embeddings, cbgen_context)
        self.attention.output.add_to(attended, x)
        self.mlp.down.add_to(self.mlp.gated(self.second(x)), x)
        return hidden_states


# -- what the original did --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Trace:
    """One module's inputs and output in the run that is imitated."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor

    def replay(self, module: Callable[..., Any]) -> Tensor:
        """The module's output to the same input."""
        args = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in self.args)
        kwargs = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.kwargs.items()}
        return _first(module(*args, **kwargs))

    @property
    def input(self) -> Tensor:
        return _first((*self.args, *self.kwargs.values()))


def _first(value: Any) -> Tensor:
    result: Tensor = value[0] if isinstance(value, tuple | list) else value
    return result


@dataclass(slots=True)
class _Recorder:
    """Keeps what goes in and out of some modules; the hooks are removed on leaving."""

    modules: list[nn.Module]
    traces: dict[nn.Module, _Trace] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> _Recorder:
        for module in self.modules:
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Copied before the module runs: it might change its input in place.
        self.traces[module] = _Trace(
            tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args),
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in kwargs.items()},
            torch.empty(0),
        )

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.traces[module].output = _first(output).clone()


class CallRecorder(PagedBackend):
    """Attention that remembers the options of each layer."""

    def __init__(self, operators: Operators, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        super().__init__(operators, kv_cache, metadata)
        self.calls: dict[int, AttentionCall] = {}

    def forward(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionBackend.forward`."""
        self.calls[call.layer_idx] = call
        return super().forward(call, query, key, value)


# -- joining ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class FusionReport:
    """How many modules of each form were joined, and how many linear layers beside them were packed."""

    layers: int = 0
    attentions: int = 0
    mlps: int = 0
    norms: int = 0
    linears: int = 0

    def describe(self) -> dict[str, int]:
        """Counts that are not 0."""
        counts = dataclasses.asdict(self)
        return {name: count for name, count in counts.items() if count}


class Fuser:
    """Joins the modules of one model.

    Args:
        linears: makes its linear layers.
        recorder: attention on a cache with room for the tokens of `run_model`.
    """

    def __init__(self, linears: LinearFactory, recorder: CallRecorder) -> None:
        self._operators = recorder.operators
        self._linears = linears
        self._recorder = recorder
        self._traces: dict[nn.Module, _Trace] = {}
        self.report = FusionReport()

    def fuse(self, model: nn.Module, run_model: Callable[[PagedBackend], Tensor]) -> None:
        """Change the model in place.

        Args:
            model: a transformers causal language model.
            run_model: runs it on a few tokens with the backend it is given.
        """
        layers = [module for module in model.modules() if _is_layer(module)]
        self._traces = self._record(model, run_model)
        for layer in layers:
            parts = list(layer.modules())
            self._fuse_layer(layer)
            for part in parts:  # so that the weights of a layer are freed before the next layer is copied
                self._traces.pop(part, None)
        for parent in list(model.modules()):
            self._fuse_children(parent)

    def _record(self, model: nn.Module, run_model: Callable[[PagedBackend], Tensor]) -> dict[nn.Module, _Trace]:
        candidates = (_is_norm, _is_attention, _is_mlp, _is_layer)
        modules = [module for module in model.modules() if any(is_form(module) for is_form in candidates)]
        with _Recorder(modules) as recorder:
            run_model(self._recorder)
        return recorder.traces

    def _fuse_layer(self, layer: Any) -> None:
        """Join a whole layer, else leave it to its parts."""
        trace = self._traces.get(layer)
        if trace is None:
            return
        first, second = self._norm(layer.input_layernorm), self._norm(layer.post_attention_layernorm)
        attention, mlp = self._attention(layer.self_attn), self._mlp(layer.mlp)
        if first is not None and second is not None and attention is not None and mlp is not None:
            fused = FusedLayer(first, attention, second, mlp)
            if self._agrees(fused, trace, trace.input):
                # The instance stays, with all that a model may ask of it; what it does and holds is another.
                for name in list(layer._modules):
                    delattr(layer, name)
                layer.fused = fused
                layer.forward = fused.forward
                self.report.layers += 1
                return
        parts = {"input_layernorm": first, "post_attention_layernorm": second, "self_attn": attention, "mlp": mlp}
        for name, part in parts.items():
            if part is not None:
                self._replace(layer, name, part)

    def _fuse_children(self, parent: nn.Module) -> None:
        """Join what is left below a module."""
        for name, child in list(parent.named_children()):
            part: nn.Module | None = None
            if child in self._traces and _is_norm(child):
                part = self._norm(child)
            elif child in self._traces and _is_attention(child):
                part = self._attention(child)
            elif child in self._traces and _is_mlp(child):
                part = self._mlp(child)
            if part is not None:
                self._replace(parent, name, part)

    def _replace(self, parent: nn.Module, name: str, part: nn.Module) -> None:
        setattr(parent, name, part)
        kinds = {FusedNorm: "norms", FusedAttention: "attentions", FusedMlp: "mlps"}
        counter = kinds[type(part)]
        setattr(self.report, counter, getattr(self.report, counter) + 1)

    def _agrees(self, fused: nn.Module, trace: _Trace, base: Tensor | None = None) -> bool:
        """Whether the joined module answers as the original did; of a residual layer, whether its change does."""
        expected, actual = trace.output.float(), trace.replay(fused).float()
        if expected.shape != actual.shape:
            return False
        size = (expected if base is None else expected - base.float()).norm()
        difference = float((actual - expected).norm() / size.clamp_min(1e-12))
        return difference < _TOLERANCE.get(trace.output.dtype, 0)  # false for NaN, too

    # -- the four forms; None when the module is not of the form, or answers otherwise ---------------------------------

    def _norm(self, norm: Any) -> FusedNorm | None:
        trace = self._traces.get(norm)
        if trace is None or not _is_norm(norm):
            return None
        for weight in (norm.weight.detach().float(), norm.weight.detach().float() + 1):  # Gemma's are around zero
            fused = FusedNorm(self._operators, weight, _epsilon(norm))
            if self._agrees(fused, trace):
                return fused
        return None

    def _mlp(self, mlp: Any) -> FusedMlp | None:
        trace = self._traces.get(mlp)
        if trace is None or not _is_mlp(mlp):
            return None
        weight, bias = joined_weights([mlp.gate_proj, mlp.up_proj])
        gated = self._linears.gated(weight, bias, _ACTIVATIONS[type(mlp.act_fn).__name__])
        fused = FusedMlp(gated, self._linears.join([mlp.down_proj]))
        return fused if self._agrees(fused, trace) else None

    def _attention(self, attention: Any) -> FusedAttention | None:
        trace = self._traces.get(attention)
        if trace is None or not _is_attention(attention) or "position_embeddings" not in trace.kwargs:
            return None
        call = self._recorder.calls.get(attention.layer_idx)
        head_dim = getattr(attention, "head_dim", None)
        if call is None or not isinstance(head_dim, int):
            return None
        if attention.v_proj.out_features != attention.k_proj.out_features:
            return None
        num_heads, num_kv_heads = (p.out_features // head_dim for p in (attention.q_proj, attention.k_proj))
        for norms in self._head_norms(attention):
            layout = HeadLayout(num_heads, num_kv_heads, head_dim, norms)
            qkv = self._linears.join([attention.q_proj, attention.k_proj, attention.v_proj])
            fused = FusedAttention(qkv, self._linears.join([attention.o_proj]), call, layout)
            if self._agrees(fused, trace):
                return fused
        return None

    def _head_norms(self, attention: Any) -> list[HeadNorms | None]:
        """What the norms of its heads may mean: none there, weights as they are, weights around zero."""
        query, key = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        if query is None or key is None:
            return [None]
        if query.weight.numel() != attention.head_dim or key.weight.numel() != attention.head_dim:
            return []  # over all heads at once (OLMo 2)
        weights = query.weight.detach().float(), key.weight.detach().float()
        return [HeadNorms(weights[0] + shift, weights[1] + shift, _epsilon(query)) for shift in (0.0, 1.0)]


# -- what modules look like -------------------------------------------------------------------------------------------


def _is_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return (
        "RMSNorm" in type(module).__name__
        and isinstance(weight, Tensor)
        and weight.dim() == 1
        and len(list(module.parameters())) == 1
        and not math.isnan(_epsilon(module))
    )


def _epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", math.nan)))


def _is_mlp(module: Any) -> bool:
    return (
        all(is_plain_linear(getattr(module, name, None)) for name in ("gate_proj", "up_proj", "down_proj"))
        and type(getattr(module, "act_fn", None)).__name__ in _ACTIVATIONS
        and _holds_only(module, {"gate_proj", "up_proj", "down_proj", "act_fn"})
    )


def _is_attention(module: Any) -> bool:
    norms = [name for name in ("q_norm", "k_norm") if getattr(module, name, None) is not None]
    return (
        all(is_plain_linear(getattr(module, name, None)) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        and len(norms) != 1
        and all(_is_norm(getattr(module, name)) for name in norms)
        and hasattr(module, "layer_idx")
        and _holds_only(module, {"q_proj", "k_proj", "v_proj", "o_proj", *norms})
    )


def _is_layer(module: Any) -> bool:
    names = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
    return (
        all(hasattr(module, name) for name in names)
        and _is_norm(module.input_layernorm)
        and _is_norm(module.post_attention_layernorm)
        and _is_attention(module.self_attn)
        and _is_mlp(module.mlp)
        and _holds_only(module, names)
    )


def _holds_only(module: nn.Module, names: set[str]) -> bool:
    """Whether it has no weights beside those of the children named."""
    children = {name for name, child in module.named_children() if next(child.parameters(), None) is not None}
    return children <= names and next(module.parameters(recurse=False), None) is None


# -- what is left -----------------------------------------------------------------------------------------------------


def pack_linears(model: nn.Module, linears: LinearFactory) -> int:
    """Every plain linear layer that is still there in the factory's form; the number of them."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain_linear(child):
                setattr(parent, name, linears.join([child]))  # type: ignore[list-item]
                count += 1
    return count
