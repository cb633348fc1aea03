"""The command line: options to a config, a call, an exit code. No logic, and no heavy import before it is needed.

Precedence: flag > `CBGEN_*` environment variable > `--config` file > default. stdout carries data only.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from cbgen import __version__
from cbgen.collection import skip_last_collection
from cbgen.config import (
    OPTIMIZATIONS,
    EngineConfig,
    ModelConfig,
    OutputConfig,
    PromptConfig,
    ReportConfig,
    RunConfig,
    StopConfig,
)
from cbgen.errors import EXIT_OK, EXIT_SECOND_SIGNAL, CbgenError, Stopped, UsageError
from cbgen.options import (
    Allowance,
    Duration,
    GroupedCommand,
    JsonObject,
    Size,
    format_values,
    option,
    options,
    read_config,
    read_text,
)
from cbgen.params import DEFAULT_MAX_TOKENS, PARAM_NAMES

Number = TypeVar("Number", int, float)
_EXCLUSIONS = (
    ("resume", "overwrite"),
    ("retry_errors", "overwrite"),
    ("verify", "overwrite"),
    ("verify", "retry_errors"),
)
_MARKS_OF_SECRETS = ("://", "hf_", "sk-", "AKIA")
_NOT_WITH_STDOUT = ("json", "verify", "retry_errors", "overwrite")


def _text_or_file(value: str | None, option: str) -> str | None:
    """A value given directly, or as @FILE: then without the line end that editors put at the end of a file."""
    if value is None or not value.startswith("@"):
        return value
    text = _file_text(value[1:], option)
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def _file_text(path: str, option: str) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{option}: cannot read {path}: {getattr(error, 'strerror', error)}") from error


# -- commands ---------------------------------------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="cbgen %(version)s")
def cli() -> None:
    """Offline batch generation with LLMs: one completion per input row, in input order, resumable."""


@cli.command(cls=GroupedCommand, short_help="Generate a completion for every row of the input.")
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@options(
    "Output",
    option("-o", "--output", metavar="FILE|DIR|URI|-",
            help="A file, a directory of parts, the URI of one, or - for stdout; run again to continue.  [required]"),
    option("--format", type=click.Choice(["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]),
            help="Form of the file or the parts.  [default: by the name, and jsonl in a directory]"),
    option("--rows-per-part", type=click.IntRange(min=1), default=10_000, show_default=True,
            help="Rows in each part of a directory."),
    option("--state-dir", metavar="DIR", help="Where the state of the run is kept.  [default: beside the output]"),
    option("--overwrite", is_flag=True, help="Start anew; an existing file is kept as a backup."),
    option("--resume", is_flag=True, help="Continue an unfinished output. This is the default anyway."),
    option("--retry-errors", is_flag=True, help="Generate the rows again that are errors in the output."),
    option("--verify", is_flag=True, help="Only compare the output with its state, and generate nothing."),
    option("--keep", multiple=True, metavar="COLUMN,...",
            help="Carry only these columns through; repeatable.  [default: all]"),
    option("--append-message", is_flag=True, help="Add the answer to the row's messages."),
    option("--source", is_flag=True, help="Add the file and line each row came from."),
    option("--token-ids", is_flag=True, help="Add the generated token ids to each record."),
    option("--result-prefix", default="", help="Put this before the names of result fields."),
)  # fmt: skip
@options(
    "Input",
    option("--limit", type=click.IntRange(min=0), help="Only the first N rows."),
    option("--config", is_eager=True, expose_value=False, callback=read_config, metavar="FILE",
            help="YAML or TOML file with values for any of these options."),
    option("--print-config", is_flag=True, help="Show each option's value and where it came from, and exit."),
)  # fmt: skip
@options(
    "Model",
    option("--model", default="demo", show_default=True, metavar="demo|DIR|HUB_ID|FILE.gguf", help="What generates."),
    option("--revision", help="Branch, tag or commit of a hub model."),
    option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True,
            help="Weights and arithmetic; auto is the checkpoint's own."),
    option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:N]", help="Where it runs."),
    option("--trust-remote-code", is_flag=True, help="Run Python code that ships with the model."),
)  # fmt: skip
@options(
    "Prompts",
    option("--template", metavar="TEXT|@FILE",
            help="Jinja template over the row's columns; one line end at the end of FILE is dropped."),
    option("--prompt-column", default="prompt", show_default=True, help="Column with text or token ids."),
    option("--messages-column", default="messages", show_default=True, help="Column with a chat."),
    option("--system", help="System message for chats that have none."),
    option("--chat-template", metavar="FILE",
            help="Chat template instead of the tokenizer's own; one line end at the end is dropped here, too."),
    option("--chat-template-kwargs", type=JsonObject(), default={}, help="Extra variables for the chat template."),
    option("--continue-final-message", is_flag=True, help="Continue the last message instead of answering it."),
    option("--on-too-long", type=click.Choice(["error", "truncate-left"]), default="error", show_default=True,
            help="A prompt longer than the context."),
)  # fmt: skip
@options(
    "Sampling (defaults come from the model's generation_config.json; rows may override)",
    option("--n", type=int, help="Completions of each row.  [default: 1]"),
    option("--max-tokens", type=int, help=f"Most tokens to generate for a row.  [default: {DEFAULT_MAX_TOKENS}]"),
    option("--min-tokens", type=int, help="No stop before so many tokens."),
    option("--temperature", type=float, help="0 is greedy."),
    option("--top-k", type=int, help="Sample among the K likeliest tokens; 0 or -1 is off."),
    option("--top-p", type=float, help="Sample among the likeliest tokens that reach this mass."),
    option("--min-p", type=float, help="Drop tokens less likely than this share of the likeliest."),
    option("--repetition-penalty", type=float, help="Above 1 discourages tokens seen before."),
    option("--seed", type=int, help="Same seed, same draws, whatever the batch.  [default: 0]"),
    option("--stop", multiple=True, help="Stop at this text; may be given more than once."),
    option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="Stop at this token id; repeatable."),
    option("--logit-bias", type=JsonObject(), help="Token ids, and what is added to their logits (-100 to 100)."),
    option("--include-stop", is_flag=True, default=None, help="Keep the stop string in the text."),
    option("--ignore-eos", is_flag=True, default=None, help="Do not stop at end-of-sequence tokens."),
    option("--skip-special-tokens/--keep-special-tokens", default=None, help="Special tokens in the text."),
)
@options(
    "Engine",
    option("--batching", type=click.Choice(["continuous", "static"]), default="continuous", show_default=True,
            help="static waits for the longest row of each batch; the baseline to compare with."),
    option("--order", type=click.Choice(["auto", "file", "longest"]), default="auto", show_default=True,
            help="Which rows begin first: in input order, or those that will likely run longest. Output keeps its "
            "order."),
    option("--disable", multiple=True, metavar="NAME,...",
            help=f"Do without some of: {', '.join(OPTIMIZATIONS)}."),
    option("--max-num-seqs", type=int, help="Slots: rows that generate at once.  [default: by device]"),
    option("--max-num-batched-tokens", type=int, help="Token budget of a step.  [default: by device]"),
    option("--max-model-len", type=int, help="Longest prompt plus output.  [default: the model's context]"),
    option("--kv-cache-memory", type=Size(), help="Bytes for the KV cache, such as 2G.  [default: by free memory]"),
    option("--decode-steps", type=int, metavar="K",
            help="Decode steps launched before the host has seen what came of them; 0 waits for each.  "
            "[default: by device]"),
)  # fmt: skip
@options(
    "Stopping",
    option("--max-time", type=Duration(), metavar="TIME",
            help="Stop after so long, loading included: seconds, or 90s, 30m, 2h, 1d. Run again to continue."),
    option("--max-output-tokens", type=click.IntRange(min=1), help="Stop when this run generated so many tokens."),
    option("--grace", type=Duration(), default=5.0, show_default=True, metavar="TIME",
            help="How long rows in flight may still finish at a stop."),
    option("--fail-on-error", type=Allowance(), default="0", show_default=True, metavar="N|FRACTION",
            help="More rows with errors than this make the exit code 3."),
    option("--fail-fast", is_flag=True, help="Stop as soon as there are more errors than --fail-on-error allows."),
)  # fmt: skip
@options(
    "Progress",
    option("--progress", type=click.Choice(["auto", "bar", "plain", "none"]), default="auto", show_default=True,
            help="A live line, or a plain one at intervals; auto asks the terminal."),
    option("--progress-interval", type=Duration(0.1), default=30.0, show_default=True, metavar="TIME",
            help="Time between plain lines."),
    option("--json", is_flag=True, help="Records for programs on stdout, one JSON object a line."),
    option("--github/--no-github", default=None,
            help="Step summary and annotations.  [default: where GitHub Actions runs this]"),
)  # fmt: skip
@click.pass_context
def run(ctx: click.Context, /, inputs: tuple[str, ...], print_config: bool, **values: Any) -> None:
    """Generate a completion for every row of INPUT: JSONL (plain, .gz, .zst), Parquet, directories, URIs, - for stdin.

    A row holds `messages` (a chat), or `prompt` (text or token ids), or whatever --template uses. Interrupt it
    whenever you like: the same command goes on where it stopped.
    """
    if print_config:
        click.echo(_redacted(format_values(ctx, leave_out=("print_config",))))
        return
    for param in ctx.command.params:
        if param.name in ("inputs", "output") and not ctx.params[param.name]:
            raise click.MissingParameter(ctx=ctx, param=param)
    with _failures_reported(values):
        _check_exclusions(inputs, values)
        config = _run_config(inputs, values)
        from cbgen import pipeline

        sys.exit(pipeline.run(config))


@contextlib.contextmanager
def _failures_reported(values: dict[str, Any]) -> Iterator[None]:
    """What ends the run early is also told to the programs that listen: --json and GitHub."""
    try:
        yield
    except Exception as error:
        from cbgen.report import github
        from cbgen.report.records import JsonRecords

        failure = _as_failure(error)
        if values["json"] and values["output"] != "-":
            JsonRecords().error(failure.exit_code, _redacted(str(failure)))
        if github.runs_here(values["github"]):
            level: github.Level = "warning" if isinstance(failure, Stopped) else "error"
            github.GitHubReport(_complain, redact=_redacted).fail(str(failure), level)
        if failure is error:
            raise
        raise failure from error


def _as_failure(error: Exception) -> CbgenError:
    """What people are told of an error: in one sentence whatever it is, and for a fault of ours where it happened."""
    if isinstance(error, CbgenError):
        return error
    if isinstance(error, OSError):  # a file or disk that failed where no one could say more
        what = str(error)
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        what = f"internal fault ({type(error).__name__}: {text[:300]}; {Path(frame.filename).name} line {frame.lineno})"
    return CbgenError(f"{what}; every committed row is safe, and the same command continues")


def _check_exclusions(inputs: tuple[str, ...], values: dict[str, Any]) -> None:
    for first, second in _EXCLUSIONS:
        if values[first] and values[second]:
            raise UsageError(f"{_spelled(first)} and {_spelled(second)} exclude each other")
    if values["output"] == "-":
        for name in _NOT_WITH_STDOUT:
            if values[name]:
                raise UsageError(f"{_spelled(name)} does not go with -o -: give a file with --output")
    if inputs.count("-") > 1:
        raise UsageError("stdin can be read only once: give - once")


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _names(values: tuple[str, ...]) -> tuple[str, ...]:
    """What an option that takes `a,b` and may be given more than once names in all."""
    return tuple(name for text in values for name in text.split(",") if name)


def _run_config(inputs: tuple[str, ...], values: dict[str, Any]) -> RunConfig:
    def pick(*names: str) -> dict[str, Any]:
        return {name: values[name] for name in names}

    chat_template = values["chat_template"]
    return RunConfig(
        inputs=inputs,
        output=OutputConfig(
            path=values["output"],
            keep=_names(values["keep"]) if values["keep"] else None,
            **pick("format", "rows_per_part", "state_dir", "overwrite", "retry_errors"),
            **pick("append_message", "messages_column", "source", "token_ids", "result_prefix"),
        ),
        model=ModelConfig(name=values["model"], **pick("revision", "dtype", "device", "trust_remote_code")),
        prompt=PromptConfig(
            template=_text_or_file(values["template"], "--template"),
            chat_template=_file_text(chat_template, "--chat-template") if chat_template else None,
            **pick("prompt_column", "messages_column", "system", "chat_template_kwargs", "continue_final_message"),
            **pick("on_too_long"),
        ),
        engine=EngineConfig(
            disabled=frozenset(_names(values["disable"])),
            **pick("batching", "order"),
            **pick("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory"),
            **pick("decode_steps"),
        ),
        sampling={name: values[name] for name in PARAM_NAMES if values.get(name) not in (None, ())},
        limit=values["limit"],
        verify=values["verify"],
        stop=StopConfig(
            max_seconds=values["max_time"],
            grace_seconds=values["grace"],
            **pick("max_output_tokens", "fail_fast", "fail_on_error"),
        ),
        report=ReportConfig(progress_seconds=values["progress_interval"], **pick("progress", "json", "github")),
    )


@cli.command(short_help="Show what batching does: static beside continuous.")
@click.option("--slots", type=int, default=4, show_default=True, help="Rows that generate at once.")
@click.option("--step-ms", type=float, default=50.0, show_default=True, help="Duration of one decode step.")
@click.option("--row-ms", type=float, default=0.0, show_default=True, help="What each row adds to a step.")
@click.option("--lengths", required=True, help="Output tokens of each row: 100,20,50 or (20,200)*50.")
@click.option("--arrivals", default="0", show_default=True, help="Arrival time of each row in ms, or one for all.")
@click.option("--prompt-lengths", default="1", show_default=True, help="Prompt tokens of each row, or one for all.")
@click.option("--prefill-ms-per-token", type=float, default=0.0, show_default=True, help="What reading a prompt costs.")
@click.option("--svg", type=click.Path(dir_okay=False), help="Draw the slot timelines into this file.")
def simulate(
    slots: int,
    step_ms: float,
    row_ms: float,
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
        rows = simulation.parse_whole_numbers(lengths)
        workload = simulation.Workload(
            lengths=rows,
            prompt_lengths=_spread(simulation.parse_whole_numbers(prompt_lengths, "--prompt-lengths"), len(rows)),
            arrivals_ms=_spread(simulation.parse_numbers(arrivals, "--arrivals"), len(rows)),
            slots=slots,
            step_ms=step_ms,
            prefill_ms_per_token=prefill_ms_per_token,
            row_ms=row_ms,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    simulations = simulation.simulate_policies(workload)
    click.echo(simulation.format_report(workload, simulations))
    click.echo()
    click.echo("\n".join(simulation.format_timelines(simulations, slots)))
    if svg:
        _write("--svg", svg, simulation.render_svg(simulations, slots))


@cli.command(short_help="Compare engines on the same work, beside what this machine could do.")
@click.option(
    "--engines",
    default="cbgen,cbgen-static,hf-generate,hf-cb,openvino,vllm",
    show_default=True,
    help="In turn: a name, or NAME:KEY=VALUE,... such as cbgen:order=file or vllm:max_num_seqs=128.",
)
@click.option("--ablations", is_flag=True, help="Also this engine with each optimization switched off.")
@click.option(
    "--workload",
    type=click.Choice(["W1", "W2", "W3", "W4", "W5", "W6"]),
    default="W1",
    show_default=True,
    help="Ragged chats, shared prefixes, a long tail, scores, 100 to 1,024 tokens, 256 tokens.",
)
@click.option(
    "--scale",
    type=click.Choice(["small", "full"]),
    default="small",
    show_default=True,
    help="Lengths and rows for a few CPU cores, or for a GPU.",
)
@click.option("--rows", type=click.IntRange(min=1), help="Rows of the workload.  [default: by workload and scale]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of lengths and texts.")
@click.option("--model", default="demo", show_default=True, metavar="demo|DIR|HUB_ID", help="What generates.")
@click.option("--shape", type=click.Choice(["0.6b", "tiny"]), help="Random weights of this size instead of a model.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="bfloat16",
    show_default=True,
    help="Weights and arithmetic of every engine.",
)
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:N]", help="Where it runs.")
@click.option("--slots", type=click.IntRange(min=1), help="Rows at once in this engine.  [default: its own]")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of each engine.")
@click.option(
    "--peer-python", multiple=True, metavar="NAME=PATH", help="The interpreter that has an engine; repeatable."
)
@click.option(
    "--time-limit",
    type=Duration(1.0),
    default=1800.0,
    show_default=True,
    metavar="TIME",
    help="For one run, loading included.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write everything measured to this file.")
@click.option("--svg", type=click.Path(dir_okay=False), help="Draw the speeds into this file.")
def bench(
    engines: str, ablations: bool, peer_python: tuple[str, ...], json_file: str | None, svg: str | None, **values: Any
) -> None:
    """Compare this engine, its own static mode and other engines on identical work: lengths are forced.

    \b
    cbgen bench --engines cbgen,vllm --peer-python vllm=venvs/vllm/bin/python
    cbgen bench --workload W3 --dtype float32 --engines cbgen:order=longest,cbgen:order=file
    """
    from cbgen.bench import compare, comparison, document, report
    from cbgen.bench import engines as known

    try:
        chosen = known.parse_engines(engines)
        pythons = dict(_peer_python(text, known.ENGINES) for text in peer_python)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if ablations:
        given = {engine.name for engine in chosen}
        chosen += [engine for engine in known.ablations(values["device"]) if engine.name not in given]
    for option_, path in (("--json", json_file), ("--svg", svg)):
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"{option_} {path}: no such directory")
    result = compare.compare(comparison.BenchConfig(engines=chosen, pythons=pythons, **values), _note)
    click.echo(report.format_comparison(result))
    if json_file:
        _write("--json", json_file, json.dumps(document.as_document(result), indent=2) + "\n")
    if svg:
        _write("--svg", svg, report.render_svg(result))
    sys.exit(EXIT_OK if result.reference is not None else CbgenError.exit_code)


def _peer_python(text: str, known: Iterable[str]) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if name not in known or not equals or not path:
        raise ValueError(f"--peer-python {text}: write NAME=PATH, NAME one of {', '.join(known)}")
    return name, path


def _note(message: str) -> None:
    from cbgen.report.progress import printable

    with contextlib.suppress(OSError, ValueError):
        click.echo(printable(_redacted(message)), err=True)


def _write(option_: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"{option_} {path}: {error.strerror}") from error


@cli.command(short_help="Look whether this machine is fit to run.")
@click.option("-o", "--output", metavar="FILE|DIR", help="Try writing there instead of in the working directory.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def doctor(output: str | None, as_json: bool) -> None:
    """Look at this machine: packages, torch and driver, memory, disks, model cache, and a write test."""
    from cbgen.doctor import examination

    checks = examination.examine(output)
    text = json.dumps(examination.as_document(checks)) if as_json else examination.format_checks(checks)
    click.echo(_redacted(text))
    sys.exit(examination.EXIT_FAIL if examination.failed(checks) else EXIT_OK)


def _spread(numbers: list[Number], count: int) -> list[Number]:
    return numbers * count if len(numbers) == 1 else numbers


def main(arguments: Iterable[str] | None = None) -> None:
    """Entry point: errors become one message on stderr and the exit code of their class."""
    try:
        _call(arguments)
    except KeyboardInterrupt:  # once more, while people were told of the first one
        sys.exit(EXIT_SECOND_SIGNAL)
    finally:
        _settle(sys.stdout)
        _settle(sys.stderr)
        if arguments is None:  # else the process is not ours, and goes on
            skip_last_collection()


def _call(arguments: Iterable[str] | None) -> None:
    try:
        cli.main(list(arguments) if arguments is not None else None, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"; see `{context.command_path} --help`" if context else ""
        _complain(error.format_message().rstrip(".") + hint)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(EXIT_SECOND_SIGNAL)
    except BrokenPipeError:  # the reader of stdout has gone; it knows
        sys.exit(CbgenError.exit_code)
    except Exception as error:
        failure = _as_failure(error)
        _complain(str(failure))
        sys.exit(failure.exit_code)


def _complain(message: str) -> None:
    from cbgen.report.progress import printable

    with contextlib.suppress(OSError, ValueError):
        click.echo(f"cbgen: {printable(_redacted(message))}", err=True)


def _redacted(text: str) -> str:
    if not any(mark in text for mark in _MARKS_OF_SECRETS):
        return text
    from cbgen.data.addresses import redact

    return redact(text)


def _settle(stream: TextIO | None) -> None:
    """Python's own flush at the end would complain about a broken stream again, and change the exit code."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
