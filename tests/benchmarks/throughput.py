"""Rows per second of everything but the model, on one core: `make bench-rows`.

A million rows go through an engine that answers at once, so what is measured is reading, rendering, the journal and
the writer; beside it a run of few rows, for the memory that rows leave behind. Each run is a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen import pipeline
from cbgen.config import ModelConfig, OutputConfig, ReportConfig, RunConfig
from cbgen.data.feed import PromptFeed
from cbgen.job import Serving
from cbgen.records import Generation
from tests.fakes import FakeEngine

FORMS = ("jsonl:jsonl", "parquet:jsonl", "jsonl:parquet", "parquet:parquet")
_SLOTS = 256
_SHOWN = 25
_CHUNK_ROWS = 50_000


class InstantTokenizer:
    """Every text is three tokens; every token is the same word."""

    bos_token_id = None
    eos_token_id = 2
    chat_template = None
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __call__(self, text: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[3, 4, 5]] * len(text)}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return " word" * len(token_ids)


class InstantEngine(FakeEngine):
    """Every row ends in the next step, in order."""

    def __init__(self) -> None:
        super().__init__(lambda *_: ([], "stop"), vocab_size=10, slots=_SLOTS)
        self._ended: list[Generation] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._ended)

    @property
    def wants_more(self) -> bool:
        return len(self._ended) < _SLOTS

    def add(self, index: int, *_: Any, **__: Any) -> None:
        self._ended.append(Generation(index, [6, 7, 8, 2], "stop"))

    def step(self) -> list[Generation]:
        ended, self._ended = self._ended, []
        return ended


# -- one run, in a process of its own ---------------------------------------------------------------------------------


def run_once(source: Path, output: Path, *, profile: bool) -> None:
    """Run, and print the measured numbers as JSON; with `profile` also where the time went."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    model = source.parent / "model"
    config = RunConfig(
        inputs=(str(source),),
        output=OutputConfig(path=str(output), overwrite=True),
        model=ModelConfig(name=str(model)),
        report=ReportConfig(progress="none"),
    )
    before = time.process_time()
    with profiled() if profile else contextlib.nullcontext():
        pipeline.run(config, lambda *_: Serving(InstantTokenizer(), InstantEngine()))
    summary = json.loads(Path(f"{output}.cbgen/summary.json").read_text())
    cpu = time.process_time() - before
    measured = {"rows": summary["rows_ok"], "seconds": summary["generate_seconds"], "cpu": cpu}
    sys.stdout.write(json.dumps({**measured, "mb": summary["peak_memory_bytes"] / 1e6}) + "\n")


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """List functions by the processor time they take in the main and in the feed thread; makes the run far slower."""
    profiles = {name: cProfile.Profile(time.thread_time) for name in ("main thread", "feed thread")}
    work = PromptFeed._work

    def profiled_work(*arguments: Any) -> None:
        profiles["feed thread"].runcall(work, *arguments)

    with mock.patch.object(PromptFeed, "_work", profiled_work), profiles["main thread"]:
        yield
    for name, profile in profiles.items():
        sys.stderr.write(f"\n{name}\n")
        pstats.Stats(profile, stream=sys.stderr).strip_dirs().sort_stats("tottime").print_stats(_SHOWN)


# -- all runs ---------------------------------------------------------------------------------------------------------


def write_inputs(directory: Path, num_rows: int) -> dict[str, Path]:
    """The same rows as JSONL and as Parquet."""
    paths = {kind: directory / f"{num_rows}.{kind}" for kind in ("jsonl", "parquet")}
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("score", pa.float64())])
    with paths["jsonl"].open("w") as lines, pq.ParquetWriter(paths["parquet"], schema) as table:
        for start in range(0, num_rows, _CHUNK_ROWS):
            rows = [
                {"id": index, "prompt": f"Describe item {index} in a sentence or two.", "score": index / 7}
                for index in range(start, min(start + _CHUNK_ROWS, num_rows))
            ]
            lines.writelines(json.dumps(row) + "\n" for row in rows)
            table.write_table(pa.Table.from_pylist(rows, schema))
    return paths


def measure(source: Path, output: Path, *, profile: bool) -> dict[str, float]:
    """A run in a process of its own, and what it measured."""
    command = [sys.executable, "-m", "tests.benchmarks.throughput", "--one", str(source), str(output)]
    process = subprocess.run(
        [*command, *(["--profile"] if profile else [])],
        stdout=subprocess.PIPE,
        stderr=None if profile else subprocess.PIPE,
        text=True,
    )
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{process.stderr or ''}")
    result: dict[str, float] = json.loads(process.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--few", type=int, default=10_000, help="rows of the run to compare memory with")
    parser.add_argument("--form", action="append", choices=FORMS, help="input and output; all of them by default")
    parser.add_argument("--profile", action="store_true", help="print where the time goes; better with fewer rows")
    parser.add_argument("--one", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_once(*options.one, profile=options.profile)
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "model").mkdir()
        (directory / "model" / "config.json").write_text("{}")
        few, many = write_inputs(directory, options.few), write_inputs(directory, options.rows)
        for form in options.form or FORMS:
            source, target = form.split(":")
            output = directory / f"out.{target}"
            small = measure(few[source], output, profile=False)
            started = time.monotonic()
            large = measure(many[source], output, profile=options.profile)
            assert large["rows"] == options.rows
            sys.stdout.write(
                f"{source:7} to {target:7}  {large['rows'] / large['seconds']:9,.0f} rows/s  "
                f"({large['rows'] / large['cpu']:,.0f} per second of processor time)  "
                f"{large['mb']:5.0f} MB ({small['mb']:.0f} MB at {options.few:,} rows)  "
                f"{time.monotonic() - started:.0f} s in all\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
