"""Rows to prompts: pick the source, render it, tokenize it, apply the length policy. A row that fails stays in line.

What the prompt is, in this order: the template over the row, the chat in `messages`, the text or token ids in
`prompt`. Rows come and go in batches, because tokenizers are several times faster that way. The tokenizer is anything
with the few methods of `Tokenizer`; this module never touches torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jinja2
import numpy as np
import numpy.typing as npt

from cbgen.config import PromptConfig
from cbgen.data.messages import check_messages, check_template_variables, check_tools, decode_bytes, decoded, type_name
from cbgen.data.openai import is_batch_line, parse_request
from cbgen.data.templates import NotText, check_chat_template, compile_template, not_text
from cbgen.data.token_bounds import TokenBound, find_token_bound
from cbgen.errors import InputError, RowError, RowFailure, UsageError
from cbgen.params import SamplingParams, check_vocabulary, merge_params, shown
from cbgen.records import Prompt, Row

__all__ = [
    "PromptBuilder",
    "Tokenizer",
    "check_first_rows",
    "check_messages",
    "check_prompt_config",
    "clash_message",
    "compile_template",
]

_CALL_CHARACTERS = 1 << 20  # of one call of the tokenizer
_LONG_TEXT = 1 << 17  # characters, below which tokenizing is quicker than thinking about it
_TAIL_MARGIN = 4096  # characters in front of a cut text, after which its tokens are those of the whole
_SHOWN_COLUMNS = 20
_RESERVED_KWARGS = {
    "add_generation_prompt": "it is always true, and false with --continue-final-message",
    "chat_template": "use --chat-template FILE",
    "continue_final_message": "use the option of that name",
    **dict.fromkeys(
        (
            "conversation", "conversations", "messages", "tokenize", "padding", "truncation", "max_length",
            "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
            "sanitize_control_tokens", "processor_kwargs",
        ),
        "it is no variable of a template but an argument of the call",
    ),
}  # fmt: skip


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
        self._tokenizer = tokenizer
        self._config = config
        self._params = params
        self._clamped: dict[int, SamplingParams] = {}  # by room
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._reserved = reserved
        self._template = compile_template(config.template) if config.template is not None else None
        self._adds_bos = _adds_bos(tokenizer)
        self._bound: TokenBound | None = None
        self._has_looked_for_bound = False
        _silence_length_warning(tokenizer)
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
            check_vocabulary(params, self._vocab_size)
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
            draft.text = _render_row(self._template, columns, place)
        elif columns.get(messages_column) is not None:
            messages = check_messages(columns[messages_column], messages_column, place)
            draft.text = self._render_chat(messages, self._template_variables(columns, place), place)
            draft.is_chat = True
        elif columns.get(prompt_column) is not None:
            self._take_prompt(draft, columns[prompt_column], prompt_column)
        else:
            raise RowFailure(
                "missing_prompt",
                f"{place}: no value in column {prompt_column!r} or {messages_column!r} "
                f"(columns present: {_listed(columns)}); "
                "name the column with --prompt-column or --messages-column, or write a --template",
            )

    def _take_prompt(self, draft: _Draft, value: Any, column: str) -> None:
        place = draft.row.place
        if isinstance(value, str | bytes):
            draft.text = decoded(value, column, place)
        elif isinstance(value, list) and all(type(item) is int for item in value):
            wrong = next((item for item in value if not 0 <= item < self._vocab_size), None)
            if wrong is not None:
                message = f"{place}: token id {wrong} is outside the vocabulary (0 to {self._vocab_size - 1})"
                raise RowFailure("token_out_of_range", message)
            draft.token_ids = value
        else:
            kind = type_name(value)
            if isinstance(value, list):
                kind = f"a list that holds {type_name(next(item for item in value if type(item) is not int))}"
            raise RowFailure("wrong_type", f"{place}: {column!r} must be text or a list of token ids, not {kind}")

    def _template_variables(self, columns: dict[str, Any], place: str) -> dict[str, Any]:
        """The run's variables for the chat template, with the row's own on top, and its tools."""
        own, tools = columns.get("chat_template_kwargs"), columns.get("tools")
        if own is None and tools is None:
            return self._config.chat_template_kwargs
        variables = dict(self._config.chat_template_kwargs)
        if own is not None:
            variables |= check_template_variables(own, place)
            reserved = next((name for name in variables if name in _RESERVED_KWARGS), None)
            if reserved is not None:
                message = f"{place}: chat_template_kwargs cannot set {reserved!r}: {_RESERVED_KWARGS[reserved]}"
                raise RowFailure("invalid_params", message)
        own_tools = [] if tools is None else check_tools(tools, place)
        return variables | {"tools": own_tools} if own_tools else variables

    def _render_chat(self, messages: list[dict[str, Any]], variables: dict[str, Any], place: str) -> str:
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
                **variables,
            )
        except Exception as error:
            raise RowFailure("template_error", f"{place}: {_first_line(error)}") from error
        return str(text)

    # -- tokenizing ---------------------------------------------------------------------------------------------------

    def _tokenize(self, drafts: list[_Draft]) -> None:
        """Set `token_ids` of every draft with text, or its row's error. Chats bring their own special tokens."""
        for draft in drafts:
            if len(draft.text or "") > _LONG_TEXT:
                self._shorten(draft, draft.text or "")
        for is_chat in (False, True):
            for group in _in_calls(draft for draft in drafts if draft.is_chat is is_chat and draft.row.error is None):
                try:
                    encoded = self._encode([draft.text or "" for draft in group], not is_chat)
                except BaseException as error:  # one text breaks the whole call: find out which
                    _raise_unless_of_tokenizer(error)
                    for draft in group:
                        self._tokenize_alone(draft)
                    continue
                for draft, token_ids in zip(group, encoded, strict=True):
                    draft.token_ids = token_ids

    def _tokenize_alone(self, draft: _Draft) -> None:
        text = draft.text or ""
        try:
            draft.token_ids = self._encode([text], not draft.is_chat)[0]
        except BaseException as error:
            _raise_unless_of_tokenizer(error)
            draft.row.error = RowError("tokenizer_error", f"{draft.row.place}: {_first_line(error)}")

    def _shorten(self, draft: _Draft, text: str) -> None:
        """Fail a text that is too long whatever its tokens, or keep the end of it that is sure to be enough."""
        if not self._has_looked_for_bound:
            self._has_looked_for_bound, self._bound = True, find_token_bound(self._tokenizer)
        bound = self._bound
        if bound is None or bound.fewest_tokens(text) < self._max_model_len:
            return
        if self._config.on_too_long == "error":
            draft.row.error = self._too_long(draft, f"at least {bound.fewest_tokens(text):,}")
            return
        kept = self._num_kept(draft.params.max_tokens) * bound.longest + _TAIL_MARGIN
        if kept < len(text):
            draft.is_cut, draft.text = True, text[-kept:]
            if draft.is_chat and self._adds_bos and self._begins_with_bos(text[:_TAIL_MARGIN]):
                draft.text = f"{self._tokenizer.bos_token}{draft.text}"

    def _begins_with_bos(self, text: str) -> bool:
        return self._encode([text], add_special_tokens=False)[0][:1] == [self._tokenizer.bos_token_id]

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
        if self._adds_bos and token_ids[0] == self._tokenizer.bos_token_id and keep > 1:
            return token_ids[:1] + token_ids[len(token_ids) - keep + 1 :]
        return token_ids[len(token_ids) - keep :]


def check_prompt_config(config: PromptConfig) -> None:
    """Everything about prompts that can be refused without a model.

    Raises:
        UsageError: a template does not parse, or a variable for the chat template has a name that is taken.
    """
    if config.template is not None:
        compile_template(config.template)
    if config.chat_template is not None:
        check_chat_template(config.chat_template)
    reserved = next((name for name in config.chat_template_kwargs if name in _RESERVED_KWARGS), None)
    if reserved is not None:
        raise UsageError(f"--chat-template-kwargs cannot set {reserved!r}: {_RESERVED_KWARGS[reserved]}")


def check_first_rows(rows: list[Row], config: PromptConfig) -> None:
    """Refuse an input in whose first rows there is nothing to make a prompt of.

    Args:
        rows: the first ones; broken ones among them do not count.
        config: which columns a prompt is taken from.

    Raises:
        InputError: no row has one of the columns; the message lists those that there are.
    """
    rows = [row for row in rows if row.error is None]
    wanted = (config.messages_column, config.prompt_column)
    if not rows or config.template is not None:
        return
    if any(is_batch_line(row.columns) or any(name in row.columns for name in wanted) for row in rows):
        return
    present = _listed(dict.fromkeys(name for row in rows for name in row.columns))
    seen = "this row" if len(rows) == 1 else f"the first {len(rows)} rows"
    raise InputError(
        f"{rows[0].place}: no column {config.prompt_column!r} or {config.messages_column!r} in {seen} "
        f"(columns present: {present}); name the column with --prompt-column or --messages-column, or write a "
        "--template"
    )


def clash_message(column: str) -> str:
    """Why a column cannot be carried through, and the way out; used for the whole file and for single rows."""
    return (
        f"the input has a column {column!r}, which is a result field of the output; rename it, or set --result-prefix "
        "so that result fields get other names"
    )


def _silence_length_warning(tokenizer: Any) -> None:
    """Prompts of any length are checked here; transformers' own warning would only alarm."""
    warned = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(warned, dict):
        warned["sequence-length-is-longer-than-the-specified-maximum"] = True


def _adds_bos(tokenizer: Tokenizer) -> bool:
    """Whether encoding a plain text puts a BOS in front of it."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer(["a"], add_special_tokens=True)["input_ids"][0][:1] == [bos]


def _in_calls(drafts: Iterable[_Draft]) -> Iterator[list[_Draft]]:
    """Groups of about as much text as one call should get."""
    group: list[_Draft] = []
    size = 0
    for draft in drafts:
        length = len(draft.text or "")
        if group and size + length > _CALL_CHARACTERS:
            yield group
            group, size = [], 0
        group.append(draft)
        size += length
    if group:
        yield group


def _raise_unless_of_tokenizer(error: BaseException) -> None:
    """Panics of Rust code are no `Exception`s."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def _render_row(template: jinja2.Template, columns: dict[str, Any], place: str) -> str:
    try:
        # Only what the template uses fails: a column of images is often beside that of the questions.
        return template.render({name: decode_bytes(value, partial(not_text, name)) for name, value in columns.items()})
    except NotText as error:
        raise RowFailure("invalid_utf8", f"{place}: {_first_line(error)}") from error
    except Exception as error:
        raise RowFailure("template_error", f"{place}: {_first_line(error)}") from error


def _listed(columns: Iterable[str]) -> str:
    """Names of columns for a message; not all of very many."""
    names = list(columns)
    more = f" and {len(names) - _SHOWN_COLUMNS:,} more" if len(names) > _SHOWN_COLUMNS else ""
    return (", ".join(map(shown, names[:_SHOWN_COLUMNS])) or "none") + more


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
