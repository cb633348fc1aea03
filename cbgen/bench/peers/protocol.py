"""What a peer's script and `cbgen bench` say to each other: one JSON object a line, on stdin and stdout.

    in   {"model": DIR, "prompts": [[ids]], "lengths": [n], "dtype": "bfloat16", "threads": 2, "max_model_len": 512,
          "knobs": {...}, "texts": [...] or null}
    out  {"event": "ready", "load_seconds": 3.1}
         {"event": "result", "wall_seconds": 9.7, "counts": [n], "checksums": [crc], "peak_bytes": 900000000,
          "versions": {...}, "facts": {...}}
    or   {"event": "error", "kind": "missing" | "failed", "message": "..."}

Standard library only: each script runs as a plain file in the interpreter of its engine, where nothing of this package
need be installed. Wall time begins when the model is loaded and one small request has been answered, and ends with the
last token of the last row.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

WARM_UP_TOKENS = 4
_WARM_UP_PROMPT = 8


@dataclass(frozen=True)
class Task:
    """One run of one engine.

    Attributes:
        model: a directory in transformers' layout.
        prompts: token ids of each row.
        lengths: tokens to emit for each row, exactly.
        knobs: settings of this engine, by its own names.
        texts: what the prompts are as text, for an engine that is timed with its tokenizer.
    """

    model: str
    prompts: list[list[int]]
    lengths: list[int]
    dtype: str = "bfloat16"
    threads: int = 1
    max_model_len: int = 1024
    knobs: dict[str, Any] = field(default_factory=dict)
    texts: list[str] | None = None

    def warm_up(self) -> Task:
        """One short row, the same for every engine, so that what is set up once is not timed."""
        return Task(
            self.model,
            [(self.prompts[0] * _WARM_UP_PROMPT)[:_WARM_UP_PROMPT]],
            [WARM_UP_TOKENS],
            self.dtype,
            self.threads,
            self.max_model_len,
            self.knobs,
        )


Answers = list[list[int]]
Generate = Callable[[Task], Answers]


class Missing(Exception):
    """The engine is not installed in this interpreter, or cannot run here at all."""


def serve(packages: Iterable[str], load: Callable[[Task], tuple[Generate, Callable[[], dict[str, Any]]]]) -> None:
    """Read one task from stdin, run it, and answer on stdout.

    Args:
        packages: distributions whose versions are stated.
        load: makes the engine ready. Returns what generates, and what tells facts about the run afterwards.
    """
    answers = _claim_stdout()
    try:
        task = Task(**json.loads(sys.stdin.readline()))
        started = time.perf_counter()
        generate, facts = load(task)
        _say(answers, {"event": "ready", "load_seconds": time.perf_counter() - started})
        generate(task.warm_up())
        started = time.perf_counter()
        token_ids = generate(task)
        wall_seconds = time.perf_counter() - started
        result = {
            "event": "result",
            "wall_seconds": wall_seconds,
            "counts": [len(ids) for ids in token_ids],
            "checksums": [zlib.crc32(json.dumps(ids).encode()) for ids in token_ids],
            "peak_bytes": peak_bytes(),
            "versions": {name: installed for name in packages if (installed := _version(name)) is not None},
            "facts": facts(),
        }
        _say(answers, result)
    except (ImportError, Missing) as error:
        _say(answers, {"event": "error", "kind": "missing", "message": _brief(error)})
        raise
    except Exception as error:
        _say(answers, {"event": "error", "kind": "failed", "message": _brief(error)})
        raise


def no_facts() -> dict[str, Any]:
    """For engines that tell nothing about themselves."""
    return {}


def peak_bytes(pid: int | None = None) -> int:
    """Most memory this process and its children held: the sum of their peaks, what they share counted once.

    Shared are file mappings (code, weights) and shared memory, by their size now.
    """
    processes = [_memory(each) for each in [pid or os.getpid(), *_descendants(pid or os.getpid())]]
    own = sum(max(0, m["VmHWM"] - m["RssFile"] - m["RssShmem"]) for m in processes)
    return own + max(m["RssFile"] for m in processes) + max(m["RssShmem"] for m in processes)


def _memory(pid: int) -> dict[str, int]:
    """Bytes by name, of /proc/PID/status; zeros for a process that has gone."""
    memory = dict.fromkeys(("VmHWM", "RssFile", "RssShmem"), 0)
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return memory
    for line in lines:
        name, _, value = line.partition(":")
        if name in memory:
            memory[name] = int(value.split()[0]) * 1024
    return memory


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _claim_stdout() -> TextIO:
    """A stream to the real stdout; everything that libraries print goes to stderr from here on."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def _say(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
