"""How few tokens a long text can have, without tokenizing it: its characters over those of the longest token.

Enters: a transformers tokenizer. Leaves: a `TokenBound`, or None for tokenizers that drop or merge characters without a
limit (unknown words, stripped blanks), of which nothing can be said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

_COMPOSED = 4  # characters that Unicode composition makes one of, at most
_BYTES = frozenset(f"<0x{number:02X}>" for number in range(256))
_VISIBLE = {*range(33, 127), *range(161, 173), *range(174, 256)}  # GPT-2 shows these bytes as they are
_OTHERS = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTE_ALPHABET = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
_PLAIN_PRE_TOKENIZERS = frozenset({"ByteLevel", "Split", "Digits", "Punctuation", "Metaspace", "Sequence"})


@dataclass(frozen=True, slots=True)
class TokenBound:
    """What is known of a tokenizer's tokens.

    Attributes:
        longest: characters of a text that one token can stand for, at most.
        greedy: special tokens that swallow the blanks beside them.
        dropped: characters that leave no token.
    """

    longest: int
    greedy: tuple[str, ...] = ()
    dropped: str = ""

    def fewest_tokens(self, text: str) -> int:
        """The text has at least so many tokens."""
        if any(token in text for token in self.greedy):
            return 0
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.longest)


def find_token_bound(tokenizer: Any) -> TokenBound | None:
    """The bound of a tokenizer, from its own description; None if it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    description = orjson.loads(backend.to_str())
    normalizers = list(_parts(description.get("normalizer"), "normalizers"))
    pre_tokenizers = list(_parts(description.get("pre_tokenizer"), "pretokenizers"))
    model = description["model"]
    vocabulary = [entry if isinstance(entry, str) else entry[0] for entry in model.get("vocab", ())]
    keeps_all = all(map(_keeps_characters, normalizers)) and all(map(_keeps_pieces, pre_tokenizers))
    dropped = _dropped_characters(model, vocabulary, normalizers + pre_tokenizers)
    if not keeps_all or dropped is None:
        return None
    composes = any(part["type"].startswith("NF") for part in normalizers)
    added = description.get("added_tokens", [])
    longest = max(map(len, [*vocabulary, *(token["content"] for token in added)]))
    greedy = tuple(token["content"] for token in added if token["lstrip"] or token["rstrip"])
    return TokenBound(longest * (_COMPOSED if composes else 1), greedy, dropped)


def _parts(part: Any, key: str) -> Iterator[Any]:
    if part is not None:
        yield part
        for inner in part.get(key, ()):
            yield from _parts(inner, key)


def _keeps_characters(normalizer: Any) -> bool:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String", "")
        return 0 < len(pattern) <= len(normalizer["content"])
    return normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Sequence", "ByteLevel", "Lowercase")


def _keeps_pieces(pre_tokenizer: Any) -> bool:
    return pre_tokenizer["type"] in _PLAIN_PRE_TOKENIZERS and pre_tokenizer.get("behavior") != "Removed"


def _dropped_characters(model: Any, vocabulary: list[str], parts: list[Any]) -> str | None:
    """Characters without a token for any of their bytes; None where these cannot be told one by one."""
    if model.get("byte_fallback"):
        return "" if set(vocabulary) >= _BYTES else None
    if model["type"] != "BPE" or not any(part["type"] == "ByteLevel" for part in parts):
        return None
    tokens = set(vocabulary)
    missing = {byte for character, byte in _BYTE_ALPHABET.items() if character not in tokens}
    if missing & set(range(0x80, 0xC0)):  # in every longer character
        return None
    return "".join(map(chr, sorted(byte for byte in missing if byte < 0x80)))
