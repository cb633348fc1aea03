"""The command line: options to a config, a call, an exit code. No logic, and no heavy import before it is needed.

Precedence: flag > `CBGEN_*` environment variable > `--config` file > default. stdout carries data only.
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from cbgen import __version__
from cbgen.config import (
    EngineConfig,
    ErrorAllowance,
    ModelConfig,
    OutputConfig,
    PromptConfig,
    ReportConfig,
    RunConfig,
    StopConfig,
)
from cbgen.errors import CbgenError, UsageError
from cbgen.params import DEFAULT_MAX_TOKENS, PARAM_NAMES

Function = TypeVar("Function", bound=Callable[..., Any])
_SIZES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_EXCLUSIONS = (
    ("resume", "overwrite"),
    ("retry_errors", "overwrite"),
    ("verify", "overwrite"),
    ("verify", "retry_errors"),
)
_NOT_WITH_STDOUT = ("json", "verify", "retry_errors", "overwrite")


# -- click, with options in groups ------------------------------------------------------------------------------------


class GroupedOption(click.Option):
    """An option that `--help` lists under a heading; its environment variable is CBGEN_ and its name."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.envvar = self.envvar or f"CBGEN_{(self.name or '').upper()}"


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


class Size(click.ParamType[int]):
    """Bytes: a number, or one with K, M, G or T behind it (powers of 1024)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().lower().removesuffix("ib").removesuffix("b")
        unit = _SIZES.get(text[-1:], 1)
        try:
            return int(float(text.rstrip("kmgt")) * unit)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a size; write something like 512M or 2G", param, ctx)


class Duration(click.ParamType[float]):
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


class Allowance(click.ParamType[ErrorAllowance]):
    """A count of rows, or a fraction of them."""

    name = "allowance"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ErrorAllowance:
        if isinstance(value, ErrorAllowance):
            return value
        try:
            # A float of a config file may have an exponent, which tells a fraction as a point does.
            return ErrorAllowance.parse(f"{value:f}" if isinstance(value, float) else str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class JsonObject(click.ParamType[dict[str, Any]]):
    """A JSON object; a config file may hold it as a mapping."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        import orjson

        if isinstance(value, dict):
            return value
        try:
            parsed = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            self.fail(f"not valid JSON: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail("must be a JSON object, such as '{\"enable_thinking\": false}'", param, ctx)
        return parsed


def _options(group: str, *declarations: tuple[tuple[str, ...], dict[str, Any]]) -> Callable[[Function], Function]:
    """A decorator that adds a group of options, in the order given."""

    def decorate(function: Function) -> Function:
        for names, settings in reversed(declarations):
            function = click.option(*names, cls=GroupedOption, group=group, **settings)(function)
        return function

    return decorate


def _option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return names, settings


def _read_config(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Make a YAML or TOML file the defaults of all other options."""
    if path is None:
        return
    values = _load_config(Path(path))
    known = {p.name for p in ctx.command.params} - {param.name}
    values = {name.replace("-", "_"): value for name, value in values.items()}
    unknown = sorted(set(values) - {name for name in known if name})
    if unknown:
        raise click.BadParameter(f"{path} sets {unknown[0]!r}, which is no option of `cbgen run`")
    ctx.default_map = {**values, **(ctx.default_map or {})}


def _load_config(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text("utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text) or {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise click.BadParameter(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise click.BadParameter(f"{path} must hold a mapping of option names to values")
    return values


def _text_or_file(value: str | None, option: str) -> str | None:
    """A value given directly, or as @FILE."""
    return _file_text(value[1:], option) if value is not None and value.startswith("@") else value


def _file_text(path: str, option: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option}: cannot read {path}: {error}") from error


# -- commands ---------------------------------------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="cbgen %(version)s")
def cli() -> None:
    """Offline batch generation with LLMs: one completion per input row, in input order, resumable."""


@cli.command(cls=GroupedCommand)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@_options(
    "Output",
    _option("-o", "--output", required=True, metavar="FILE|DIR|URI|-",
            help="A file, a directory of parts, the URI of one, or - for stdout; run again to continue."),
    _option("--format", type=click.Choice(["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]),
            help="Form of the file or the parts.  [default: by the name, and jsonl in a directory]"),
    _option("--rows-per-part", type=click.IntRange(min=1), default=10_000, show_default=True,
            help="Rows in each part of a directory."),
    _option("--state-dir", metavar="DIR", help="Where the state of the run is kept.  [default: beside the output]"),
    _option("--overwrite", is_flag=True, help="Start anew; an existing file is kept as a backup."),
    _option("--resume", is_flag=True, help="Continue an unfinished output. This is the default anyway."),
    _option("--retry-errors", is_flag=True, help="Generate the rows again that are errors in the output."),
    _option("--verify", is_flag=True, help="Only compare the output with its state, and generate nothing."),
    _option("--keep", multiple=True, metavar="COLUMN,...",
            help="Carry only these columns through; repeatable.  [default: all]"),
    _option("--append-message", is_flag=True, help="Add the answer to the row's messages."),
    _option("--source", is_flag=True, help="Add the file and line each row came from."),
    _option("--token-ids", is_flag=True, help="Add the generated token ids to each record."),
    _option("--result-prefix", default="", help="Put this before the names of result fields."),
)  # fmt: skip
@_options(
    "Input",
    _option("--limit", type=click.IntRange(min=0), help="Only the first N rows."),
    _option("--config", is_eager=True, expose_value=False, callback=_read_config, metavar="FILE",
            help="YAML or TOML file with values for any of these options."),
)  # fmt: skip
@_options(
    "Model",
    _option("--model", default="demo", show_default=True, metavar="demo|DIR|HUB_ID|FILE.gguf", help="What generates."),
    _option("--revision", help="Branch, tag or commit of a hub model."),
    _option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True,
            help="Weights and arithmetic; auto is the checkpoint's own."),
    _option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:N]", help="Where it runs."),
    _option("--trust-remote-code", is_flag=True, help="Run Python code that ships with the model."),
)  # fmt: skip
@_options(
    "Prompts",
    _option("--template", metavar="TEXT|@FILE", help="Jinja template over the row's columns."),
    _option("--prompt-column", default="prompt", show_default=True, help="Column with text or token ids."),
    _option("--messages-column", default="messages", show_default=True, help="Column with a chat."),
    _option("--system", help="System message for chats that have none."),
    _option("--chat-template", metavar="FILE", help="Chat template instead of the tokenizer's own."),
    _option("--chat-template-kwargs", type=JsonObject(), default={}, help="Extra variables for the chat template."),
    _option("--continue-final-message", is_flag=True, help="Continue the last message instead of answering it."),
    _option("--on-too-long", type=click.Choice(["error", "truncate-left"]), default="error", show_default=True,
            help="A prompt longer than the context."),
)  # fmt: skip
@_options(
    "Sampling (defaults come from the model's generation_config.json; rows may override)",
    *([_option("--n", type=int, help="Samples of each row.  [default: 1]")] if "n" in PARAM_NAMES else []),
    _option("--max-tokens", type=int, help=f"Most tokens to generate for a row.  [default: {DEFAULT_MAX_TOKENS}]"),
    _option("--min-tokens", type=int, help="No stop before so many tokens."),
    _option("--temperature", type=float, help="0 is greedy."),
    _option("--top-k", type=int, help="Sample among the K likeliest tokens; 0 or -1 is off."),
    _option("--top-p", type=float, help="Sample among the likeliest tokens that reach this mass."),
    _option("--min-p", type=float, help="Drop tokens less likely than this share of the likeliest."),
    _option("--repetition-penalty", type=float, help="Above 1 discourages tokens seen before."),
    _option("--seed", type=int, help="Same seed, same draws, whatever the batch.  [default: 0]"),
    _option("--stop", multiple=True, help="Stop at this text; may be given more than once."),
    _option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="Stop at this token id; repeatable."),
    _option("--include-stop", is_flag=True, default=None, help="Keep the stop string in the text."),
    _option("--ignore-eos", is_flag=True, default=None, help="Do not stop at end-of-sequence tokens."),
    _option("--skip-special-tokens/--keep-special-tokens", default=None, help="Special tokens in the text."),
)
@_options(
    "Engine",
    _option("--batching", type=click.Choice(["continuous", "static"]), default="continuous", show_default=True,
            help="static waits for the longest row of each batch; the baseline to compare with."),
    _option("--max-num-seqs", type=int, help="Slots: rows that generate at once.  [default: by device]"),
    _option("--max-num-batched-tokens", type=int, help="Token budget of a step.  [default: by device]"),
    _option("--max-model-len", type=int, help="Longest prompt plus output.  [default: the model's context]"),
    _option("--kv-cache-memory", type=Size(), help="Bytes for the KV cache, such as 2G.  [default: by free memory]"),
)  # fmt: skip
@_options(
    "Stopping",
    _option("--max-time", type=Duration(), metavar="TIME",
            help="Stop after so long, loading included: seconds, or 90s, 30m, 2h, 1d. Run again to continue."),
    _option("--max-output-tokens", type=click.IntRange(min=1), help="Stop when this run generated so many tokens."),
    _option("--grace", type=Duration(), default=5.0, show_default=True, metavar="TIME",
            help="How long rows in flight may still finish at a stop."),
    _option("--fail-on-error", type=Allowance(), default="0", show_default=True, metavar="N|FRACTION",
            help="More rows with errors than this make the exit code 3."),
    _option("--fail-fast", is_flag=True, help="Stop as soon as there are more errors than --fail-on-error allows."),
)  # fmt: skip
@_options(
    "Progress",
    _option("--progress", type=click.Choice(["auto", "bar", "plain", "none"]), default="auto", show_default=True,
            help="A live line, or a plain one at intervals; auto asks the terminal."),
    _option("--progress-interval", type=Duration(0.1), default=30.0, show_default=True, metavar="TIME",
            help="Time between plain lines."),
    _option("--json", is_flag=True, help="Records for programs on stdout, one JSON object a line."),
    _option("--github/--no-github", default=None,
            help="Step summary and annotations.  [default: where GitHub Actions runs this]"),
)  # fmt: skip
def run(inputs: tuple[str, ...], resume: bool, **options: Any) -> None:
    """Generate a completion for every row of INPUT (JSONL, plain or .gz/.zst; Parquet; - for stdin).

    A row holds `messages` (a chat), or `prompt` (text or token ids), or whatever --template uses. Interrupt it
    whenever you
    like: the same command goes on where it stopped.
    """
    from cbgen import pipeline

    _check_exclusions(inputs, {"resume": resume, **options})
    sys.exit(pipeline.run(_run_config(inputs, options)))


def _check_exclusions(inputs: tuple[str, ...], options: dict[str, Any]) -> None:
    for first, second in _EXCLUSIONS:
        if options[first] and options[second]:
            raise UsageError(f"{_spelled(first)} and {_spelled(second)} exclude each other")
    if options["output"] == "-":
        for name in _NOT_WITH_STDOUT:
            if options[name]:
                raise UsageError(f"{_spelled(name)} does not go with -o -: give a file with --output")
    if inputs.count("-") > 1:
        raise UsageError("stdin can be read only once: give - once")


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _columns(keep: tuple[str, ...]) -> tuple[str, ...] | None:
    """The columns that --keep names; None when it was not given, and none at all for an empty one."""
    return tuple(column for text in keep for column in text.split(",") if column) if keep else None


def _run_config(inputs: tuple[str, ...], options: dict[str, Any]) -> RunConfig:
    def pick(*names: str) -> dict[str, Any]:
        return {name: options[name] for name in names}

    chat_template = options["chat_template"]
    return RunConfig(
        inputs=inputs,
        output=OutputConfig(
            path=options["output"],
            keep=_columns(options["keep"]),
            **pick("format", "rows_per_part", "state_dir", "overwrite", "retry_errors"),
            **pick("append_message", "source", "token_ids", "result_prefix"),
        ),
        model=ModelConfig(name=options["model"], **pick("revision", "dtype", "device", "trust_remote_code")),
        prompt=PromptConfig(
            template=_text_or_file(options["template"], "--template"),
            chat_template=_file_text(chat_template, "--chat-template") if chat_template else None,
            **pick("prompt_column", "messages_column", "system", "chat_template_kwargs", "continue_final_message"),
            **pick("on_too_long"),
        ),
        engine=EngineConfig(
            **pick("batching", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory")
        ),
        sampling={name: options[name] for name in PARAM_NAMES if options[name] not in (None, ())},
        limit=options["limit"],
        verify=options["verify"],
        stop=StopConfig(
            max_seconds=options["max_time"],
            grace_seconds=options["grace"],
            **pick("max_output_tokens", "fail_fast", "fail_on_error"),
        ),
        report=ReportConfig(progress_seconds=options["progress_interval"], **pick("progress", "json", "github")),
    )


@cli.command()
@click.option("--slots", type=int, default=4, show_default=True, help="Rows that generate at once.")
@click.option("--step-ms", type=float, default=50.0, show_default=True, help="Duration of one decode step.")
@click.option("--lengths", required=True, help="Output tokens of each row: 100,20,50 or (20,200)*50.")
@click.option("--arrivals", default="0", show_default=True, help="Arrival time of each row in ms, or one for all.")
@click.option("--prompt-lengths", default="1", show_default=True, help="Prompt tokens of each row, or one for all.")
@click.option("--prefill-ms-per-token", type=float, default=0.0, show_default=True, help="What reading a prompt costs.")
@click.option("--svg", type=click.Path(dir_okay=False), help="Draw the slot timelines into this file.")
def simulate(
    slots: int,
    step_ms: float,
    lengths: str,
    arrivals: str,
    prompt_lengths: str,
    prefill_ms_per_token: float,
    svg: str | None,
) -> None:
    """Show what batching does: the real scheduler on a virtual clock, static beside continuous.

    \b
    cbgen simulate --slots 4 --step-ms 50 --lengths 100,20,50,200,30
    cbgen simulate --slots 4 --step-ms 50 --lengths "(20,200)*50"
    """
    from cbgen.bench import simulate as simulation

    try:
        rows = [int(number) for number in simulation.parse_numbers(lengths)]
        workload = simulation.Workload(
            lengths=rows,
            prompt_lengths=[int(number) for number in _spread(simulation.parse_numbers(prompt_lengths), len(rows))],
            arrivals_ms=_spread(simulation.parse_numbers(arrivals), len(rows)),
            slots=slots,
            step_ms=step_ms,
            prefill_ms_per_token=prefill_ms_per_token,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    simulations = simulation.simulate_policies(workload)
    click.echo(simulation.format_report(workload, simulations))
    click.echo()
    click.echo("\n".join(simulation.format_timelines(simulations, slots)))
    if svg:
        try:
            Path(svg).write_text(simulation.render_svg(simulations, slots), "utf-8")
        except OSError as error:
            raise UsageError(f"--svg {svg}: {error.strerror}") from error


def _spread(numbers: list[float], count: int) -> list[float]:
    return numbers * count if len(numbers) == 1 else numbers


def main(arguments: Iterable[str] | None = None) -> None:
    """Entry point: errors become one message on stderr and the exit code of their class."""
    try:
        cli.main(list(arguments) if arguments is not None else None, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except OSError as error:  # a file or disk that failed where no one could say more
        click.echo(f"cbgen: {error}; every committed row is safe, and the same command continues", err=True)
        sys.exit(CbgenError.exit_code)
    except CbgenError as error:
        click.echo(f"cbgen: {error}", err=True)
        sys.exit(error.exit_code)
