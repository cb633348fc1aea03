"""Rows to prompts: pick the source, render it, tokenize it, apply the length policy. A row that fails stays in line.

What the prompt is, in this order: the template over the row, the chat in `messages`, the text or token ids in
`prompt`. Rows come and go in batches, because tokenizers are several times faster that way. The tokenizer is anything
with the few methods of `Tokenizer`; this module never touches torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jinja2
import numpy as np
import numpy.typing as npt
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cbgen.config import PromptConfig
from cbgen.data.openai import is_batch_line, parse_request
from cbgen.errors import RowError, RowFailure, UsageError
from cbgen.params import SamplingParams, merge_params
from cbgen.records import Prompt, Row


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    bos_token_id: int | None
    chat_template: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any:
        """`["input_ids"]` of the result holds one list of ids per text."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any:
        """The chat as text, with `tokenize=False`."""
        ...


@dataclass(slots=True)
class _Draft:
    """A row on its way: exactly one of `text` and `token_ids` is set."""

    row: Row
    params: SamplingParams
    own_seed: bool
    text: str | None = None
    token_ids: list[int] | None = None
    is_chat: bool = False


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
        self._tokenizer = tokenizer
        self._config = config
        self._params = params
        self._clamped: dict[int, SamplingParams] = {}  # by room
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._reserved = reserved
        self._template = compile_template(config.template) if config.template is not None else None
        self._adds_bos = _adds_bos(tokenizer)
        try:
            _check_stop_token_ids(params, vocab_size)
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
            draft = _Draft(row, params, overrides.get("seed") is not None)
            self._render(draft, columns)
        except RowFailure as failure:
            row.error = failure.error
            return row
        return draft

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
            _check_stop_token_ids(params, self._vocab_size)
        except ValueError as error:
            raise RowFailure("invalid_params", f"{row.place}: {error}") from error
        return params

    # -- rendering ----------------------------------------------------------------------------------------------------

    def _render(self, draft: _Draft, columns: dict[str, Any]) -> None:
        config, place = self._config, draft.row.place
        native = draft.row.form == "native"
        messages_column = config.messages_column if native else "messages"
        prompt_column = config.prompt_column if native else "prompt"
        if self._template is not None and native:
            try:
                draft.text = self._template.render(columns)
            except Exception as error:
                raise RowFailure("template_error", f"{place}: {_first_line(error)}") from error
        elif columns.get(messages_column) is not None:
            draft.text = self._render_chat(check_messages(columns[messages_column], messages_column, place), place)
            draft.is_chat = True
        elif columns.get(prompt_column) is not None:
            self._take_prompt(draft, columns[prompt_column], prompt_column)
        else:
            present = ", ".join(map(repr, columns)) or "none"
            raise RowFailure(
                "missing_prompt",
                f"{place}: no value in column {prompt_column!r} or {messages_column!r} (columns present: {present}); "
                "name the column with --prompt-column or --messages-column, or write a --template",
            )

    def _take_prompt(self, draft: _Draft, value: Any, column: str) -> None:
        place = draft.row.place
        if isinstance(value, str):
            draft.text = value
        elif isinstance(value, list) and all(type(item) is int for item in value):
            wrong = next((item for item in value if not 0 <= item < self._vocab_size), None)
            if wrong is not None:
                message = f"{place}: token id {wrong} is outside the vocabulary (0 to {self._vocab_size - 1})"
                raise RowFailure("token_out_of_range", message)
            draft.token_ids = value
        else:
            kind = type(value).__name__
            raise RowFailure("wrong_type", f"{place}: {column!r} must be text or a list of token ids, not {kind}")

    def _render_chat(self, messages: list[dict[str, Any]], place: str) -> str:
        config = self._config
        if config.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": config.system}, *messages]
        template = config.chat_template or self._tokenizer.chat_template
        if not template:
            message = f"{place}: the tokenizer has no chat template; give one with --chat-template FILE"
            raise RowFailure("no_chat_template", message)
        going_on = config.continue_final_message
        if going_on and messages[-1]["role"] != "assistant":
            message = f"{place}: --continue-final-message needs a final message of role 'assistant'"
            raise RowFailure("invalid_messages", message)
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                chat_template=config.chat_template,
                tokenize=False,
                add_generation_prompt=not going_on,
                continue_final_message=going_on,
                **config.chat_template_kwargs,
            )
        except Exception as error:
            raise RowFailure("template_error", f"{place}: {_first_line(error)}") from error
        return str(text)

    # -- tokenizing ---------------------------------------------------------------------------------------------------

    def _tokenize(self, drafts: list[_Draft]) -> None:
        """Set `token_ids` of every draft with text, or its row's error. Chats bring their own special tokens."""
        for is_chat in (False, True):
            group = [draft for draft in drafts if draft.is_chat is is_chat]
            if not group:
                continue
            try:
                encoded = self._encode([draft.text or "" for draft in group], not is_chat)
            except Exception:  # one text breaks the whole call: find out which
                for draft in group:
                    self._tokenize_alone(draft)
                continue
            for draft, token_ids in zip(group, encoded, strict=True):
                draft.token_ids = token_ids

    def _tokenize_alone(self, draft: _Draft) -> None:
        try:
            draft.token_ids = self._encode([draft.text or ""], not draft.is_chat)[0]
        except Exception as error:
            draft.row.error = RowError("tokenizer_error", f"{draft.row.place}: {_first_line(error)}")

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
        bos = self._tokenizer.bos_token_id
        if self._adds_bos and add_special_tokens:  # a text that brings its own BOS must not get a second one
            encoded = [ids[1:] if ids[:2] == [bos, bos] else ids for ids in encoded]
        return encoded

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
        limit = self._max_model_len
        if len(token_ids) >= limit:
            if self._config.on_too_long == "error":
                raise RowFailure(
                    "prompt_too_long",
                    f"{place}: the prompt has {len(token_ids)} tokens and the context {limit}; shorten it, or use "
                    "--on-too-long truncate-left",
                )
            token_ids = self._truncate_left(token_ids, draft.params.max_tokens)
        return np.array(token_ids, dtype=np.int32)

    def _truncate_left(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """Keep the end, and room for `max_tokens` but at most half the context; a BOS stays in front."""
        keep = self._max_model_len - min(max_tokens, max(1, self._max_model_len // 2))
        if self._adds_bos and token_ids[0] == self._tokenizer.bos_token_id and keep > 1:
            return token_ids[:1] + token_ids[len(token_ids) - keep + 1 :]
        return token_ids[len(token_ids) - keep :]


def compile_template(text: str) -> jinja2.Template:
    """A row template: sandboxed, and a column that the row lacks is an error, not an empty string.

    Raises:
        UsageError: it does not parse.
    """
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"--template does not parse: {error.message} (line {error.lineno})") from error


def clash_message(column: str) -> str:
    """Why a column cannot be carried through, and the way out; used for the whole file and for single rows."""
    return (
        f"the input has a column {column!r}, which is a result field of the output; rename it, or set --result-prefix "
        "so that result fields get other names"
    )


def check_messages(value: Any, column: str, place: str) -> list[dict[str, Any]]:
    """A chat, cleaned: null keys dropped (Arrow gives every message every key), text parts joined by newlines.

    Raises:
        RowFailure: not a non-empty list of {role, content} objects.
    """

    def fail(problem: str) -> RowFailure:
        return RowFailure("invalid_messages", f"{place}: {column!r} {problem}")

    if not isinstance(value, list) or not value:
        raise fail(
            f"must be a non-empty list of messages, not {'an empty list' if value == [] else type(value).__name__}"
        )
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise fail(f"item {number} must be an object with role and content, not {type(message).__name__}")
        kept = {key: item for key, item in message.items() if item is not None}
        if not isinstance(kept.get("role"), str):
            raise fail(f"item {number} has no role")
        if "content" not in kept and "tool_calls" not in kept:
            raise fail(f"item {number} has no content")
        kept["content"] = _content_text(kept.get("content", ""), number, fail)
        messages.append(kept)
    return messages


def _content_text(content: Any, number: int, fail: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fail(f"item {number} has content of type {type(content).__name__}; it must be text")
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise fail(f"item {number} has a content part of type {kind!r}; only text parts can be used")
        texts.append(text)
    return "\n".join(texts)


def _check_stop_token_ids(params: SamplingParams, vocab_size: int) -> None:
    if any(token_id >= vocab_size for token_id in params.stop_token_ids):
        raise ValueError(
            f"stop token id {max(params.stop_token_ids)} is outside the vocabulary (0 to {vocab_size - 1})"
        )


def _adds_bos(tokenizer: Tokenizer) -> bool:
    """Whether encoding a plain text puts a BOS in front of it."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer(["a"], add_special_tokens=True)["input_ids"][0][:1] == [bos]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
