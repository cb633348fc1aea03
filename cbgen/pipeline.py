"""`run(config)`: rows in, completions out, in order, from wherever the last run stopped. READ THIS FIRST.

    plan (inputs, model files, settings) -> lock and recover the output -> load the model -> generate -> report

Everything that can refuse does so before the model loads and before the output is touched. The loop is `_generate`:
take prompts while there is room, step the engine, put what finished, commit now and then. `engine`, `data` and
`report` do not know each other; they meet here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson

from cbgen import __version__
from cbgen.collection import no_collection, set_apart
from cbgen.config import RunConfig
from cbgen.data.addresses import redact
from cbgen.data.feed import PromptFeed
from cbgen.data.prompts import PromptBuilder
from cbgen.data.readers import input_fraction, read_rows
from cbgen.data.rendering import check_first_rows
from cbgen.engine.model_files import ModelFiles, is_converted
from cbgen.errors import EXIT_OK, EXIT_ROW_ERRORS, CbgenError, RowError, Stopped
from cbgen.job import Job, Serving
from cbgen.output.resume import Start, find_start, verify_output
from cbgen.output.retry import RetryWriter
from cbgen.output.sidecar import Sidecar, named_disk_errors, replace_file
from cbgen.output.state import State
from cbgen.output.writers import OrderedWriter
from cbgen.params import SamplingParams
from cbgen.plan import Plan, make_plan, redacted
from cbgen.records import EngineStats, Row
from cbgen.report.metrics import RunSummary, Timings, summarize
from cbgen.report.reports import Reports
from cbgen.signals import StopSignals
from cbgen.stopping import Stop, StopRules

EngineFactory = Callable[[RunConfig, ModelFiles, Callable[[str], None]], Serving]


def run(config: RunConfig, make_serving: EngineFactory | None = None) -> int:
    """Write one output row per input row, in input order. Returns the exit code.

    Args:
        config: what was asked for.
        make_serving: loads tokenizer and engine, and may say something; tests and benchmarks put something smaller
            here.

    Raises:
        CbgenError: anything that ends the run; its `exit_code` is the command's.
    """
    clock = _Clock()
    with StopSignals() as signals, Reports(config.report, redact) as reports:
        if config.verify:
            reports.verified(verify_output(config))
            return EXIT_OK
        plan = make_plan(config)
        with Sidecar.open(config.output, tuple(source.path for source in plan.sources)) as sidecar, set_apart():
            start = _recover(plan, sidecar, reports)
            is_batch_file = _is_batch_file(plan, sidecar, start)
            rules = StopRules(config.stop, signals, clock.started, start.num_errors)
            ready = None
            if start.has_rows and not rules.check(0, 0):
                with no_collection():
                    ready = _get_ready(plan, reports, make_serving or _load)
            settings = _settings(plan, ready)
            _announce(reports, plan, ready, start)
            sidecar.begin(plan.fingerprint, _details(settings, sidecar, is_batch_file))
            reports.start(settings)
            clock.loaded()
            signals.raise_at_once = False
            session = _Session(plan, sidecar, start, is_batch_file, rules, signals, reports)
            state, job = _write_rows(session, ready)
            summary = _summarize(clock, start, state, job, settings, rules.stop)
            _store_summary(sidecar, summary)
            reports.done(sidecar.output.path, summary)
    return _exit_code(config, state, rules.stop, is_lasting=sidecar.output.is_lasting)


@dataclass(frozen=True, slots=True)
class _Session:
    """What the phases of a run share."""

    plan: Plan
    sidecar: Sidecar
    start: Start
    is_batch_file: bool
    rules: StopRules
    signals: StopSignals
    reports: Reports


# -- the loop ---------------------------------------------------------------------------------------------------------


def _write_rows(session: _Session, ready: _Ready | None) -> tuple[State, Job | None]:
    """Rows to try again, then the rows that follow; the state they end in."""
    plan, sidecar, start, rules = session.plan, session.sidecar, session.start, session.rules
    state = start.state
    record_format = plan.record_format(sidecar.output.encoder, is_batch_file=session.is_batch_file)
    job = None
    if ready is not None:
        job = Job(ready.serving, record_format, _error_teller(session), stops_at_errors=plan.config.stop.fail_fast)
    if start.failed and job is not None and ready is not None:
        with RetryWriter(sidecar, state, start.failed) as retry:
            job.writer = retry
            before = itertools.islice(read_rows(plan.sources), max(start.failed) + 1)
            rows = (row for row in before if row.index in start.failed)
            _feed(session, job, ready.prompt_builder, rows)
            if rules.stop is not None:
                retry.commit()
                return state, job
            state = retry.finish()
    with OrderedWriter(sidecar, state, plan.signatures()) as writer:
        if job is not None and ready is not None and start.head:
            job.writer = writer
            _feed(session, job, ready.prompt_builder, start.rows)
        writer.commit() if rules.stop is not None else writer.finish()
        start.num_recovered = writer.num_recovered - len(start.failed)
        return writer.state, job


def _feed(session: _Session, job: Job, builder: PromptBuilder, rows: Iterator[Row]) -> None:
    """Generate all these rows, unless the run ends early; what is finished is kept whatever happens."""
    with PromptFeed(rows, builder) as feed:
        try:
            _generate(session, job, feed)
        except BaseException:
            with contextlib.suppress(CbgenError):
                job.writer.flush()
            raise
        failure = feed.failure
    if failure is not None:
        job.writer.commit()
        if isinstance(failure, CbgenError):
            raise failure
        what = " ".join(f"{type(failure).__name__}: {failure}".split()).rstrip(":")
        raise CbgenError(
            f"reading and preparing rows failed ({what}); every committed row is safe, and the same command continues"
        ) from failure


def _generate(session: _Session, job: Job, feed: PromptFeed) -> None:
    """Run until every row is finished, or something asks to stop: then rows in flight have a little time left, and
    those that do not end in it are generated again next time.
    """
    engine, rules, signals, clock = job.engine, session.rules, session.signals, time.perf_counter
    is_told = False
    while not (rules.check(engine.stats.num_sampled_tokens, job.num_errors) and _has_ended(job, rules)):
        started = clock()
        if rules.stop is None:
            job.admit(feed)
            engine.stats.admit_seconds += clock() - started
        elif not is_told:
            is_told = True
            session.reports.note(f"stopping ({rules.stop.reason}): {engine.num_running:,} rows in flight may still end")
        engine.more_is_coming = not feed.exhausted
        generations = engine.step() if engine.has_unfinished else []
        if not generations and not engine.has_unfinished and feed.exhausted:
            return
        started = clock()
        for generation in generations:
            job.finish(generation)
        if signals.take_commit_request():
            job.writer.commit()
        job.writer.tick()
        engine.stats.write_seconds += clock() - started
        session.reports.update(lambda: job.snapshot(_fraction(session, job)))
    if not engine.has_unfinished and feed.peek(wait=True) is None and feed.exhausted:
        rules.withdraw()


def _has_ended(job: Job, rules: StopRules) -> bool:
    """Whether nothing is worth waiting for, once the run is to stop."""
    job.engine.stop_admitting()
    return not job.engine.num_running or rules.grace_is_over


def _fraction(session: _Session, job: Job) -> float | None:
    """How much of what was asked for is in the output."""
    state, limit = job.writer.state, session.plan.config.limit
    fraction = input_fraction(session.plan.sources, state.position)
    return fraction if not limit else max(fraction or 0.0, min(1.0, state.rows / limit))


def _error_teller(session: _Session) -> Callable[[Row, RowError], None]:
    """Tells reports of failed rows, by file and line."""
    sources, reports = session.plan.sources, session.reports

    def tell(row: Row, error: RowError) -> None:
        source = sources[row.next_position.file]
        line = None if source.kind == "parquet" else row.next_position.line
        reports.row_failed(source.path, line, error.code, error.message)

    return tell


# -- before the loop --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ready:
    """A loaded model, and what makes prompts for it."""

    serving: Serving
    prompt_builder: PromptBuilder


def _recover(plan: Plan, sidecar: Sidecar, reports: Reports) -> Start:
    """Find the row to begin with; the output is repaired, and knows how to write its form."""
    sidecar.check_fingerprint(plan.fingerprint)
    description = sidecar.details().get("encoder")
    if description is not None:
        sidecar.output.prepare(plan.restored_encoder(description))
    start = find_start(plan.config, plan.sources, sidecar, reports.note)
    if not start.state.rows:
        sidecar.output.prepare(plan.encoder(start.head))
    if not sidecar.is_continued:
        check_first_rows(start.head, plan.config.prompt)
        unknown = plan.unknown_columns(start.head)
        if unknown:
            reports.note(
                f"--keep names {', '.join(map(repr, unknown))}, which none of the first rows has; rows without it "
                "hold null"
            )
    return start


def _is_batch_file(plan: Plan, sidecar: Sidecar, start: Start) -> bool:
    """Whether the input is an OpenAI Batch file; a run that is continued keeps to what it decided on its first rows."""
    decided = sidecar.details().get("is_batch_file")
    return plan.is_batch_file(start.head) if decided is None else bool(decided)


def _get_ready(plan: Plan, reports: Reports, make_serving: EngineFactory) -> _Ready:
    """Load the model, and check everything that needs it, while the output is still untouched."""
    once = "" if is_converted(plan.files) else " (converted once and kept; this takes half a minute)"
    reports.note(f"loading {plan.files.description}{once}")
    serving = make_serving(plan.config, plan.files, reports.note)
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


def _load(config: RunConfig, files: ModelFiles, note: Callable[[str], None]) -> Serving:
    # The only place that imports torch: everything before it, and `cbgen --help`, stays fast and works without it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would take the engine's cores
    from cbgen.engine.cpu_settings import apply_cpu_settings
    from cbgen.engine.engine import Engine
    from cbgen.engine.loader import choose_device, load_model, load_tokenizer
    from cbgen.engine.preparation import prepare

    apply_cpu_settings()
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
    loaded = prepare(loaded, config.engine.disabled, note)
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


def _settings(plan: Plan, ready: _Ready | None) -> dict[str, Any]:
    """Settings in force: requested ones, with what was resolved from model and device on top; no credentials."""
    settings = plan.settings()
    if ready is not None:
        settings["engine"] |= ready.serving.engine.describe()
    return dict(redacted(settings))


def _details(settings: dict[str, Any], sidecar: Sidecar, is_batch_file: bool) -> dict[str, Any]:
    """What run.json keeps beside the fingerprint."""
    encoder = sidecar.output.encoder.describe()
    return {"settings": settings, "versions": _versions(), "encoder": encoder, "is_batch_file": is_batch_file}


def _announce(reports: Reports, plan: Plan, ready: _Ready | None, start: Start) -> None:
    """What is about to happen, in the values in force."""
    if ready is None:
        if not start.has_rows:
            what = "every row of the input is in the output" if start.state.rows else "the input holds no rows"
            what = "--limit is 0" if plan.config.limit == 0 else what
            reports.note(f"nothing to generate: {what}")
        return
    engine = ready.serving.engine
    facts = engine.describe()
    reports.note(
        f"model {plan.files.description}, {facts['dtype']} on {facts['device']}: {facts['max_num_seqs']} slots, "
        f"{facts['max_num_batched_tokens']} tokens a step, context {facts['max_model_len']}, KV cache "
        f"{facts['kv_cache_bytes'] / 1e9:.2f} GB ({facts['batching']} batching)"
    )
    for notice in engine.limits.notices:
        reports.note(notice)
    default = SamplingParams().as_dict()
    shown = {k: v for k, v in plan.params.as_dict().items() if v != default[k] or k in ("temperature", "max_tokens")}
    reports.note("sampling " + ", ".join(f"{name} {value}" for name, value in shown.items()))
    if start.failed:
        reports.note(f"trying {len(start.failed):,} failed rows again")
    if start.state.rows:
        reports.note(f"continuing after row {start.state.rows:,}")


def _summarize(
    clock: _Clock, start: Start, state: State, job: Job | None, settings: dict[str, Any], stop: Stop | None
) -> dict[str, Any]:
    return summarize(
        RunSummary(
            complete=stop is None,
            tally=state.tally,
            resumed_rows=start.num_recovered,
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


def _store_summary(sidecar: Sidecar, summary: dict[str, Any]) -> None:
    with named_disk_errors(sidecar.output):
        replace_file(sidecar.directory / "summary.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2))


def _exit_code(config: RunConfig, state: State, stop: Stop | None, *, is_lasting: bool) -> int:
    """The command's exit code.

    Raises:
        Stopped: the run ended early and can go on.
    """
    if stop is not None:
        message = f"stopped by {stop.reason} after row {state.rows:,}; {_way_on(config, stop, is_lasting)}"
        raise Stopped(message, exit_code=stop.exit_code)
    allowed = config.stop.fail_on_error.allows(state.tally.num_errors, state.tally.rows)
    return EXIT_OK if allowed else EXIT_ROW_ERRORS


def _way_on(config: RunConfig, stop: Stop, is_lasting: bool) -> str:
    """What to do after a stop."""
    if not is_lasting:
        return "what went to stdout cannot be continued"
    without = " without --overwrite" if config.output.overwrite else ""
    if stop.exit_code == EXIT_ROW_ERRORS:
        return f"to continue, mend what failed and use --retry-errors{without}, or leave --fail-fast out"
    return f"the same command{without} continues"


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
