"""Models without files: tiny ones of many architectures, and random ones of the sizes that people run.

The latter are made on the device and go through the same probing and joining of layers as one that was loaded.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import torch

from cbgen.bench.roofline import ModelShape
from cbgen.engine.attention.base import ATTENTION_NAME, attention_forward
from cbgen.engine.loader import LoadedModel, wrap_model
from cbgen.engine.preparation import prepare
from tests.models import ARCHITECTURES, build_model

MAX_CONTEXT = 8192
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "8b": (  # Llama 3.1 8B
        "LlamaConfig",
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
    ),
    "0.6b": (  # Qwen3 0.6B
        "Qwen3Config",
        {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
}
_REHEARSED: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def random_module(shape: str, dtype: torch.dtype, device: torch.device, attention: str, *, dry: bool) -> Any:
    """A transformers model of a shape, `8b` or `0.6b`, with random weights, made on the device.

    Args:
        shape: key of `_SHAPES`; in a dry run the architecture is the same and the sizes are tiny.
        attention: transformers' name of an implementation.
    """
    import transformers

    config_class, values = _SHAPES[shape]
    values = {**values, **(_REHEARSED if dry else {}), "max_position_embeddings": MAX_CONTEXT}
    config = getattr(transformers, config_class)(**values, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    torch.manual_seed(5)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.to(device).train(False).requires_grad_(False)


def random_model(
    shape: str, dtype: torch.dtype, device: torch.device, *, dry: bool, disabled: Set[str] = frozenset()
) -> LoadedModel:
    """The same, probed and prepared as `cbgen run` does with a model that it has loaded."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    model = random_module(shape, dtype, device, ATTENTION_NAME, dry=dry)
    return prepare(wrap_model(f"random {shape}", model, device), disabled, say)


def describe_operators(loaded: LoadedModel) -> dict[str, Any]:
    """Whose operators it has, and which of them were replaced because they failed a trial."""
    replaced = sorted(getattr(loaded.operators, "replaced", ()))
    return {"operators": loaded.operators.name, "replaced": replaced, "fused": loaded.fused}


def say(note: str) -> None:
    print(note, flush=True)  # noqa: T201  a stage's stdout goes to its log


def model_shape(shape: str, dtype: torch.dtype, *, dry: bool) -> ModelShape:
    """Its sizes for the bound: what a step reads, norms left out."""
    values = {**_SHAPES[shape][1], **(_REHEARSED if dry else {})}
    hidden, head_dim, num_layers = values["hidden_size"], values["head_dim"], values["num_hidden_layers"]
    projections = hidden * head_dim * (2 * values["num_attention_heads"] + 2 * values["num_key_value_heads"])
    return ModelShape(
        layer_weights=num_layers * (projections + 3 * hidden * values["intermediate_size"]),
        head_weights=values["vocab_size"] * hidden,
        num_layers=num_layers,
        num_kv_heads=values["num_key_value_heads"],
        head_dim=head_dim,
        itemsize=dtype.itemsize,
        vocab_size=values["vocab_size"],
    )


def build_tiny(architecture: str, directory: Path) -> Path:
    """One of `tests.models`, with heads of 16 where its configuration lets them be chosen: Triton's least."""
    different = ARCHITECTURES[architecture][1]
    has_head_dim = different.get("head_dim", 16) is not None
    fixed = "learned-positions" in architecture  # sizes of these depend on each other
    changes: dict[str, Any] = {} if fixed else {"head_dim": 16} if has_head_dim else {"hidden_size": 64}
    return build_model(architecture, directory, **changes)
