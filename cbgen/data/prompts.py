"""Rows to prompts: render each row, tokenize it, apply the length policy. A row that fails stays in line.

Enters: rows, in batches, because tokenizers are several times faster that way. Leaves: for each row, in order, a
`Prompt`, or the row with its `error` set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cbgen.config import PromptConfig
from cbgen.data.openai import is_batch_line, parse_request
from cbgen.data.rendering import Renderer
from cbgen.data.tokenizing import Encoder, Tokenizer
from cbgen.errors import RowError, RowFailure, UsageError
from cbgen.params import SamplingParams, check_vocabulary, merge_params
from cbgen.records import Prompt, Row

_LONG_TEXT = 1 << 17  # characters, below which tokenizing is quicker than thinking about it
_TAIL_MARGIN = 4096  # characters in front of a cut text, after which its tokens are those of the whole


@dataclass(slots=True)
class _Draft:
    """A row on its way: exactly one of `text` and `token_ids` is set. `is_cut`: only the needed end of a long text."""

    row: Row
    params: SamplingParams
    own_seed: bool
    text: str | None = None
    token_ids: list[int] | None = None
    is_chat: bool = False
    is_cut: bool = False


class PromptBuilder:
    """Turns rows into prompts.

    Args:
        tokenizer: the model's.
        config: where prompts come from.
        params: the run's sampling parameters; rows may override them.
        max_model_len: longest prompt plus output, in tokens.
        vocab_size: rows of the model's embedding.
        reserved: names of result fields that a row's own columns must not have.

    Raises:
        UsageError: the template does not parse, or a stop token id is not in the vocabulary.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: PromptConfig,
        params: SamplingParams,
        max_model_len: int,
        vocab_size: int,
        reserved: tuple[str, ...] = (),
    ) -> None:
        self._renderer = Renderer(tokenizer, config, vocab_size)
        self._encoder = Encoder(tokenizer)
        self._config = config
        self._params = params
        self._clamped: dict[int, SamplingParams] = {}  # by room
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._reserved = reserved
        try:
            check_vocabulary(params, vocab_size)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def build(self, rows: list[Row]) -> list[Prompt | Row]:
        """One item per row, in order: a prompt, or the row with its `error` set."""
        drafts = [self._draft(row) for row in rows]
        self._tokenize([draft for draft in drafts if isinstance(draft, _Draft) and draft.text is not None])
        return [draft if isinstance(draft, Row) else self._finish(draft) for draft in drafts]

    def _draft(self, row: Row) -> _Draft | Row:
        if row.error is not None:
            return row
        try:
            columns, overrides = self._request(row)
            params = self._row_params(row, overrides)
            prompt = self._renderer.render(row, columns)
        except RowFailure as failure:
            row.error = failure.error
            return row
        own_seed = overrides.get("seed") is not None
        return _Draft(row, params, own_seed, prompt.text, prompt.token_ids, prompt.is_chat)

    def _request(self, row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
        """The columns to take the prompt from, and the row's own sampling parameters."""
        if is_batch_line(row.columns):
            # Known to be a request even when it turns out to be a bad one: its error is answered in the same form.
            row.form = "openai_chat"
            row.form, columns, overrides = parse_request(row)
            return columns, overrides
        clash = next((name for name in self._reserved if name in row.columns), None)
        if clash is not None:
            raise RowFailure("column_clash", f"{row.place}: {clash_message(clash)}")
        own = row.columns.get("sampling_params")
        if own is not None and not isinstance(own, dict):
            kind = type(own).__name__
            raise RowFailure("invalid_params", f"{row.place}: sampling_params must be an object, not {kind}")
        return row.columns, own or {}

    def _row_params(self, row: Row, overrides: dict[str, Any]) -> SamplingParams:
        try:
            params = merge_params(self._params, overrides)
            check_vocabulary(params, self._vocab_size)
        except ValueError as error:
            raise RowFailure("invalid_params", f"{row.place}: {error}") from error
        return params

    # -- tokenizing ---------------------------------------------------------------------------------------------------

    def _tokenize(self, drafts: list[_Draft]) -> None:
        """Set `token_ids` of every draft with text, or its row's error. Chats bring their own special tokens."""
        for draft in drafts:
            if len(draft.text or "") > _LONG_TEXT:
                self._shorten(draft, draft.text or "")
        for is_chat in (False, True):
            group = [draft for draft in drafts if draft.is_chat is is_chat and draft.row.error is None]
            texts = [draft.text or "" for draft in group]
            encoded = self._encoder.encode_each(texts, add_special_tokens=not is_chat)
            for draft, result in zip(group, encoded, strict=True):
                if isinstance(result, str):
                    draft.row.error = RowError("tokenizer_error", f"{draft.row.place}: {result}")
                else:
                    draft.token_ids = result

    def _shorten(self, draft: _Draft, text: str) -> None:
        """Fail a text that is too long whatever its tokens, or keep the end of it that is sure to be enough."""
        bound = self._encoder.bound
        if bound is None or bound.fewest_tokens(text) < self._max_model_len:
            return
        if self._config.on_too_long == "error":
            draft.row.error = self._too_long(draft, f"at least {bound.fewest_tokens(text):,}")
            return
        kept = self._num_kept(draft.params.max_tokens) * bound.longest + _TAIL_MARGIN
        if kept < len(text):
            draft.is_cut, draft.text = True, text[-kept:]
            if draft.is_chat:
                draft.text = self._encoder.with_bos_of(text[:_TAIL_MARGIN], draft.text)

    # -- length -------------------------------------------------------------------------------------------------------

    def _finish(self, draft: _Draft) -> Prompt | Row:
        row = draft.row
        if row.error is None:
            try:
                token_ids = self._fit(draft)
            except RowFailure as failure:
                row.error = failure.error
            else:
                room = self._max_model_len - len(token_ids)
                params = draft.params
                if params.max_tokens > room:
                    params = self._with_room(params, room)
                return Prompt(row, token_ids, params, draft.own_seed)
        return row

    def _with_room(self, params: SamplingParams, room: int) -> SamplingParams:
        """The same with fewer `max_tokens`; most rows share the run's own parameters, and those are made once."""
        if params is not self._params:
            return replace(params, max_tokens=room)
        if room not in self._clamped:
            self._clamped[room] = replace(params, max_tokens=room)
        return self._clamped[room]

    def _fit(self, draft: _Draft) -> npt.NDArray[np.int32]:
        token_ids, place = draft.token_ids or [], draft.row.place
        if not token_ids:
            raise RowFailure("empty_prompt", f"{place}: the prompt has no tokens; give at least one")
        if max(token_ids) >= self._vocab_size:
            message = f"{place}: the tokenizer gave id {max(token_ids)}, beyond the model's vocabulary"
            raise RowFailure("token_out_of_range", f"{message} ({self._vocab_size})")
        if draft.is_cut or len(token_ids) >= self._max_model_len:
            if self._config.on_too_long == "error":
                error = self._too_long(draft, str(len(token_ids)))
                raise RowFailure(error.code, error.message)
            token_ids = self._truncate_left(token_ids, draft.params.max_tokens)
        return np.array(token_ids, dtype=np.int32)

    def _too_long(self, draft: _Draft, num_tokens: str) -> RowError:
        return RowError(
            "prompt_too_long",
            f"{draft.row.place}: the prompt has {num_tokens} tokens and the context {self._max_model_len}; shorten it, "
            "or use --on-too-long truncate-left",
        )

    def _num_kept(self, max_tokens: int) -> int:
        return self._max_model_len - min(max_tokens, max(1, self._max_model_len // 2))

    def _truncate_left(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """Keep the end, and room for `max_tokens` but at most half the context; a BOS stays in front."""
        keep = self._num_kept(max_tokens)
        if token_ids[0] == self._encoder.added_bos and keep > 1:
            return token_ids[:1] + token_ids[len(token_ids) - keep + 1 :]
        return token_ids[len(token_ids) - keep :]


def clash_message(column: str) -> str:
    """Why a column cannot be carried through, and the way out; used for the whole file and for single rows."""
    return (
        f"the input has a column {column!r}, which is a result field of the output; rename it, or set --result-prefix "
        "so that result fields get other names"
    )
