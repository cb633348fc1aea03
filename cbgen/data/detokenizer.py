"""Token ids to text, exactly: prompt text + completion == decode of all ids together.

Decoding only the new ids loses a leading space with sentencepiece, and decoding id by id tears characters apart, so the
completion is always decoded behind the last tokens of its prompt and the part in front is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

_TAIL = 6  # prompt tokens put in front; grows when they decode to nothing or to half a character
_TORN = "\ufffd"


class Decoder(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> Any:
        """Text of the ids."""
        ...


class Detokenizer:
    """Decodes completions of one tokenizer. Stateless, so any number of rows can share it."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer

    def text(self, prompt_ids: npt.NDArray[np.int32], output_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text that `output_ids` add behind the prompt."""
        if not output_ids:
            return ""
        prefix_ids, prefix = self._prefix(prompt_ids, skip_special_tokens)
        whole = self._decode(prefix_ids + output_ids, skip_special_tokens)
        if whole.startswith(prefix):
            return whole[len(prefix) :]
        return self._decode(output_ids, skip_special_tokens)

    def _prefix(self, prompt_ids: npt.NDArray[np.int32], skip_special_tokens: bool) -> tuple[list[int], str]:
        size = _TAIL
        while True:
            ids = prompt_ids[-size:].tolist()
            text = self._decode(ids, skip_special_tokens)
            if (text and not text.endswith(_TORN)) or size >= len(prompt_ids):
                return ids, text
            size *= 4

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(
            self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )


def is_tokenizer_error(error: BaseException) -> bool:
    """Whether it may end one row alone. A panic in a tokenizer written in Rust is no `Exception`, but as harmless."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class StopStringMatcher:
    """Watches one row's text for its stop strings while the tokens come in. Called with each new token id.

    Only a few tokens are decoded per call: text is settled piece by piece, and a piece is settled when it does not
    end in half a character. A stop string may begin in settled text and end in the newest token.

    Attributes:
        end: where the completion ends in the row's text, once a stop string was found.
        failure: what the tokenizer raised, if it did; the row ends there.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        prompt_ids: npt.NDArray[np.int32],
        stops: tuple[str, ...],
        *,
        min_tokens: int,
        include_stop: bool,
        skip_special_tokens: bool,
    ) -> None:
        self.end: int | None = None
        self.failure: BaseException | None = None
        self._detokenizer = detokenizer
        self._stops = stops
        self._longest = max(map(len, stops))
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._context = prompt_ids  # what stands before the pending ids
        self._pending: list[int] = []
        self._num_tokens = 0
        self._num_settled = 0  # characters
        self._num_seen = 0  # characters, those before half a character included
        self._tail = ""  # the last settled characters, as many as a stop string could begin in

    def __call__(self, token_id: int) -> bool:
        try:
            return self._take(token_id)
        except BaseException as error:
            if not is_tokenizer_error(error):
                raise
            self.failure = error
            return True

    def _take(self, token_id: int) -> bool:
        self._num_tokens += 1
        self._pending.append(token_id)
        text = self._detokenizer.text(self._context, self._pending, skip_special_tokens=self._skip_special_tokens)
        visible = text.rstrip(_TORN)
        window = self._tail + visible
        window_start = self._num_settled - len(self._tail)
        if self._num_tokens >= self._min_tokens:
            self.end = self._find(window, window_start)
        self._num_seen = self._num_settled + len(visible)
        if text and visible == text:
            self._num_settled += len(text)
            self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
            self._context = np.concatenate([self._context[-_TAIL:], np.array(self._pending, dtype=np.int32)])
            self._pending = []
        return self.end is not None

    def _find(self, window: str, window_start: int) -> int | None:
        """The end of the text, in characters from the row's first one, for the stop string that begins first."""
        seen = self._num_seen - window_start  # a match must end in new text: what ended earlier was decided then
        found = [(window.find(stop, max(0, seen - len(stop) + 1)), stop) for stop in self._stops]
        found = [(position, stop) for position, stop in found if position >= 0]
        if not found:
            return None
        position, stop = min(found)
        return window_start + position + (len(stop) if self._include_stop else 0)
