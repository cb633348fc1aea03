"""`cbgen run` in this process, on an engine that answers at once and says what it was asked. No torch.

prompt "x"      -> "re:x", and "re:x#1", "re:x#2" for further samples
a chat          -> "re:" and the content of its last message
a prompt with ~ -> an error row (nan_logits)
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from cbgen import cli, pipeline
from cbgen.config import RunConfig
from cbgen.engine.model_files import ModelFiles
from cbgen.job import Serving
from cbgen.records import Generation
from tests.fakes import FakeEngine
from tests.helpers import BYTE_VOCAB_SIZE, EOS, ByteTokenizer, byte_ids

CONTEXT = 4096
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def message(self) -> str:
        """What it complained of, without the program's name."""
        return self.stderr.rpartition("cbgen: ")[2].strip() if "cbgen: " in self.stderr else ""


def answer(prompt_token_ids: Any, sample: int) -> tuple[list[int], str]:
    """The rules at the top."""
    prompt = ByteTokenizer().decode([int(token_id) for token_id in prompt_token_ids])
    if "~" in prompt:
        return [], "nan_logits"
    asked = prompt.rpartition("]")[2].removesuffix(">")
    return [*byte_ids(f"re:{asked}" + (f"#{sample}" if sample else "")), EOS], "stop"


class SteadyEngine(FakeEngine):
    """Rows stay in a slot for some steps each, and then end; the others wait.

    Attributes:
        num_steps: of a row in a slot.
        step_seconds: how long a step takes.
        before_step: called with the number of steps so far.
    """

    num_steps = 3
    step_seconds = 0.0
    before_step: Callable[[int], None] | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._running: list[list[Any]] = []
        self._admits = True

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running or self._queue)

    def stop_admitting(self) -> None:
        self._admits = False

    def step(self) -> list[Generation]:
        if self.before_step is not None:
            self.before_step(self.stats.num_steps)
        time.sleep(self.step_seconds)
        self.stats.num_steps += 1
        while self._admits and self._queue and len(self._running) < self.limits.max_num_seqs:
            self._running.append([self.num_steps, self._queue.pop(0)])
        for entry in self._running:
            entry[0] -= 1
        ended = [item for steps, item in self._running if not steps]
        self._running = [entry for entry in self._running if entry[0]]
        return [self._generation(*item) for item in ended]


class Quick:
    """Runs commands in a directory of their own.

    Attributes:
        directory: where inputs and outputs are.
        asked: prompts that the engine of the last run answered, sample by sample.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.asked: list[str] = []
        self.make_engine: Callable[[], FakeEngine] = lambda: self.engine()
        model = directory / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text("{}")

    def engine(self, kind: type[FakeEngine] = FakeEngine, slots: int = 8, **attributes: Any) -> FakeEngine:
        """An engine that notes what it is asked; `attributes` are set on it."""

        def noted(prompt_token_ids: Any, sample: int) -> tuple[list[int], str]:
            self.asked.append(ByteTokenizer().decode([int(token_id) for token_id in prompt_token_ids]))
            return answer(prompt_token_ids, sample)

        engine = kind(noted, vocab_size=BYTE_VOCAB_SIZE, slots=slots, context=CONTEXT)
        for name, value in attributes.items():
            setattr(engine, name, value)
        return engine

    def path(self, name: str) -> Path:
        return self.directory / name

    def write(self, rows: list[Any], name: str = "in.jsonl") -> Path:
        """A JSONL file; a row that is text stands as it is."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
        return path

    def run(self, *arguments: Any, output: Any = "out.jsonl", stdin: bytes = b"") -> Outcome:
        """`cbgen run` with in.jsonl, if no argument is a path that exists, into `output`."""
        texts = [str(argument) for argument in arguments]
        if not texts or texts[0].startswith("--"):
            texts = [str(self.path("in.jsonl")), *texts]
        output = str(output) if "://" in str(output) or output == "-" else f"{self.directory}/{output}"
        return self.command("run", *texts, "-o", output, "--model", str(self.path("model")), stdin=stdin)

    def command(self, *arguments: str, stdin: bytes = b"") -> Outcome:
        """Any command line."""
        self.asked.clear()
        stdout, stderr = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        with (
            mock.patch.object(pipeline, "_load", self._load),
            mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(stdin)))),
            mock.patch.object(sys, "stdout", stdout),
            contextlib.redirect_stderr(stderr),
        ):
            try:
                cli.main(list(arguments))
                code: Any = 0
            except SystemExit as exit_:
                code = exit_.code
        stdout.flush()
        return Outcome(code or 0, stdout.buffer.getvalue().decode(), stderr.getvalue())

    def _load(self, config: RunConfig, files: ModelFiles, note: Callable[[str], None]) -> Serving:
        return Serving(ByteTokenizer(chat_template=CHAT_TEMPLATE), self.make_engine())

    def records(self, name: str = "out.jsonl") -> list[dict[str, Any]]:
        """The records of a JSONL output."""
        return list(strict_lines(self.path(name).read_text("utf-8")))

    def summary(self, name: str = "out.jsonl") -> dict[str, Any]:
        return dict(json.loads((self.path(f"{name}.cbgen") / "summary.json").read_text()))


def strict_lines(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of a text, one a line."""
    assert text.endswith("\n") or not text
    for line in text.split("\n")[:-1]:
        yield json.loads(line, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def main() -> None:
    """`python -m tests.quick DIRECTORY SECONDS ARGS...`: `cbgen ARGS...` in a process of its own, a step at a time."""
    quick = Quick(Path(sys.argv[1]))
    quick.make_engine = lambda: quick.engine(SteadyEngine, slots=4, step_seconds=float(sys.argv[2]))
    pipeline._load = quick._load
    cli.main(sys.argv[3:])


if __name__ == "__main__":
    main()
