"""Jinja templates, parsed before a model is loaded and rendered in bounds: row templates, and chat templates' syntax.

Enters: the text of a template. Leaves: a template that renders a row's columns, or an error that names the line. A row
template runs in a sandbox, and what would make texts or numbers of absurd size is an error before it is computed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cbgen.errors import UsageError

_MAX_LENGTH = 1 << 24  # of a text or list that one operation makes
_MAX_BITS = 1 << 16  # of a number
_WIDTH = re.compile(r"\d{8,}")
_LOADING = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_PADDING_FILTERS = ("center", "indent", "slice", "batch", "round", "wordwrap")


class NotText(jinja2.UndefinedError):
    """A template writes bytes that are no text."""


class _NotText:
    """Stands for such bytes: a template may pass by them (an image), and ask whether they are there."""

    def __init__(self, message: str) -> None:
        self._message = message

    def _fail(self, *_: object) -> NoReturn:
        raise NotText(self._message)

    __str__ = __repr__ = __len__ = __iter__ = __getattr__ = __getitem__ = __contains__ = __add__ = __radd__ = _fail

    def __bool__(self) -> bool:
        return True


def not_text(column: str, error: UnicodeDecodeError) -> object:
    """What a template gets in place of bytes that are no text; writing it raises `NotText`."""
    return _NotText(f"{column!r} holds bytes that are not valid UTF-8 (at byte {error.start + 1})")


def _as_json(value: Any) -> str:
    if isinstance(value, _NotText):
        return str(value)  # which raises
    raise TypeError(f"a value of type {type(value).__name__} is no JSON")


def compile_template(text: str) -> jinja2.Template:
    """A row template: sandboxed, and a column that the row lacks is an error, not an empty string.

    Raises:
        UsageError: it does not parse, or wants to load another template.
    """
    environment = _RowEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    try:
        tree = environment.parse(text)
        loading = next(tree.find_all(_LOADING), None)
        if loading is not None:
            raise UsageError(f"--template cannot include, import or extend other templates (line {loading.lineno})")
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"--template does not parse: {error.message} (line {error.lineno})") from error
    except RecursionError as error:
        raise UsageError("--template does not parse: it is nested too deeply") from error


def check_chat_template(text: str) -> None:
    """Parse a chat template as transformers will.

    Raises:
        UsageError: it does not parse, or computes powers.
    """
    extensions = ["jinja2.ext.loopcontrols", _GenerationTag]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    try:
        power = next(environment.parse(text).find_all(nodes.Pow), None)
        if power is not None:  # Jinja would compute constant ones at once, however large
            raise UsageError(f"--chat-template cannot use ** (line {power.lineno})")
        environment.compile(text)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"--chat-template does not parse: {error.message} (line {error.lineno})") from error
    except RecursionError as error:
        raise UsageError("--chat-template does not parse: it is nested too deeply") from error


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which transformers knows: what the assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RowEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which one operation cannot make a text, list or number of absurd size."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.policies["json.dumps_kwargs"] = {**self.policies["json.dumps_kwargs"], "default": _as_json}
        for name in _PADDING_FILTERS:
            self.filters[name] = _bounded(self.filters[name])
        self.filters["format"] = _bounded_format(self.filters["format"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(obj, "__name__", "") in _PADDING_METHODS:
            _check_widths(args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        function = super().wrap_str_format(value)
        return None if function is None else _bounded_format(function, value.__self__)


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else (right,), {})
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        _require((bits * max(0, right) if operator == "**" else bits + right.bit_length()) <= _MAX_BITS)
    elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
        count, items = (left, right) if isinstance(left, int) else (right, left)
        _require(_length(items) * max(0, count) <= _MAX_LENGTH)
    elif operator == "+":
        _require(_length(left) + _length(right) <= 4 * _MAX_LENGTH)


def _check_format(text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A field's width may be written out or given as an argument."""
    _require(_WIDTH.search(text) is None)
    if "{" in text.replace("{{", "").partition("{")[2].partition("}")[0] or "*" in text:
        _check_widths(args, kwargs)


def _check_widths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _require(all(abs(value) <= _MAX_LENGTH for value in (*args, *kwargs.values()) if isinstance(value, int)))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _require(is_small: bool) -> None:
    if not is_small:
        raise SecurityError("the template asks for a text or a number that is too large")


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # Jinja marks filters that want more than the value
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_widths(args[1:], kwargs)
        return function(*args, **kwargs)

    return bounded


def _bounded_format(function: Callable[..., Any], text: str | None = None) -> Callable[..., Any]:
    """A formatting function whose text is given, or is its first argument."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = [*args[text is None :], *kwargs.values()]
        inner = [item for value in values if isinstance(value, dict) for item in value.values()]
        _check_format(str(args[0]) if text is None else text, (*values, *inner), {})
        return function(*args, **kwargs)

    return bounded
