"""Models whose answers are known without running them: the next token depends on the current token alone.

Enters: rules, for each token what may follow it with its logit. Leaves: a one-layer Llama with attention and MLP at
zero, one-hot embeddings, and an lm_head that is the table of rules; and a tokenizer of bytes and whole words for it.
"""

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

Rules = dict[str, list[tuple[str, float]]]


def follow(paths: dict[str, list[str]], logit: float = 20.0) -> Rules:
    """Rules by which each path comes after the text that triggers it."""
    rules: Rules = {}
    for trigger, path in paths.items():
        for token, following in zip([trigger, *path], path, strict=False):
            rules[token] = [(following, logit)]
    return rules


def spelled(rules: Rules, specials: list[str]) -> Rules:
    """The rules with tokens written as a byte-level tokenizer writes them."""
    return {
        _spell(token, specials): [(_spell(target, specials), logit) for target, logit in following]
        for token, following in rules.items()
    }


def byte_vocab(rules: Rules, specials: list[str]) -> dict[str, int]:
    """Ids of the special tokens, of every byte, and of the tokens in rules that are spelled, in this order."""
    vocab = {token: number for number, token in enumerate([*specials, *_alphabet().values()])}
    for token, following in rules.items():
        for name in (token, *(target for target, _ in following)):
            vocab.setdefault(name, len(vocab))
    return vocab


def byte_tokenizer(vocab: dict[str, int], specials: list[str]) -> Tokenizer:
    """Each byte of a text is a token; only a model says whole words."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special_tokens(specials))
    return tokenizer


def special_tokens(names: list[str]) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def table_model(vocab: dict[str, int], rules: Rules, **config: Any) -> LlamaForCausalLM:
    """A Llama that looks up the next token.

    Args:
        vocab: ids of the tokens, 0 to its size - 1.
        rules: logits of what follows a token; all others are 0.
        config: the context's length, and the ids of special tokens.
    """
    size = len(vocab)
    hidden = -(-size // 8) * 8
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=hidden,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=False,
            rms_norm_eps=1e-9,
            **config,
        )
    ).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "layernorm" in name else 0.0)
        model.model.norm.weight.fill_(hidden**-0.5)  # the norm of a one-hot vector is one-hot again
        model.model.embed_tokens.weight[:, :size] = torch.eye(size)
        for token, following in rules.items():
            for target, logit in following:
                model.lm_head.weight[vocab[target], vocab[token]] = logit
    return model


def _alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte, in the order of the bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)}


def _spell(token: str, specials: list[str]) -> str:
    if token in specials:
        return token
    is_byte = len(token) == 1 and 0x80 <= ord(token) <= 0xFF and token != "\u0085"
    alphabet = _alphabet()
    return "".join(alphabet[byte] for byte in (token.encode("latin-1") if is_byte else token.encode()))
