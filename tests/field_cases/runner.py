"""Runs a case and says what is wrong: `CaseRunner(...).problems(case)`, empty when all is as expected.

A plain case is one command, a case with steps is a few lines of bash; both run in the case's directory and write into a
directory of their own. Commands are forks of a warm process (see `fork_server`), except where the case is about the
process itself: then, or with `command`, they are real ones.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbgen.engine.model_files import cache_directory
from tests.field_cases.cases import HERE, Case
from tests.field_cases.checks import CHECKS, STEP_CHECKS, Checked
from tests.field_cases.fork_client import call
from tests.field_cases.records import Answer, difference, read_answers

_TIMEOUT_SECONDS = 300
_MANY_ROWS, _FEWER_ROWS = "200000", "20000"  # of M-13, which takes minutes in full
_EXIT_CODES = {"ok": {0}, "row_errors": {3}, "refuse": {2, 4, 5}, "fatal": {1}}
# About the locale and the environment at start, signals and pipes at exit, or memory of the process itself.
_REAL_PROCESSES = {"F-13", "M-13", "N-03", "N-05", "O-01", "O-03"}
_PRELUDE = f"""
must() {{ "$@" || echo "MUST FAILED: $*" >&2; }}
must_not() {{ ! "$@" > /dev/null 2>&1 || echo "MUST NOT FAILED: $*" >&2; }}
sleep() {{ python3 {HERE}/hold.py "$@"; }}  # ends with its reader; bash waits for every part of a pipeline
at_lines() {{  # FILE N PID: wait until FILE has N lines; says so when the process ended first
  while kill -0 $3 2>/dev/null; do
    n=$(wc -l < "$1" 2>/dev/null || echo 0); test "$n" -ge "$2" && return; command sleep 0.02
  done
  echo "NOTE: the run ended before $1 had $2 lines" >&2
}}
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended; `code` is None when it took too long."""

    code: int | None
    stderr: str


class CaseRunner:
    """Runs cases against one set of models.

    Args:
        socket: of a fork server.
        models: the directory it built.
        command: run everything as this command instead.
        full: M-13 with all its rows.
    """

    def __init__(self, socket: Path, models: Path, command: str | None = None, *, full: bool = False) -> None:
        self.socket = socket
        self.models = models
        self._command = command
        self._full = full

    def problems(self, case: Case) -> list[str]:
        """Everything that is not as the case expects."""
        with tempfile.TemporaryDirectory(prefix=f"{case.id}-") as name:
            directory = Path(name)
            output = directory / "out.jsonl"
            if case.steps:
                outcome = self._run_steps(case, directory)
            else:
                outcome = self._run_plain(case, case.arguments(output, self.models), directory)
            problems = _exit_problems(case, outcome)
            refused = outcome.code != 0 and "refuse" in case.exits and not output.exists()
            if outcome.code is not None and not refused and not case.must_refuse:
                problems += _record_problems(case, output, outcome)
            if case.must_refuse and not case.steps and output.exists():
                problems.append("refused, but wrote an output file")
            if not problems and not refused:
                problems += self._check_further(case, output, outcome, directory)
            return problems

    def _run_plain(self, case: Case, arguments: list[str], directory: Path) -> Outcome:
        errors = directory / "stderr"
        with Path(os.devnull).open("r+") as null, errors.open("wb") as stderr:
            streams = [null.fileno(), null.fileno(), stderr.fileno()]
            environment = self._environment(case, directory)
            if self._command is None:
                code = call(str(self.socket), arguments, str(case.directory), environment, streams)
            else:
                line = [*self._command.split(), *arguments]
                code = _wait(subprocess.Popen(line, cwd=case.directory, env=environment, stdin=null, stderr=stderr))
        return Outcome(code, errors.read_text("utf-8", "replace"))

    def _run_steps(self, case: Case, directory: Path) -> Outcome:
        lines = "\n".join(case.steps)
        if not self._full:
            lines = lines.replace(_MANY_ROWS, _FEWER_ROWS)
        errors = directory / "stderr"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                ["bash", "-c", _PRELUDE + lines],
                cwd=case.directory,
                env=self._environment(case, directory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
            code = _wait(process)
        return Outcome(code, errors.read_text("utf-8", "replace"))

    def _environment(self, case: Case, directory: Path) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in ("CBGEN_DISABLE", "CBGEN_DECODE_STEPS") or not name.startswith(("CBGEN_", "PYTEST_"))
        }
        cache = directory / "cache"  # of the case alone, but for operators: they are compiled once for all
        cache.mkdir(exist_ok=True)
        compiled = cache_directory() / "native"
        compiled.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (cache / "native").symlink_to(compiled)
        fork = f"{sys.executable} -IS {HERE / 'fork_client.py'} {self.socket}"
        real = f"{sys.executable} -m cbgen"
        return {
            **kept,
            "CBGEN": self._command or (real if case.id in _REAL_PROCESSES else fork),
            "CBGEN_CACHE": str(cache),
            "MODELS": str(self.models),
            "GGUF": str(self.models / "chain.gguf"),
            "CASE": str(case.directory),
            "TMP": str(directory),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
            "OMP_NUM_THREADS": "1",  # the models are far too small for more
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _check_further(self, case: Case, output: Path, outcome: Outcome, directory: Path) -> list[str]:
        check = (STEP_CHECKS if case.steps else CHECKS).get(case.id)
        if check is None:
            return []

        def run_again(source: str = case.input, **changes: Any) -> list[Answer]:
            again = directory / f"again-{len(list(directory.iterdir()))}.jsonl"
            self._run_plain(case, case.arguments(again, self.models, source, **changes), directory)
            return read_answers(again)

        return list(check(Checked(case, read_answers(output), output.read_bytes(), run_again)))


@contextlib.contextmanager
def fork_server(directory: Path) -> Iterator[CaseRunner]:
    """Start a fork server with models in `directory`; gives a runner that uses it."""
    models = directory / "models"
    models.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (
        tempfile.TemporaryDirectory() as short,  # the path of a socket has at most a hundred characters
        (directory / "server.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.field_cases.fork_server", f"{short}/socket", str(models)],
            cwd=HERE.parent.parent,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the fork server did not start:\n{(directory / 'server.log').read_text()}")
        yield CaseRunner(Path(short, "socket"), models)


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _exit_problems(case: Case, outcome: Outcome) -> list[str]:
    if outcome.code is None:
        return ["took too long"]
    problems = [line for line in outcome.stderr.splitlines() if line.startswith(("MUST FAILED", "MUST NOT FAILED"))]
    if "Traceback" in outcome.stderr:
        problems.append("traceback on stderr")
    if not case.steps and not any(outcome.code in _EXIT_CODES[name] for name in case.exits):
        problems.append(f"exit {outcome.code}, expected {case.exits}")
    return [f"{problem}; stderr: {outcome.stderr[-300:]}" for problem in problems]


def _record_problems(case: Case, output: Path, outcome: Outcome) -> list[str]:
    if case.records is None and (not case.num_records or not output.exists()):
        return []
    try:
        answers = read_answers(output)
    except (OSError, ValueError) as error:
        return [f"{type(error).__name__}: {error}; stderr: {outcome.stderr[-300:]}"]
    expected = case.num_records if case.records is None else len(case.records)
    if len(answers) != expected:
        return [f"{len(answers)} records, expected {expected}"]
    problems = []
    for number, (allowed, answer) in enumerate(zip(case.records or [], answers, strict=False)):
        differences = [difference(form, answer) for form in allowed]
        if all(differences):
            problems.append(f"record {number}: {differences[0]}")
    return problems
