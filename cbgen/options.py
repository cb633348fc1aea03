"""What the command line is made of: option types, options in groups, and values from the environment and from files.

Enters: flags, `CBGEN_*` variables, a YAML or TOML file. Leaves: checked values by option name, and where each came
from. Every spelling that `--help` shows is understood in all three places, with hyphens or underscores.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from reprlib import Repr
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from cbgen.config import ErrorAllowance
from cbgen.errors import UsageError

if TYPE_CHECKING:
    from click import ParamType as _ParamType
else:

    class _ParamType(click.ParamType):
        """Older versions of click have no type parameter."""

        def __class_getitem__(cls, _: Any) -> type:
            return cls


Function = TypeVar("Function", bound=Callable[..., Any])
_SIZES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LARGEST = 2**63  # whole numbers are below it: they are stored as 64 bits
_LARGEST_FILE = 16 << 20
_FILE = "cbgen.config_file"  # key of the configuration file's name in click's context
_brief = Repr()
_brief.maxstring = _brief.maxother = 60


# -- types ------------------------------------------------------------------------------------------------------------


class Size(_ParamType[int]):
    """Bytes: a number, or one with K, M, G or T behind it (powers of 1024)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().lower().removesuffix("ib").removesuffix("b")
        unit = _SIZES.get(text[-1:])
        try:
            return int(float(text[:-1] if unit else text) * (unit or 1))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a size; write something like 512M or 2G", param, ctx)


class Duration(_ParamType[float]):
    """Seconds: a number, or one with s, m, h or d behind it. At least `minimum`, and never without end."""

    name = "seconds"

    def __init__(self, minimum: float = 0.0) -> None:
        self.minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().lower()
        unit = _SECONDS.get(text[-1:])
        try:
            seconds = float(text[:-1] if unit else text) * (unit or 1)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a time; write seconds, or something like 90s, 30m, 2h or 1d", param, ctx)
        if seconds < self.minimum:
            self.fail(f"{value!r} is too short; the least is {self.minimum:g} seconds", param, ctx)
        return seconds


class Allowance(_ParamType[ErrorAllowance]):
    """A count of rows, or a fraction of them."""

    name = "allowance"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ErrorAllowance:
        if isinstance(value, ErrorAllowance):
            return value
        try:
            # Python may write a file's 0.00001 with an exponent, which `parse` does not know.
            return ErrorAllowance.parse(f"{value:.12f}" if isinstance(value, float) else str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class JsonObject(_ParamType[dict[str, Any]]):
    """A JSON object; a config file may hold it as a mapping."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
            parsed = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, TypeError, RecursionError) as error:
            self.fail(f"not valid JSON: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail("must be a JSON object, such as '{\"enable_thinking\": false}'", param, ctx)
        return parsed


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


# -- options in groups ------------------------------------------------------------------------------------------------


class GroupedOption(click.Option):
    """An option that `--help` lists under a heading, and that may be set as `CBGEN_` and any of its names."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    @property
    def spellings(self) -> dict[str, bool]:
        """Its names with underscores; True where one means the opposite, as --no-NAME does."""
        return {
            (self.name or ""): False,
            **{_plain(name): False for name in self.opts if name.startswith("--")},
            **{_plain(name): True for name in self.secondary_opts},
        }

    def find_variable(self) -> str | None:
        """The environment variable that sets it. An empty one sets nothing.

        Raises:
            UsageError: two spellings are set.
        """
        found = [name for name in map(_variable, self.spellings) if os.environ.get(name)]
        if len(found) > 1:
            raise UsageError(f"the environment sets {found[0]} and {found[1]}, which are the same option; unset one")
        return found[0] if found else None

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """Click's hook: the value of the variable, as a list for a repeatable option."""
        variable = self.find_variable()
        if variable is None:
            return None
        text = os.environ[variable]
        opposite = next(opposite for name, opposite in self.spellings.items() if _variable(name) == variable)
        if opposite:
            negated = click.types.BoolParamType.str_to_bool(text)
            if negated is None:
                raise UsageError(f"{variable} must be true or false, not {text!r}")
            return not negated
        return _listed(text, self.type) if self.multiple else text

    def handle_parse_result(self, ctx: click.Context, opts: Any, args: list[str]) -> tuple[Any, list[str]]:
        """Click's hook: a mistake is said with the place where it was made."""
        try:
            return super().handle_parse_result(ctx, opts, args)
        except click.BadParameter as error:
            source = source_of(ctx, self)
            if not source.startswith(("environment", "file")):
                raise
            message = f"{error.message.rstrip('.')} (set by {source})."
            raise click.BadParameter(message, error.ctx, error.param, error.param_hint) from None


class GroupedCommand(click.Command):
    """Lists options by group, in the order in which the groups first appear; what has none comes last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        others: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                (groups.setdefault(param.group, []) if isinstance(param, GroupedOption) else others).append(record)
        for name, records in [*groups.items(), ("Other", others)]:
            with formatter.section(name):
                formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click's hook: what no run can store is refused for all options alike."""
        rest = super().parse_args(ctx, args)
        for param in self.params:
            for value in _leaves(ctx.params.get(param.name or "")):
                _check_storable(param, value)
        return rest


def options(group: str, *declarations: tuple[tuple[str, ...], dict[str, Any]]) -> Callable[[Function], Function]:
    """A decorator that adds a group of options, in the order given."""

    def decorate(function: Function) -> Function:
        for names, settings in reversed(declarations):
            function = click.option(*names, cls=GroupedOption, group=group, **settings)(function)
        return function

    return decorate


def option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """One option of a group, in the words of `click.option`."""
    return names, settings


def spelled(param: click.Parameter) -> str:
    """How people write it: `--max-tokens`, or INPUT."""
    long = [name for name in param.opts if name.startswith("--")]
    return long[0] if long else param.human_readable_name


def source_of(ctx: click.Context, param: click.Parameter) -> str:
    """Where a value came from: `flag`, `environment CBGEN_NAME`, `file FILE` or `default`."""
    source = ctx.get_parameter_source(param.name or "")
    if source is ParameterSource.COMMANDLINE:
        return "flag"
    if source is ParameterSource.ENVIRONMENT:
        return f"environment {param.find_variable() if isinstance(param, GroupedOption) else ''}".rstrip()
    if source is ParameterSource.DEFAULT_MAP:
        return f"file {ctx.meta.get(_FILE, '')}".rstrip()
    return "default"


def format_values(ctx: click.Context, leave_out: tuple[str, ...]) -> str:
    """Each option's value and where it came from, one a line, aligned."""
    rows = [
        (spelled(param), _shown(ctx.params[param.name]), source_of(ctx, param))
        for param in ctx.command.params
        if param.name in ctx.params and param.name not in leave_out
    ]
    widths = [min(40, max(len(row[column]) for row in rows)) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows)


def _shown(value: Any) -> str:
    if value in (None, ()):
        return "-"
    if isinstance(value, ErrorAllowance):
        value = value.count if value.fraction is None else value.fraction
    return value if isinstance(value, str) and value and value.isprintable() else json.dumps(value, ensure_ascii=False)


def _variable(name: str) -> str:
    return f"CBGEN_{name.upper()}"


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _listed(text: str, kind: click.ParamType[Any]) -> list[Any]:
    """Several values in one variable: a JSON list; numbers also apart by commas or blanks. A text stays whole."""
    if kind.name == "integer" and not text.lstrip().startswith("["):
        return text.replace(",", " ").split()
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    wanted: type[Any] = int if kind.name == "integer" else str
    # A list of other things, such as "[1]" for a stop string, is a text that only looks like one.
    return values if isinstance(values, list) and all(type(value) is wanted for value in values) else [text]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from _leaves([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _why_no_text(value: str) -> str:
    """What is wrong with a value that is not Unicode: itself, or only how this process reads its arguments."""
    try:
        text = os.fsencode(value).decode("utf-8")
    except UnicodeError:
        return f"{value!a} is not valid UTF-8; rename the file or write it anew"
    return f"{text!a} cannot be used in this locale; set PYTHONUTF8=1, or a UTF-8 locale such as LC_ALL=C.UTF-8"


def _check_storable(param: click.Parameter, value: Any) -> None:
    """Text must be Unicode, and whole numbers fit 64 bits, or no output could state them.

    Raises:
        UsageError: neither.
    """
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise UsageError(f"{spelled(param)} {_brief.repr(value)} is too large")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError(f"{spelled(param)} {_why_no_text(value)}") from None
        if "\0" in value and param.name != "stop":
            raise UsageError(f"{spelled(param)} {_brief.repr(value)} holds a NUL character")


# -- configuration files ----------------------------------------------------------------------------------------------


def read_config(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Click's callback of --config: make a YAML or TOML file the defaults of all other options.

    Raises:
        UsageError: it cannot be read, or holds what is no option or no value of one.
    """
    if path is None:
        return
    ctx.meta[_FILE] = path
    spellings = _spellings(ctx.command, leave_out=param.name)
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for key, value in _load(path).items():
        if not isinstance(key, str) or _plain(key) not in spellings:
            raise UsageError(
                f"{path} sets {_brief.repr(key)}, which is no option of `cbgen run`{_hint(key, spellings)}"
            )
        target, opposite = spellings[_plain(key)]
        name = target.name or ""
        if name in written:
            raise UsageError(f"{path} sets {written[name]!r} and {key!r}, which are the same option; keep one")
        written[name] = key
        if value is not None:
            checked = _checked(path, key, value, target)
            values[name] = not checked if opposite else checked
    ctx.default_map = {**values, **(ctx.default_map or {})}


def _spellings(command: click.Command, leave_out: str | None) -> dict[str, tuple[click.Parameter, bool]]:
    found: dict[str, tuple[click.Parameter, bool]] = {}
    for param in command.params:
        names = param.spellings if isinstance(param, GroupedOption) else {param.name or "": False}
        if param.name != leave_out:
            found |= {name: (param, opposite) for name, opposite in names.items()}
    return found


def _hint(key: Any, spellings: dict[str, Any]) -> str:
    near = get_close_matches(_plain(str(key)), spellings, 1)
    return f"; did you mean {near[0].replace('_', '-')!r}?" if near else ""


def read_text(path: str) -> str:
    """A small text file, without the byte order mark that some editors put in front.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8, or too large to be what was meant.
    """
    with Path(path).open("rb") as file:
        data = file.read(_LARGEST_FILE + 1)
    if len(data) > _LARGEST_FILE:
        raise ValueError(f"it is larger than {_LARGEST_FILE >> 20} MiB")
    return data.decode("utf-8").removeprefix("\ufeff")


def _load(path: str) -> dict[Any, Any]:
    """The file's mapping.

    Raises:
        UsageError: it cannot be read, is not a mapping, or names a key twice.
    """
    try:
        text = read_text(path)
        values = tomllib.loads(text) if path.lower().endswith(".toml") else _load_yaml(path, text)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {path}: it is not valid UTF-8") from error
    except RecursionError as error:
        raise UsageError(f"cannot read {path}: it is nested too deep") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold a mapping of option names to values, not {_brief.repr(values)}")
    return values


def _load_yaml(path: str, text: str) -> Any:
    import yaml

    try:
        # The tree shows keys that stand twice; the values keep only the last of them.
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        keys = [key.value for key, _ in tree.value] if isinstance(tree, yaml.MappingNode) else []
        twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
        if twice is not None:
            raise UsageError(f"{path} sets {_brief.repr(twice)} twice; keep one")
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        place = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"cannot read {path}: not valid YAML{place}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"cannot read {path}: not valid YAML: {' '.join(str(error).split())}") from error
    return {} if values is None else values


def _checked(path: str, key: str, value: Any, param: click.Parameter) -> Any:
    """A file's value in the type its option takes; a repeatable option takes one or a list of them.

    Raises:
        UsageError: the value has another type.
    """
    if param.multiple or param.nargs == -1:
        items = value if isinstance(value, list) else [value]
        return [_checked_item(path, key, item, param) for item in items]
    return _checked_item(path, key, value, param)


def _checked_item(path: str, key: str, value: Any, param: click.Parameter) -> Any:
    kinds, wanted = _wanted(param)
    if isinstance(value, float) and value.is_integer() and float not in kinds and int in kinds:
        value = int(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise UsageError(f"{path} sets {key} to {_brief.repr(value)}, but it must be {wanted}")
    return value


def _wanted(param: click.Parameter) -> tuple[tuple[type[Any], ...], str]:
    """Python types that a file may hold for an option, and how people call them."""
    if isinstance(param, click.Option) and param.is_flag:
        return (bool,), "true or false"
    if isinstance(param.type, JsonObject):
        return (dict, str), "a mapping"
    if isinstance(param.type, click.Choice):
        return (str,), "one of " + ", ".join(map(str, param.type.choices))
    if param.type.name.startswith("integer"):
        return (int, str), "a whole number"
    if param.type.name in ("float", Size.name, Duration.name, Allowance.name):
        return (int, float, str), "a number"
    return (str,), "text (in quotes, if it looks like something else)"
