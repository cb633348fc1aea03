"""`run(config)`: rows in, completions out, in order, from wherever the last run stopped. READ THIS FIRST.

    plan (inputs, model files, settings) -> lock and recover the output -> load the model -> generate -> report

Everything that can refuse does so before the model loads and before the output is touched. The loop is `_generate`:
take prompts while there is room, step the engine, put what finished, commit now and then. `engine`, `data` and
`report` do not know each other; they meet here.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson

from cbgen import __version__
from cbgen.config import RunConfig
from cbgen.data.feed import PromptFeed
from cbgen.data.prompts import PromptBuilder, compile_template
from cbgen.data.readers import Source, check_inputs, input_fraction
from cbgen.data.resume import Start, find_start
from cbgen.data.sidecar import Sidecar, replace_file
from cbgen.data.writers import OrderedWriter
from cbgen.engine.model_files import ModelFiles, find_model, is_converted, model_identity, sampling_defaults
from cbgen.errors import EXIT_OK, EXIT_ROW_ERRORS, Stopped, UsageError
from cbgen.job import Job, Serving
from cbgen.params import SamplingParams, merge_params
from cbgen.records import EngineStats
from cbgen.report.metrics import RunSummary, Timings, format_summary, summarize
from cbgen.report.progress import Progress
from cbgen.signals import StopSignals

EngineFactory = Callable[[RunConfig, ModelFiles], Serving]


def run(config: RunConfig, make_serving: EngineFactory | None = None) -> int:
    """Write one output row per input row, in input order. Returns the exit code.

    Args:
        config: what was asked for.
        make_serving: loads tokenizer and engine; tests and benchmarks put something smaller here.

    Raises:
        CbgenError: anything that ends the run; its `exit_code` is the command's.
    """
    clock = _Clock()
    with StopSignals() as signals, Progress(config.report.progress_seconds) as progress:
        plan = _plan(config)
        with Sidecar.open(config.output, config.inputs) as sidecar:
            sidecar.check_fingerprint(plan.fingerprint)
            start = find_start(config, plan.sources, sidecar, progress.note)
            ready = _get_ready(plan, progress, make_serving or _load) if start.has_rows else None
            settings = _settings(plan, ready)
            _announce(progress, plan, ready, start)
            sidecar.begin(plan.fingerprint, {"settings": settings, "versions": _versions()})
            clock.loaded()
            with OrderedWriter(sidecar, start.state, plan.signatures()) as writer:
                job = (
                    Job(ready.serving, ready.prompt_builder, writer, config.output, plan.files.description)
                    if ready
                    else None
                )
                signals.raise_at_once = False
                if job:
                    with PromptFeed(start.rows, job.prompt_builder) as feed:
                        _generate(job, plan, feed, progress, signals)
                    if feed.failure is not None:
                        writer.commit()
                        raise feed.failure
                writer.commit() if signals.requested else writer.finish()
            summary = _summarize(clock, start, writer, job, settings, complete=not signals.requested)
            replace_file(sidecar.directory / "summary.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2))
            progress.note(f"{config.output.path}\n{format_summary(summary)}")
    if signals.requested:
        again = "the same command without --overwrite" if config.output.overwrite else "the same command"
        raise Stopped(f"stopped by {signals.requested}; {again} continues after row {writer.state.rows:,}")
    return EXIT_ROW_ERRORS if writer.state.tally.num_errors else EXIT_OK


# -- the loop ---------------------------------------------------------------------------------------------------------


def _generate(job: Job, plan: _Plan, feed: PromptFeed, progress: Progress, signals: StopSignals) -> None:
    """Run until every row is finished, or a signal asks to stop; rows in flight are then generated again next time."""
    engine, writer = job.engine, job.writer
    while not signals.requested:
        job.admit(feed)
        engine.more_is_coming = not feed.exhausted
        if engine.has_unfinished:
            for generation in engine.step():
                job.finish(generation)
        elif feed.exhausted:
            return
        writer.tick()
        if progress.is_due():
            progress.update(job.snapshot(input_fraction(plan.sources, writer.state.position)))


def _start_job(plan: _Plan, ready: _Ready, writer: OrderedWriter) -> Job:
    return Job(ready.serving, ready.prompt_builder, writer, plan.config.output, plan.files.description)


# -- before the loop --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """A run's resolved facts, before the model is loaded."""

    config: RunConfig
    sources: list[Source]
    files: ModelFiles
    params: SamplingParams
    fingerprint: dict[str, Any]

    def signatures(self) -> list[Any]:
        return [source.signature() for source in self.sources]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A loaded model, and what stands between it and rows of text."""

    serving: Serving
    prompt_builder: PromptBuilder


def _plan(config: RunConfig) -> _Plan:
    sources = check_inputs(config.inputs)
    if config.prompt.template is not None:
        compile_template(config.prompt.template)
    files = find_model(config.model.name, config.model.revision)
    params = resolve_params(config.sampling, sampling_defaults(files))
    return _Plan(config, sources, files, params, _fingerprint(config, params, files))


def resolve_params(given: dict[str, Any], model_defaults: dict[str, Any]) -> SamplingParams:
    """The run's sampling parameters: what was given, over what the model asks for, over our defaults.

    Raises:
        UsageError: a value is out of range.
    """
    try:
        return merge_params(SamplingParams(), {**model_defaults, **given})
    except ValueError as error:
        raise UsageError(str(error)) from error


def _fingerprint(config: RunConfig, params: SamplingParams, files: ModelFiles) -> dict[str, Any]:
    """Every setting that decides what the output is. What only decides how fast it comes, is not in it."""
    fields = {"model": model_identity(files), "dtype": config.model.dtype, "max_model_len": config.engine.max_model_len}
    fields |= {f"prompt.{name}": value for name, value in asdict(config.prompt).items()}
    fields |= {f"sampling.{name}": value for name, value in params.as_dict().items()}
    return fields | {
        "output.token_ids": config.output.token_ids,
        "output.result_prefix": config.output.result_prefix,
    }


def _get_ready(plan: _Plan, progress: Progress, make_serving: EngineFactory) -> _Ready:
    """Load the model, and check everything that needs it, while the output is still untouched."""
    once = "" if is_converted(plan.files) else " (converted once and kept; this takes half a minute)"
    progress.note(f"loading {plan.files.description}{once}")
    serving = make_serving(plan.config, plan.files)
    engine = serving.engine
    builder = PromptBuilder(
        serving.tokenizer,
        plan.config.prompt,
        plan.params,
        engine.limits.max_model_len,
        engine.vocab_size,
        plan.config.output.result_fields,
    )
    return _Ready(serving, builder)


def _load(config: RunConfig, files: ModelFiles) -> Serving:
    # The only place that imports torch: everything before it, and `cbgen --help`, stays fast and works without it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would take the engine's cores
    from cbgen.engine.engine import Engine
    from cbgen.engine.loader import choose_device, load_model, load_tokenizer

    model = config.model
    device = choose_device(model.device)
    tokenizer = load_tokenizer(files, trust_remote_code=model.trust_remote_code)
    loaded = load_model(
        files,
        dtype=model.dtype,
        device=device,
        trust_remote_code=model.trust_remote_code,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Serving(tokenizer, Engine(loaded, config.engine))


# -- after the loop ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Clock:
    """Wall-clock marks of a run."""

    started: float = field(default_factory=time.monotonic)
    loaded_at: float = 0.0

    def loaded(self) -> None:
        self.loaded_at = time.monotonic()

    def timings(self) -> Timings:
        now = time.monotonic()
        return Timings(load=self.loaded_at - self.started, generate=now - self.loaded_at, total=now - self.started)


def _settings(plan: _Plan, ready: _Ready | None) -> dict[str, Any]:
    """Settings in force: requested ones, with what was resolved from model and device on top."""
    config = plan.config
    settings: dict[str, Any] = {
        "inputs": list(config.inputs),
        "output": config.output.path,
        "limit": config.limit,
        "model": {**asdict(config.model), "path": str(plan.files.directory)},
        "prompt": asdict(config.prompt),
        "sampling": plan.params.as_dict(),
        "engine": asdict(config.engine),
    }
    if ready is not None:
        settings["engine"] |= ready.serving.engine.describe()
    return settings


def _announce(progress: Progress, plan: _Plan, ready: _Ready | None, start: Start) -> None:
    """What is about to happen, in the values in force."""
    if ready is None:
        progress.note("nothing to generate: every row of the input is in the output")
        return
    facts = ready.serving.engine.describe()
    progress.note(
        f"model {plan.files.description}, {facts['dtype']} on {facts['device']}: {facts['max_num_seqs']} slots, "
        f"{facts['max_num_batched_tokens']} tokens a step, context {facts['max_model_len']}, KV cache "
        f"{facts['kv_cache_bytes'] / 1e9:.2f} GB ({facts['batching']} batching)"
    )
    for notice in ready.serving.engine.limits.notices:
        progress.note(notice)
    default = SamplingParams()
    shown = {
        k: v for k, v in plan.params.as_dict().items() if v != getattr(default, k) or k in ("temperature", "max_tokens")
    }
    progress.note("sampling " + ", ".join(f"{name} {value}" for name, value in shown.items()))
    if start.state.rows:
        progress.note(f"continuing after row {start.state.rows:,}")


def _summarize(
    clock: _Clock, start: Start, writer: OrderedWriter, job: Job | None, settings: dict[str, Any], *, complete: bool
) -> dict[str, Any]:
    return summarize(
        RunSummary(
            complete=complete,
            tally=writer.state.tally,
            resumed_rows=writer.num_recovered,
            prompt_tokens=job.num_prompt_tokens if job else 0,
            completion_tokens=job.num_completion_tokens if job else 0,
            timings=clock.timings(),
            stats=job.engine.stats if job else EngineStats(),
            slots=job.engine.limits.max_num_seqs if job else 0,
            peak_memory_bytes=_peak_memory(),
            peak_device_memory_bytes=job.engine.peak_device_memory if job else 0,
            settings=settings,
            versions=_versions(),
        )
    )


def _peak_memory() -> int:
    """Bytes the process held at most; the system call counts in KiB on Linux and in bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _versions() -> dict[str, str]:
    versions = {"cbgen": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "pyarrow"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
