"""A model whose answer is known without running it: the next token depends on the current token alone.

A one-layer Llama with attention and MLP at zero, one-hot embeddings, and an lm_head that is a table of rules. The last
character of a prompt chooses the answer:

    1 " alpha beta gamma"     2 " one END|two" (END spans two tokens)     3 an emoji in four byte tokens, then " ok"
    5 " p5 q5" for ever       6 end of text at once                       ~ NaN logits
    d a digit 0 to 9 and on, for ever, each with the same probability (for sampling)
    a chat (whose prompt ends in a newline): " chat reply"
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 64
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('role bad is not allowed') }}{% endif %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_SPECIALS = ["<|bos|>", "<|eos|>", "<|start|>", "<|end|>", "<|pad|>"]
_PATHS = {
    "1": [" alpha", " beta", " gamma", "<|eos|>"],
    "2": [" one", " EN", "D|two", "<|eos|>"],
    "3": ["\xf0", "\x9f", "\x98", "\x80", " ok", "<|eos|>"],
    "5": [" p5", " q5", " p5"],
    "6": ["<|eos|>"],
    "\n": [" chat", " reply", "<|eos|>"],
}
_DIGITS = [f" d{digit}" for digit in range(10)]


def build_chain_model(directory: Path, *, context: int = CONTEXT, generation: dict | None = None) -> Path:
    """Write the model; `generation` adds settings to its generation_config.json."""
    alphabet = _byte_alphabet()
    vocab = {token: number for number, token in enumerate(_SPECIALS)}
    for byte in range(256):
        vocab[alphabet[byte]] = len(vocab)
    rules: dict[str, list[str]] = {"d": _DIGITS, **dict.fromkeys(_DIGITS, _DIGITS)}
    for trigger, path in _PATHS.items():
        for token, following in zip([trigger, *path], path, strict=False):
            rules[token] = [following]
    spelled = {}
    for token in {*rules, *(t for following in rules.values() for t in following)}:
        spelled[token] = _spell(token, alphabet)
        vocab.setdefault(spelled[token], len(vocab))
    _save_tokenizer(directory, vocab, context)
    _save_weights(
        directory, vocab, {spelled[a]: [spelled[b] for b in bs] for a, bs in rules.items()}, context, generation
    )
    return directory


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _spell(token: str, alphabet: dict[int, str]) -> str:
    if token in _SPECIALS:
        return token
    raw = token.encode("latin-1") if len(token) == 1 else token.encode("utf-8")
    return "".join(alphabet[byte] for byte in raw)


def _save_tokenizer(directory: Path, vocab: dict[str, int], context: int) -> None:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", model_max_length=context
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def _save_weights(
    directory: Path, vocab: dict[str, int], rules: dict[str, list[str]], context: int, generation: dict | None
) -> None:
    size = len(vocab)
    hidden = -(-size // 8) * 8
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=vocab["<|bos|>"],
        eos_token_id=vocab["<|eos|>"],
        rms_norm_eps=1e-9,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "layernorm" in name else 0.0)
        model.model.norm.weight.fill_(hidden**-0.5)  # the norm of a one-hot vector is one-hot again
        model.model.embed_tokens.weight[:, :size] = torch.eye(size)
        model.lm_head.weight[vocab["<|eos|>"], :size] = 5.0  # what has no rule ends the text
        for token, following in rules.items():
            for target in following:
                model.lm_head.weight[vocab[target], vocab[token]] = 20.0
        model.model.embed_tokens.weight[vocab["~"]] = float("nan")
    model.generation_config = GenerationConfig(eos_token_id=vocab["<|eos|>"], **(generation or {}))
    model.save_pretrained(directory)
