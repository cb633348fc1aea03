"""Texts to token ids: many in a call, and in a call of its own what breaks one.

Enters: texts, with or without special tokens to add. Leaves: token ids for each, or why the tokenizer refused it. The
tokenizer is anything with the few methods of `Tokenizer`; this module never touches torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Protocol

from cbgen.data.token_bounds import TokenBound, find_token_bound
from cbgen.errors import first_line

_CALL_CHARACTERS = 1 << 20  # of one call of the tokenizer


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    bos_token: Any
    bos_token_id: int | None
    chat_template: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any:
        """`["input_ids"]` of the result holds one list of ids per text."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any:
        """The chat as text, with `tokenize=False`."""
        ...


class Encoder:
    """A tokenizer that is called with much text at a time and whose failures are results.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._adds_bos = _adds_bos(tokenizer)
        _silence_length_warning(tokenizer)

    @property
    def added_bos(self) -> int | None:
        """The BOS id that plain texts get in front, or None."""
        return self._tokenizer.bos_token_id if self._adds_bos else None

    @cached_property
    def bound(self) -> TokenBound | None:
        """How long a token can be; looked for when it is first asked for."""
        return find_token_bound(self._tokenizer)

    def encode_each(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int] | str]:
        """For each text, in order: its token ids, or in the tokenizer's words why there are none."""
        results: list[list[int] | str] = []
        for group in _in_calls(texts):
            try:
                results += self._encode(group, add_special_tokens)
            except BaseException as error:  # one text breaks the whole call: find out which
                _raise_unless_of_tokenizer(error)
                results += [self._encode_alone(text, add_special_tokens) for text in group]
        return results

    def with_bos_of(self, head: str, tail: str) -> str:
        """The end of a text, with the BOS in front that the text itself has at its head, if plain texts get one."""
        return f"{self._tokenizer.bos_token}{tail}" if self._adds_bos and self._begins_with_bos(head) else tail

    def _encode_alone(self, text: str, add_special_tokens: bool) -> list[int] | str:
        try:
            return self._encode([text], add_special_tokens)[0]
        except BaseException as error:
            _raise_unless_of_tokenizer(error)
            return first_line(error)

    def _begins_with_bos(self, text: str) -> bool:
        return self._encode([text], add_special_tokens=False)[0][:1] == [self._tokenizer.bos_token_id]

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
        bos = self._tokenizer.bos_token_id
        if self._adds_bos and add_special_tokens:  # a text that brings its own BOS must not get a second one
            encoded = [ids[1:] if ids[:2] == [bos, bos] else ids for ids in encoded]
        return encoded


def _silence_length_warning(tokenizer: Any) -> None:
    """Prompts of any length are checked here; transformers' own warning would only alarm."""
    warned = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(warned, dict):
        warned["sequence-length-is-longer-than-the-specified-maximum"] = True


def _adds_bos(tokenizer: Tokenizer) -> bool:
    """Whether encoding a plain text puts a BOS in front of it."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer(["a"], add_special_tokens=True)["input_ids"][0][:1] == [bos]


def _in_calls(texts: Iterable[str]) -> Iterator[list[str]]:
    """Groups of about as much text as one call should get."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > _CALL_CHARACTERS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def _raise_unless_of_tokenizer(error: BaseException) -> None:
    """Panics of Rust code are no `Exception`s."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
