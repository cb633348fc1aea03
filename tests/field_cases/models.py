"""The models of the field cases, a few MB in all, built in seconds. `build_models(DIRECTORY)`.

chain      A table of what follows each token (`tests.table_model`). Greedy answers are known without running anything,
           so cases state exact text. The last character of the prompt chooses the answer.
chain_bos  Its tokenizer adds BOS by itself and its chat template writes BOS too.
base       Tokenizer without chat template and without pad token.
strict     Chat template that refuses system turns and roles that do not alternate.
think      The template looks at `enable_thinking`.
toolcalls  The template loops over m['tool_calls'] and prints m['name'] when the key is there.
gencfg     generation_config.json carries sampling defaults (repetition_penalty 1.3, temperature 0.7).
eosunion   generation_config lists only <|eot|>, the tokenizer's EOS is <|eos|>.
nanrow     The embedding of "n" is NaN: any sequence that holds an "n" has NaN logits.
added      Tokenizer whose special tokens sit above tokenizer.vocab_size (as in Qwen and Llama 3), all ids embedded.
mismatch   Tokenizer with one token more than the embedding has rows.
spm        The same idea with a tokenizer as of sentencepiece (metaspace, byte fallback).
chain.gguf The chain model as a GGUF file.
tiny-*     Random weights (fixed seed, large): sensitive to positions, masks, windows, soft-caps and sinks. Their
           answers are those of `generate` on one row, float32, attention "eager".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.models import save_random_model
from tests.table_model import Rules, byte_tokenizer, byte_vocab, follow, special_tokens, spelled, table_model

CONTEXT = 64
BOS, EOS, EOT, PAD = "<|bos|>", "<|eos|>", "<|eot|>", "<|pad|>"
SPECIALS = [BOS, EOS, EOT, "<|im_start|>", "<|im_end|>", PAD]
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 5}

# -- chat templates: ChatML without the newline after <|im_end|>, so that a forgotten generation prompt shows ----------

_GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}" + _GENERATION
_THINK = _CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}1{% endif %}{% endif %}",
)
_TOOL_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{% if 'name' in m %}({{ m['name'] }}){% endif %}{{ '\n' }}"
    "{{ m['content'] }}{% if 'tool_calls' in m %}{% for t in m['tool_calls'] %}[{{ t['function']['name'] }}]"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}" + _GENERATION
)
_STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>{% endfor %}" + _GENERATION
)
_TEMPLATES = {
    "chain": _CHATML,
    "chain_bos": "{{ bos_token }}" + _CHATML,
    "base": None,
    "strict": _STRICT,
    "think": _THINK,
    "toolcalls": _TOOL_CALLS,
    **dict.fromkeys(("gencfg", "eosunion", "nanrow", "added", "mismatch"), _CHATML),
}

# -- the table of the chain: what follows a token, with its logit ------------------------------------------------------

_PATHS = {  # trigger character -> tokens that follow, in order; every token is in one path only
    "1": [" alpha", " beta", " gamma", EOS],
    "2": [" one", " EN", "D|two", " three", EOS],  # the stop string END spans two tokens, "|two" must go
    "3": ["\xf0", "\x9f", "\x98", "\x80", " ok", EOS],  # one emoji in four byte tokens
    "4": [" quad", EOT, " leak", EOS],  # a second EOS id, in generation_config only
    "6": [EOS],  # an empty text is a valid answer
    "7": ["\n\n", " seven", "  ", EOS],  # leading newlines and trailing blanks are content
    "8": [" say", '"', "\\", "\u2028", "\u0085", "\t", " fin", EOS],  # characters that break JSON lines
    "9": [" nine", "<|im_end|>"],  # special, but no EOS of this model
    "c": [" a", " !=", " b", " .", " 's", EOS],  # what a clean-up of spaces would damage
    "p": [" AB", " AC", " AD!", EOS],  # begins like the stop strings "ADZ" and " AB AX"
}
_FAIR: list[tuple[str, float]] = [(" h", 30.0), (" t", 30.0)]
_RULES: Rules = {
    "5": [(" p5", 20.0)],
    " p5": [(" q5", 20.0)],
    " q5": [(" p5", 20.0)],
    "m": [(EOS, 20.0), (" m1", 10.0)],
    " m1": [(EOT, 20.0), (" m2", 10.0)],
    " m2": [(EOS, 20.0), (" m3", 10.0)],
    " m3": [(EOS, 20.0), (" m4", 10.0)],
    " m4": [(EOS, 20.0)],
    "r": [("u", 10.0), ("v", 9.0)],
    "u": [(EOS, 20.0)],
    "v": [(EOS, 20.0)],
    "f": _FAIR,
    " h": _FAIR,
    " t": _FAIR,
    EOS: [(" after", 20.0)],
    " after": [(" after2", 20.0)],
    " after2": [(" after", 20.0)],
    "\n": [(" chat", 20.0)],
    " chat": [(" reply", 20.0)],
    " reply": [(EOS, 20.0)],
    "<|im_end|>": [(" leak2", 20.0)],
    " leak2": [(EOS, 20.0)],
    "g": [(" g1", 10.0)],
    " g1": [(" g1", 10.0), (" g2", 9.0)],
    " g2": [(EOS, 20.0)],
    BOS: [(" hello", 20.0)],
    " hello": [(EOS, 20.0)],
    " ": [(" blank", 20.0)],
    " blank": [(EOS, 20.0)],
}
_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "tiny-mistral-swa": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 8}),
    "tiny-gemma2": (
        "Gemma2Config",
        {
            "num_key_value_heads": 2,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "tiny-gpt2": ("GPT2Config", {}),
    "tiny-gptoss": (
        "GptOssConfig",
        {"num_key_value_heads": 2, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


def build_models(directory: Path) -> None:
    """Write every model that is not there yet."""
    rules = spelled({**follow(_PATHS), **_RULES, EOT: [(" leak", 20.0)]}, SPECIALS)
    vocab = byte_vocab(rules, SPECIALS)
    for name, template in _TEMPLATES.items():
        if not (directory / name).is_dir():
            _build_chain(directory / name, template, vocab, rules)
    if not (directory / "spm").is_dir():
        _build_spm(directory / "spm")
    for name, (config_class, settings) in _TINY.items():
        if not (directory / name).is_dir():
            _save_tokenizer(directory / name, vocab, _CHATML)
            _build_tiny(directory / name, config_class, settings, len(vocab))
    if not (directory / "chain.gguf").exists():
        _build_gguf(directory / "chain.gguf", directory / "chain", vocab)


# -- the chain models --------------------------------------------------------------------------------------------------


def _build_chain(directory: Path, template: str | None, vocab: dict[str, int], rules: Rules) -> None:
    name = directory.name
    _save_tokenizer(
        directory, vocab, template, bos=name == "chain_bos", pad=name != "base", extra=name in ("added", "mismatch")
    )
    model = _table_model({**vocab, "<|extra|>": len(vocab)} if name == "added" else vocab, rules, EOS, **_IDS)
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=[vocab[EOS], vocab[EOT]], pad_token_id=vocab[PAD]
    )
    if name == "gencfg":
        model.generation_config.update(do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.3)
    elif name == "eosunion":
        model.generation_config.eos_token_id = [vocab[EOT]]
        model.config.eos_token_id = vocab[EOT]
    elif name == "nanrow":
        model.model.embed_tokens.weight.data[vocab["n"]] = float("nan")
    model.save_pretrained(directory)


def _save_tokenizer(
    directory: Path,
    vocab: dict[str, int],
    template: str | None,
    *,
    bos: bool = False,
    pad: bool = True,
    extra: bool = False,
) -> None:
    tokenizer = byte_tokenizer(vocab, [*SPECIALS, "<|extra|>"] if extra else SPECIALS)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=True,
        model_max_length=CONTEXT,
        **({"pad_token": PAD} if pad else {}),
    )
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(directory)


def _table_model(vocab: dict[str, int], rules: Rules, eos: str, **ids: int) -> LlamaForCausalLM:
    """What has no rule ends the text."""
    ending = {token: rules.get(token, [(eos, 20.0)]) for token in vocab}
    return table_model(vocab, ending, max_position_embeddings=CONTEXT, **ids)


def _build_gguf(path: Path, chain: Path, vocab: dict[str, int]) -> None:
    """The chain model in llama.cpp's format; its weights of attention and MLP are zero, so their order is no matter."""
    model = LlamaForCausalLM.from_pretrained(chain)
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(vocab))
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL for token in vocab])
    writer.add_token_merges([])
    writer.add_bos_token_id(vocab[BOS])
    writer.add_eos_token_id(vocab[EOS])
    writer.add_pad_token_id(vocab[PAD])
    writer.add_chat_template(_CHATML)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, weight in model.state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- the others --------------------------------------------------------------------------------------------------------


def _build_spm(directory: Path) -> None:
    space = "\u2581"
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), space, *map(chr, range(33, 127))]
    words += [space + "world", space + "again", "\u97d3", space + "end"]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(special_tokens(["<unk>", "<s>", "</s>"]))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=CONTEXT,
    ).save_pretrained(directory)
    hangul = ["<0xED>", "<0x95>", "<0x9C>"]
    rules = follow({"1": [space + "world", space + "again", "</s>"], "2": [*hangul, space + "end", "</s>"]})
    model = _table_model(vocab, rules, "</s>", bos_token_id=1, eos_token_id=2)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2)
    model.save_pretrained(directory)


def _build_tiny(directory: Path, config_class: str, settings: dict[str, Any], vocab_size: int) -> None:
    values: dict[str, Any] = {"vocab_size": vocab_size, **_IDS}
    if config_class == "GPT2Config":
        values |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    else:
        values |= {
            "tie_word_embeddings": False,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 8,
            "max_position_embeddings": CONTEXT,
            "initializer_range": 0.6,
            **settings,
        }
    save_random_model(directory, config_class, values, spread=0.5)
