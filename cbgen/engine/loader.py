"""From model files to a model that runs on our attention, or a refusal that names the model and the reason.

The model is transformers' own module, loaded with `attn_implementation="cbgen"`. Nothing is assumed from names: after
loading, a short probe forward records what each layer asks of attention and of the cache, and checks that two sequences
packed side by side answer as each does alone. What cannot be served is refused here, before any row is touched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cbgen.engine.attention.base import (
    ATTENTION_NAME,
    AttentionContext,
    UnsupportedAttentionError,
    attention_forward,
)
from cbgen.engine.attention.reference import ProbeBackend
from cbgen.engine.gguf import converted, gguf_tokenizer
from cbgen.engine.hf_loading import named_errors, quiet_transformers
from cbgen.engine.kv_cache import LayerSpec
from cbgen.engine.machine_probe import prefer_growing_segments
from cbgen.engine.model_files import ModelFiles
from cbgen.engine.operators.base import Operators
from cbgen.engine.operators.reference import ReferenceOperators
from cbgen.errors import ModelError, UsageError

_PACKING_TOLERANCE = 0.25  # relative; packing errors are of the order of 1, bf16 noise of 0.01


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve, and the facts the engine needs of it.

    Attributes:
        layers: attention layers in order of their index.
        windows: sliding windows of layers that do not pass one to attention themselves.
        vocab_size: rows of the embedding; ids at or above it cannot be fed.
        max_context: longest sequence that it computes correctly here.
        max_context_reason: why `max_context` is shorter than the model's own limit, or empty.
        notices: a sentence for each thing about the files that the user should know.
        operators: what it is computed with, beside its own modules.
        packing: the form of its weights, see `cbgen.engine.linear`.
        fused: how many modules of each form were joined, see `cbgen.engine.fusion`.
        weight_bytes: weights that a step of many rows reads; 0 where nobody counted.
    """

    model: nn.Module
    layers: list[LayerSpec]
    windows: dict[int, int]
    vocab_size: int
    max_context: int
    max_context_reason: str
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    intermediate_size: int
    notices: tuple[str, ...] = ()
    operators: Operators = field(default_factory=ReferenceOperators)
    packing: str = "none"
    fused: dict[str, int] = field(default_factory=dict)
    weight_bytes: int = 0


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a torch device; one with a number becomes the current device.

    Timers, and kernels that torch does not launch itself, go to the current one.

    Raises:
        UsageError: another name.
        ModelError: CUDA was asked for and is not there.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, not {name!r}")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"--device {name}: torch {torch.__version__} sees no CUDA device; use --device cpu")
    device = torch.device(name)
    if device.type == "cuda":
        num_devices = torch.cuda.device_count()
        if (device.index or 0) >= num_devices:
            raise ModelError(f"--device {name}: there are {num_devices} CUDA devices, counted from 0")
        prefer_growing_segments()
        if device.index is not None:
            torch.cuda.set_device(device)
    return device


def load_tokenizer(files: ModelFiles, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer.

    Raises:
        ModelError: there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    files = converted(files)
    with quiet_transformers(), named_errors(files.description):
        if files.gguf_file:
            return gguf_tokenizer(files)
        return AutoTokenizer.from_pretrained(files.directory, trust_remote_code=trust_remote_code)


def load_model(
    files: ModelFiles, *, dtype: str, device: torch.device, trust_remote_code: bool = False, eos_token_id: int | None
) -> LoadedModel:
    """Load, place and probe a model.

    Args:
        files: from `find_model`.
        dtype: `auto` (the checkpoint's own) or a torch dtype name.
        device: where it runs.
        trust_remote_code: run Python code that ships with the model.
        eos_token_id: the tokenizer's, united with the model's own.

    Raises:
        ModelError: not loadable, or an architecture this engine does not serve.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    name, files = files.description, converted(files)
    gguf: dict[str, Any] = {"gguf_file": files.gguf_file} if files.gguf_file else {}
    with quiet_transformers(), named_errors(name):
        config = AutoConfig.from_pretrained(files.directory, trust_remote_code=trust_remote_code, **gguf)
        text_config = config.get_text_config()
        _check_architecture(name, config, text_config)
        factory: Any = AutoModelForCausalLM
        model, info = factory.from_pretrained(
            files.directory,
            config=config,
            dtype=_torch_dtype(dtype, text_config, device),
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **({"device_map": {"": device}} if device.type == "cuda" else {}),
            **gguf,
        )
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would go on with random numbers in their place
        raise ModelError(f"{name}: the checkpoint lacks {len(missing)} weights of the model, such as {missing[0]}")
    notices = _leftover_weights(sorted(info["unexpected_keys"]))
    return wrap_model(name, model, device, eos_token_id=eos_token_id, notices=notices)


def wrap_model(
    name: str, model: Any, device: torch.device, *, eos_token_id: int | None = None, notices: tuple[str, ...] = ()
) -> LoadedModel:
    """Probe a module that is on its device, made with `attn_implementation=ATTENTION_NAME`, and say what it needs.

    Args:
        name: how messages call it.
        model: a transformers causal language model; changed to inference only.
        device: where it is.
        eos_token_id: the tokenizer's, united with the model's own.
        notices: what the user should know about its files.

    Raises:
        ModelError: an architecture this engine does not serve.
    """
    model.train(False).requires_grad_(False)
    stop_looking(model)
    text_config = model.config.get_text_config()
    windows = _windows_by_layer_type(text_config)
    with named_errors(name):
        layers = _probe(name, model, windows, device)
    max_context, reason = _max_context(name, text_config, layers)
    return LoadedModel(
        model=model,
        layers=layers,
        windows=windows,
        vocab_size=_vocab_size(model),
        max_context=max_context,
        max_context_reason=reason,
        eos_token_ids=_eos_token_ids(model, eos_token_id),
        dtype=model.dtype,
        device=device,
        hidden_size=text_config.hidden_size,
        intermediate_size=getattr(text_config, "intermediate_size", None) or 4 * text_config.hidden_size,
        notices=notices,
    )


# -- what is refused --------------------------------------------------------------------------------------------------


def _check_architecture(name: str, config: Any, text_config: Any) -> None:
    """Refuse from the configuration alone what would only fail, or silently go wrong, after minutes of loading."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    def refuse(reason: str) -> None:
        kind = (getattr(config, "architectures", None) or [config.model_type])[0]
        raise ModelError(f"{name} ({kind}) is not supported: {reason}")

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder model; cbgen runs decoder-only models")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if model_class is not None and not getattr(model_class, "_supports_attention_backend", False):
        refuse("transformers does not route its attention through the attention interface")
    if model_class is None and not getattr(config, "auto_map", None):
        refuse("transformers has no causal language model of this type")
    others = set(getattr(text_config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if others:
        refuse(f"its layers of type {', '.join(sorted(others))} are neither full nor sliding-window attention")
    if getattr(text_config, "num_kv_shared_layers", 0):
        refuse("some of its layers share the KV cache of others")


def _leftover_weights(keys: list[str]) -> tuple[str, ...]:
    """What transformers drops without a word; harmless for heads of another task, and a sign of the wrong config."""
    if not keys:
        return ()
    return (f"the checkpoint holds {len(keys):,} weights that the model does not use, such as {keys[0]}",)


def _windows_by_layer_type(text_config: Any) -> dict[int, int]:
    """Sliding windows that only the configuration tells of: modules that rely on a mask do not pass theirs on."""
    window = getattr(text_config, "sliding_window", None)
    layer_types = getattr(text_config, "layer_types", None) or []
    return {i: window for i, kind in enumerate(layer_types) if kind == "sliding_attention" and window}


def _max_context(name: str, text_config: Any, layers: list[LayerSpec]) -> tuple[int, str]:
    """The longest sequence computed correctly, and why that is less than the model's own limit.

    `dynamic` and `longrope` position embeddings change with the longest position in the batch, so that one long row
    would change its neighbours; up to the original context they do not.
    """
    context = getattr(text_config, "max_position_embeddings", None)
    if not context:
        raise ModelError(f"{name}: its configuration states no max_position_embeddings, so its context is unknown")
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            original = kind.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", context
            )
            if original < context:
                return original, f"beyond it, {kind['rope_type']} position embeddings depend on the other rows"
    window = getattr(text_config, "sliding_window", None)
    declared = getattr(text_config, "layer_types", None) or getattr(text_config, "use_sliding_window", None) is False
    if window and not declared and all(layer.window is None for layer in layers) and window < context:
        return window, "beyond it, its sliding window would be needed and its layers do not state theirs"
    return context, ""


def stop_looking(model: nn.Module) -> None:
    """Keep a model from reading its input on the host, where a CUDA device would have to wait in every step.

    `dynamic` and `longrope` position embeddings look for the longest position; up to the original context, which
    `_max_context` sees to, they stay as they are made. Some models look for padding, to warn of it; there is none.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = _frozen(kind)  # type: ignore[assignment]
        elif isinstance(kind, dict):  # by type of layer
            module.rope_type = {name: _frozen(value) for name, value in kind.items()}  # type: ignore[assignment]
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None  # type: ignore[assignment]


def _frozen(rope_type: str) -> str:
    return "default" if rope_type == "longrope" or "dynamic" in rope_type else rope_type


def _probe(name: str, model: nn.Module, windows: dict[int, int], device: torch.device) -> list[LayerSpec]:
    """Short sequences, packed in two ways: what the layers ask for, and whether packing keeps sequences apart.

    Two of them change places, and in the second pass a third one stands between them: so each has other tokens in
    front of it, behind it, and in the whole pass.
    """
    vocab_size = _vocab_size(model)
    first, second, third = (
        [(factor * i + start) % vocab_size for i in range(length)]
        for factor, start, length in ((7, 3, 6), (5, 11, 5), (3, 17, 8))
    )
    try:
        packed, layers = _run_uncached(model, windows, device, [first, second])
        repacked, _ = _run_uncached(model, windows, device, [second, third, first])
    except UnsupportedAttentionError as error:
        raise ModelError(f"{name} ({type(model).__name__}) is not supported: {error}") from error
    if not layers:
        raise ModelError(f"{name} ({type(model).__name__}) is not supported: none of its layers called attention")
    again = repacked[[2, 0]]
    difference = float((packed - again).norm() / again.norm().clamp_min(1e-6))
    if torch.isfinite(again).all() and not difference < _PACKING_TOLERANCE:
        raise ModelError(
            f"{name} ({type(model).__name__}) is not supported: its answers change by {difference:.0%} when another "
            "sequence is packed beside it"
        )
    return [layers[index] for index in sorted(layers)]


def _run_uncached(
    model: nn.Module, windows: dict[int, int], device: torch.device, sequences: list[list[int]]
) -> tuple[Tensor, dict[int, LayerSpec]]:
    """Last logits of each packed sequence, [len(sequences), vocab_size] float32, and what the layers asked for."""
    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + len(sequence))
    backend = ProbeBackend(starts)
    logits = forward(
        model,
        torch.tensor([token for sequence in sequences for token in sequence], device=device),
        torch.tensor([i for sequence in sequences for i in range(len(sequence))], device=device),
        torch.tensor([stop - 1 for stop in starts[1:]], device=device),
        AttentionContext(backend, windows),
    )
    return logits.float(), backend.layers


@torch.inference_mode()
def forward(
    model: nn.Module, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, context: AttentionContext
) -> Tensor:
    """One forward pass over a packed row.

    Args:
        model: a transformers causal language model.
        input_ids, positions: [T].
        logits_indices: [S] which of the T positions get logits.
        context: reaches every attention layer as a keyword argument.

    Returns:
        [S, vocab_size].
    """
    output = model(
        input_ids=input_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=logits_indices,
        cbgen_context=context,
    )
    logits: Tensor = output.logits[0]
    return logits


def _vocab_size(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def step_weight_bytes(model: Any) -> int:
    """Bytes of weights that a step of many rows reads: all of them, but for an embedding that is only looked up."""
    total: int = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    return total if is_tied else total - int(embedding.weight.nbytes)


def _eos_token_ids(model: Any, tokenizer_eos: int | None) -> frozenset[int]:
    """Every id that ends a text: the model's list and the tokenizer's one (chat models often have both)."""
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    own = model.config.get_text_config().eos_token_id if own is None else own
    ids = own if isinstance(own, list) else [own]
    wrong = next((i for i in ids if i is not None and not isinstance(i, int)), None)
    if wrong is not None:
        raise ModelError(f"the model's eos_token_id must be a token id or a list of them, not {wrong!r}")
    return frozenset(i for i in [*ids, tokenizer_eos] if i is not None and i < _vocab_size(model))


def _torch_dtype(name: str, text_config: Any, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's dtype; for de-quantized GGUF weights bfloat16, unless this CPU would be slow in it."""
    if name == "auto":
        name = str(getattr(text_config, "dtype", None) or "float32").removeprefix("torch.")
        if name == "bfloat16" and device.type == "cpu" and not _cpu_has_bfloat16():
            name = "float32"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"--dtype {name} is not a floating point type")
    return dtype


def _cpu_has_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16 " in flags
