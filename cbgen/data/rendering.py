"""What a row's prompt is: the template over the row, the chat in `messages`, or the text or token ids in `prompt`.

Enters: the columns of a row, or the rows at the start of an input. Leaves: the prompt as text or as token ids, or a
`RowFailure`; of settings and inputs that can give no prompt at all, an error for the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jinja2

from cbgen.config import PromptConfig
from cbgen.data.messages import (
    check_messages,
    check_template_variables,
    check_tools,
    decode_bytes,
    decoded,
    type_name,
)
from cbgen.data.openai import is_batch_line
from cbgen.data.templates import NotText, check_chat_template, compile_template, not_text
from cbgen.data.tokenizing import Tokenizer
from cbgen.errors import InputError, RowFailure, UsageError, first_line
from cbgen.params import shown
from cbgen.records import Row

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


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as its row gives it: exactly one of `text` and `token_ids` is set."""

    text: str | None = None
    token_ids: list[int] | None = None
    is_chat: bool = False


class Renderer:
    """Picks the source of a row's prompt and renders it.

    Args:
        tokenizer: the model's; it renders chats.
        config: where prompts come from.
        vocab_size: token ids are below it.

    Raises:
        UsageError: the template does not parse.
    """

    def __init__(self, tokenizer: Tokenizer, config: PromptConfig, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._vocab_size = vocab_size
        self._template = compile_template(config.template) if config.template is not None else None

    def render(self, row: Row, columns: dict[str, Any]) -> Rendered:
        """The prompt of a row.

        Args:
            row: its form and place count here.
            columns: to take the prompt from; of a batch line, those of its request.

        Raises:
            RowFailure: there is none, or it cannot be rendered.
        """
        config, place = self._config, row.place
        native = row.form == "native"
        messages_column = config.messages_column if native else "messages"
        prompt_column = config.prompt_column if native else "prompt"
        if self._template is not None and native:
            return Rendered(_render_row(self._template, columns, place))
        if columns.get(messages_column) is not None:
            messages = check_messages(columns[messages_column], messages_column, place)
            return Rendered(self._render_chat(messages, self._template_variables(columns, place), place), is_chat=True)
        if columns.get(prompt_column) is not None:
            return self._take_prompt(columns[prompt_column], prompt_column, place)
        raise RowFailure(
            "missing_prompt",
            f"{place}: no value in column {prompt_column!r} or {messages_column!r} "
            f"(columns present: {_listed(columns)}); "
            "name the column with --prompt-column or --messages-column, or write a --template",
        )

    def _take_prompt(self, value: Any, column: str, place: str) -> Rendered:
        if isinstance(value, str | bytes):
            return Rendered(decoded(value, column, place))
        if isinstance(value, list) and all(type(item) is int for item in value):
            wrong = next((item for item in value if not 0 <= item < self._vocab_size), None)
            if wrong is not None:
                message = f"{place}: token id {wrong} is outside the vocabulary (0 to {self._vocab_size - 1})"
                raise RowFailure("token_out_of_range", message)
            return Rendered(token_ids=value)
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
            raise RowFailure("template_error", f"{place}: {first_line(error)}") from error
        return str(text)


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


def _render_row(template: jinja2.Template, columns: dict[str, Any], place: str) -> str:
    try:
        # Only what the template uses fails: a column of images is often beside that of the questions.
        return template.render({name: decode_bytes(value, partial(not_text, name)) for name, value in columns.items()})
    except NotText as error:
        raise RowFailure("invalid_utf8", f"{place}: {first_line(error)}") from error
    except Exception as error:
        raise RowFailure("template_error", f"{place}: {first_line(error)}") from error


def _listed(columns: Iterable[str]) -> str:
    """Names of columns for a message; not all of very many."""
    names = list(columns)
    more = f" and {len(names) - _SHOWN_COLUMNS:,} more" if len(names) > _SHOWN_COLUMNS else ""
    return (", ".join(map(shown, names[:_SHOWN_COLUMNS])) or "none") + more
