"""Runs stages in processes of their own under one budget of time, and keeps what they find in one JSON document.

Enters: the stages to run and the options of the whole run. Leaves: the document, rewritten after every stage, so that
what is known survives whatever happens next. A stage's processes write one JSON object a line to their stdout:

    {"case": {...}}    one finding; `"ok": false` in it is a wrong answer
    {"facts": {...}}   what holds for the whole stage; later ones replace earlier ones key by key
    {"end": true}      the process did all it had to do
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tests.gpu_check.stages import Stage

REPOSITORY = Path(__file__).resolve().parents[2]
FORM = 1  # of the document; another number when its keys change
LEAST_SECONDS = 20.0  # a stage is not begun with less
_LOG_LINES = 15
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Of the whole run.

    Attributes:
        seconds: budget of all stages together.
        hang: name of a stage that is to sleep instead, to see that it is ended.
        breaks: name of an operator that is to answer wrongly, to see that it is noticed.
    """

    out: Path
    dry: bool = False
    seconds: float = 480.0
    hang: str | None = None
    hang_seconds: float | None = None
    breaks: str | None = None


@dataclass(slots=True)
class StageResult:
    """What became of a stage.

    Attributes:
        status: `ok`; `wrong` where a case is; `failed` where a process ended early; `timeout`; `skipped: no time`.
        error: what the processes last wrote to stderr, where they did not end well.
    """

    name: str
    status: str
    seconds: float = 0.0
    limit_seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    cases: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def run_stages(stages: tuple[Stage, ...], options: RunOptions) -> dict[str, Any]:
    """Run them in order; returns the document, which is in `options.out` too."""
    started = time.monotonic()
    results: list[StageResult] = []
    document: dict[str, Any] = {}
    for stage in stages:
        left = options.seconds - (time.monotonic() - started)
        machine = next((result.facts for result in results if result.name == "machine"), {})
        results.append(_run_stage(stage, options, left, machine))
        document = _document(results, options, time.monotonic() - started)
        _write(document, options.out)
        result = results[-1]
        sys.stderr.write(f"gpu-check: {result.name}: {result.status}, {result.seconds:.1f} s\n")
    return document


def _document(results: list[StageResult], options: RunOptions, seconds: float) -> dict[str, Any]:
    return {
        "form": FORM,
        "dry": options.dry,
        "ok": all(result.status == "ok" for result in results),
        "seconds": round(seconds, 1),
        "budget_seconds": options.seconds,
        "stages": [result.as_json() for result in results],
    }


def _write(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)


def _run_stage(stage: Stage, options: RunOptions, left: float, machine: dict[str, Any]) -> StageResult:
    limit = min(stage.dry_seconds if options.dry else stage.seconds, left)
    if stage.name == options.hang and options.hang_seconds is not None:
        limit = min(limit, options.hang_seconds)
    elif limit < LEAST_SECONDS:
        return StageResult(stage.name, "skipped: no time", limit_seconds=round(max(limit, 0.0), 1))
    result = StageResult(stage.name, "ok", limit_seconds=round(limit, 1))
    started = time.monotonic()
    parts = min(stage.parts, 2) if options.dry else stage.parts
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory, contextlib.ExitStack() as files:
        processes = [
            _start(stage, options, limit, machine, (part, parts), Path(directory), files) for part in range(parts)
        ]
        in_time = _wait(processes, started + limit)
        result.seconds = round(time.monotonic() - started, 1)
        ended = [_collect(Path(directory), part, result) for part in range(parts)]
        good = [process.returncode == 0 and has_ended for process, has_ended in zip(processes, ended, strict=True)]
        result.status = _status(result, in_time=in_time, all_good=all(good))
        result.error = "\n".join(_tail(Path(directory), part) for part in range(parts) if not good[part])
    return result


def _status(result: StageResult, *, in_time: bool, all_good: bool) -> str:
    if not in_time:
        return "timeout"
    if not all_good:
        return "failed"
    return "ok" if all(case.get("ok", True) for case in result.cases) else "wrong"


def _start(
    stage: Stage,
    options: RunOptions,
    seconds: float,
    machine: dict[str, Any],
    part: tuple[int, int],
    directory: Path,
    files: contextlib.ExitStack,
) -> subprocess.Popen[bytes]:
    """One process of a stage, in a group of its own, so that it can be ended with all that it started."""
    task = {
        "name": stage.name,
        "module": stage.module,
        "options": stage.options,
        "dry": options.dry,
        "seconds": seconds,
        "part": part[0],
        "parts": part[1],
        "machine": machine,
        "hang": stage.name == options.hang,
        "breaks": options.breaks,
    }

    def opened(suffix: str) -> TextIO:
        return files.enter_context((directory / f"{part[0]}.{suffix}").open("w"))

    return subprocess.Popen(
        [sys.executable, "-m", "tests.gpu_check.stage", json.dumps(task)],
        cwd=REPOSITORY,
        env=_environment(dry=options.dry),
        stdin=subprocess.DEVNULL,
        stdout=opened("jsonl"),
        stderr=opened("log"),
        process_group=0,
    )


def _environment(*, dry: bool) -> dict[str, str]:
    """No network anywhere; in a dry run no GPU, one thread, and Triton's interpreter in place of its compiler."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    paths = [str(REPOSITORY), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if dry:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    else:
        environment.pop("TRITON_INTERPRET", None)
    return environment


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Until all have ended, or it is time; then they are killed, as also when this process is interrupted.

    Returns:
        Whether all ended in time.
    """
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return all(process.poll() is not None for process in processes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # the group is gone
                os.killpg(process.pid, signal.SIGKILL)  # also what a process left behind
            process.wait()


def _collect(directory: Path, part: int, result: StageResult) -> bool:
    """Take in what a process wrote, the last line perhaps torn; whether it said that it was done."""
    has_ended = False
    for line in (directory / f"{part}.jsonl").read_text(errors="replace").splitlines():
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if "case" in message:
            result.cases.append(message["case"])
        result.facts |= message.get("facts", {})
        has_ended = has_ended or message.get("end", False)
    return has_ended


def _tail(directory: Path, part: int) -> str:
    lines = (directory / f"{part}.log").read_text(errors="replace").splitlines()
    return "\n".join(lines[-_LOG_LINES:])
