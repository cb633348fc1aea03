"""From the start of the process to the first completed row, and to the end of a short job: `make bench-start`.

Beside the command runs a plain transformers script that does the same work (`plain_script.py`); both take turns, each
run in a process of its own. The first row of the command is that of the whole job; the script completes all of its
rows at once, so it gets a job of a single row for it. The ratio is taken pair by pair.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cbgen.engine.gguf import converted
from cbgen.engine.model_files import find_model

TOPICS = ("rain", "bread", "bridges", "sparrows", "maps", "glass", "tides", "clocks", "salt", "moss")
_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds since the process was started."""

    first_row: float
    end: float


def write_prompts(path: Path, num_rows: int) -> Path:
    with path.open("w") as file:
        for index in range(num_rows):
            text = f"Tell me something about {TOPICS[index % len(TOPICS)]}, number {index}."
            file.write(json.dumps({"id": index, "messages": [{"role": "user", "content": text}]}) + "\n")
    return path


def watch(command: list[str], holds_row: Callable[[], bool]) -> Times:
    """Run it to its end, and look out for its first row."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    first_row = None
    while process.poll() is None:
        if first_row is None and holds_row():
            first_row = time.perf_counter() - started
        time.sleep(_POLL_SECONDS)
    end = time.perf_counter() - started
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{process.stderr.read() if process.stderr else ''}")
    return Times(end if first_row is None else first_row, end)


def run_command(source: Path, output: Path, model: Path, max_tokens: int) -> Times:
    """`cbgen run`. A completed row is in the journal, or in the output itself when all before it are."""
    sidecar = Path(f"{output}.cbgen")
    options = ["--model", str(model), "--max-tokens", str(max_tokens), "--temperature", "0"]

    def holds_row() -> bool:
        return any(path.stat().st_size for path in (output, *sidecar.glob("wal-*")) if path.exists())

    return watch([sys.executable, "-m", "cbgen", "run", str(source), "-o", str(output), *options], holds_row)


def run_script(source: Path, output: Path, model: Path, max_tokens: int) -> Times:
    script = Path(__file__).with_name("plain_script.py")
    command = [sys.executable, str(script), str(source), str(output), str(model), str(max_tokens)]
    return watch(command, lambda: output.exists() and output.stat().st_size > 0)


def measure(options: argparse.Namespace, directory: Path, model: Path) -> dict[str, list[float]]:
    """Seconds of every run by what was measured, in the order of the runs."""
    rows = write_prompts(directory / "rows.jsonl", options.rows)
    one = write_prompts(directory / "one.jsonl", 1)
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    for number in range(options.pairs):
        ours = run_command(rows, directory / f"{number}.jsonl", model, options.max_tokens)
        note("first row, cbgen", ours.first_row)
        note("first row, script", run_script(one, directory / f"one-{number}.out", model, options.max_tokens).first_row)
        note("one row, cbgen", run_command(one, directory / f"one-{number}.jsonl", model, options.max_tokens).end)
        note("whole job, cbgen", ours.end)
        note("whole job, script", run_script(rows, directory / f"{number}.out", model, options.max_tokens).end)
    return seconds


def ratios(seconds: dict[str, list[float]], name: str) -> list[float]:
    """Ours over theirs, pair by pair; below 1 is faster."""
    pairs = zip(seconds[f"{name}, cbgen"], seconds[f"{name}, script"], strict=True)
    return [ours / theirs for ours, theirs in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    options = parser.parse_args()
    files = converted(find_model("demo"))  # once, before anything is measured
    with tempfile.TemporaryDirectory() as name:
        seconds = measure(options, Path(name), files.directory)
    compared = {name: ratios(seconds, name) for name in ("first row", "whole job")}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    if options.json:
        facts = {"rows": options.rows, "max_tokens": options.max_tokens, "cores": os.cpu_count(), "versions": versions}
        sys.stdout.write(json.dumps({**facts, "seconds": seconds, "ratios": compared}, indent=1) + "\n")
        return
    sys.stdout.write(
        f"{options.rows} rows of at most {options.max_tokens} tokens, {os.cpu_count()} cores, {versions}\n"
    )
    for name, values in seconds.items():
        low, high = min(values), max(values)
        sys.stdout.write(f"{name:<20} median {statistics.median(values):6.2f} s   {low:.2f} - {high:.2f} s\n")
    for name, values in compared.items():
        low, high = min(values), max(values)
        sys.stdout.write(f"{name:<20} ratio  {statistics.median(values):6.2f}     {low:.2f} - {high:.2f}\n")


if __name__ == "__main__":
    main()
