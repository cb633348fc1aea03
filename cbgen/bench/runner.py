"""One run of one engine: start its script, hand it the task, wait, check what it did, and leave nothing running.

Enters: an interpreter, a script, a task as JSON. Leaves: a `Measurement`, or an `EngineFailure` that says in a sentence
why there is none. The engine's own output goes to a file that is read only when it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import psutil

_LONGEST_MESSAGE = 300


class EngineFailure(Exception):
    """An engine gave no figure. `kind` is `missing` when it is not installed: then it is skipped."""

    def __init__(self, kind: Literal["missing", "failed"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run did. `checksums` are of each row's token ids; `facts` are the engine's own."""

    load_seconds: float
    wall_seconds: float
    num_tokens: int
    peak_bytes: int
    checksums: list[int]
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.wall_seconds


def run_engine(
    python: str, script: Path, task: Mapping[str, Any], environment: Mapping[str, str], time_limit: float
) -> Measurement:
    """Run a task in a process of its own.

    Args:
        python: the interpreter that has the engine.
        script: drives it, see `cbgen.bench.peers.protocol`.
        task: fields of `protocol.Task`.
        environment: on top of this process's own.
        time_limit: seconds, loading included.

    Raises:
        EngineFailure: the engine is missing, failed, ran too long, or did other work than it was given.
    """
    load_seconds = 0.0
    with contextlib.closing(ask(python, script, task, environment, time_limit)) as answers:
        for answer in answers:
            if answer.get("event") == "ready":
                load_seconds = float(answer["load_seconds"])
            elif answer.get("event") == "error":
                kind: Literal["missing", "failed"] = "missing" if answer.get("kind") == "missing" else "failed"
                raise EngineFailure(kind, _brief(answer["message"]))
            elif answer.get("event") == "result":
                return _checked(answer, list(task["lengths"]), load_seconds)
    raise EngineFailure("failed", "it ended without a result")


def ask(
    python: str, script: Path, question: Mapping[str, Any], environment: Mapping[str, str], time_limit: float
) -> Generator[dict[str, Any], None, None]:
    """The JSON lines that a script answers with, as they come; the process and its children end with the iterator.

    Raises:
        EngineFailure: no such interpreter, a crash, an answer that is no JSON, or no answer in time.
    """
    with tempfile.TemporaryFile() as log, _started(python, script, environment, log) as process:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it ended already: what it left in the log says why
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.close()
        ends, is_answered = time.monotonic() + time_limit, False
        for line in _lines(process, ends):
            try:
                answer = json.loads(line)
            except ValueError as error:
                raise EngineFailure(
                    "failed", f"its answer is no JSON: {_brief(line.decode(errors='replace'))}"
                ) from error
            is_answered = True
            yield answer
        if process.wait() or not is_answered:
            raise EngineFailure("failed", f"it ended with code {process.returncode}: {_last_line(log)}")


@contextlib.contextmanager
def _started(
    python: str, script: Path, environment: Mapping[str, str], log: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others
        )
    except OSError as error:
        raise EngineFailure("missing", f"cannot start {python}: {error.strerror}") from error
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and everything that it started."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(process.pid)
        family = [*root.children(recursive=True), root]
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()


def _lines(process: subprocess.Popen[bytes], ends: float) -> Iterator[bytes]:
    """Lines of stdout until it closes, and never beyond the time given."""
    assert process.stdout is not None
    descriptor, pending = process.stdout.fileno(), b""
    while True:
        remaining = ends - time.monotonic()
        if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
            raise EngineFailure("failed", "it gave no result within the time limit")
        chunk = os.read(descriptor, 1 << 20)
        if not chunk:
            break
        *lines, pending = (pending + chunk).split(b"\n")
        yield from filter(None, lines)
    if pending:
        yield pending


def _checked(answer: Mapping[str, Any], lengths: list[int], load_seconds: float) -> Measurement:
    counts = list(answer["counts"])
    if len(counts) != len(lengths):
        raise EngineFailure("failed", f"it answered {len(counts)} rows of {len(lengths)}")
    wrong = next((row for row, count in enumerate(counts) if count != lengths[row]), None)
    if wrong is not None:
        raise EngineFailure(
            "failed", f"row {wrong} has {counts[wrong]} tokens instead of {lengths[wrong]}: not the same work"
        )
    return Measurement(
        load_seconds=load_seconds,
        wall_seconds=float(answer["wall_seconds"]),
        num_tokens=sum(counts),
        peak_bytes=int(answer["peak_bytes"]),
        checksums=list(answer["checksums"]),
        versions=dict(answer["versions"]),
        facts=dict(answer["facts"]),
    )


def _last_line(log: IO[bytes]) -> str:
    """The last line that says something: of a traceback, the exception."""
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - 8192))
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return _brief(lines[-1]) if lines else "it said nothing"


def _brief(text: str) -> str:
    return " ".join(str(text).split())[:_LONGEST_MESSAGE]
