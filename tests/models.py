"""Tiny random models of many architectures, saved in transformers' layout. Large weights make every mistake visible."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 96
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

# name -> (configuration class, what differs from _BASE; None removes a key)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-ratio-1": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-ratio-3": ("LlamaConfig", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "qwen2-ratio-7": ("Qwen2Config", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56}),
    "qwen3-ratio-4": ("Qwen3Config", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}),
    "mistral-window-8": ("MistralConfig", {"sliding_window": 8}),
    "gemma2-softcap-window-8": (
        "Gemma2Config",
        {
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3-window-8": (
        "Gemma3TextConfig",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
    ),
    "gpt-oss-sinks-window-8": (
        "GptOssConfig",
        {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    ),
    "gpt2-learned-positions": (
        "GPT2Config",
        {"num_key_value_heads": None, "head_dim": None, "intermediate_size": None, "tie_word_embeddings": None},
    ),
    "phi": ("PhiConfig", {"num_key_value_heads": 4, "head_dim": None}),
    "phi3-fused-qkv": ("Phi3Config", {"head_dim": None}),
    "mixtral-moe": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "qwen2-moe-window-by-mask": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "head_dim": None,
        },
    ),
    "granite-scaled-logits": ("GraniteConfig", {"logits_scaling": 2.0, "head_dim": None}),
    "cohere-parallel": ("CohereConfig", {"head_dim": None, "logit_scale": 0.5}),
    "olmo2": ("Olmo2Config", {"head_dim": None}),
    "starcoder2-window-8": ("Starcoder2Config", {"sliding_window": 8, "head_dim": None}),
    "smollm3-no-rope-layers": ("SmolLM3Config", {"no_rope_layers": [1, 0], "head_dim": None}),
    "gpt-neox": ("GPTNeoXConfig", {"num_key_value_heads": None, "head_dim": None}),
    "opt-learned-positions": (
        "OPTConfig",
        {
            "num_key_value_heads": None,
            "head_dim": None,
            "intermediate_size": None,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
        },
    ),
}


def build_model(name: str, directory: Path, **changes: Any) -> Path:
    """Write a random model of one architecture; the same weights every time."""
    class_name, different = ARCHITECTURES[name]
    values = {key: value for key, value in {**_BASE, **different, **changes}.items() if value is not None}
    if class_name == "GPT2Config":
        values = {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            **{key: values[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
        }
    save_random_model(directory, class_name, values, spread=0.4)
    return directory


def save_random_model(directory: Path, config_class: str, values: dict[str, Any], *, spread: float) -> None:
    """Write a model of this configuration whose matrices have this standard deviation; the same every time."""
    config = getattr(transformers, config_class)(**values)
    torch.manual_seed(20)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(21)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and "ln_" not in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    model.save_pretrained(directory)
