"""Compiles kernels for GPUs that are not there: every launch our wrappers make, down to machine code.

Enters: `calls.py`, which calls the wrappers with tensors on CPU. A recorder stands where Triton compiles; all before it
is Triton's own: how arguments are specialized, which options a launch has. Leaves: per distinct launch what the
assembler says of it (registers, spilled bytes, shared memory), or why it did not compile.

    python -m tests.engine.triton.aot --machine a100 --machine h200 [--all] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.engine.triton.machines import KIBIBYTE, MACHINES, Machine


@dataclass(frozen=True, slots=True)
class Launch:
    """What Triton would compile: the same for all launches that differ in nothing the machine code depends on."""

    machine: Machine
    label: str  # of the call that made it first
    source: ASTSource
    options: dict[str, Any]

    @property
    def kernel(self) -> str:
        return str(self.source.fn.__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a launch; `error` is empty where it compiled.

    Attributes:
        constants: its constexpr arguments that are no type, by name.
        shared: bytes of shared memory of one program.
        spilled: bytes that one thread keeps in local memory because it has too few registers, stores and loads.
    """

    machine: str
    kernel: str
    label: str
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    error: str = ""
    registers: int = 0
    shared: int = 0
    spilled: int = 0
    seconds: float = 0.0


def _target(machine: Machine) -> GPUTarget:
    major, minor = machine.capability
    return GPUTarget("cuda", 10 * major + minor, 32)


class _NoDevice:
    """A driver that knows which GPU it would be."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # Triton keeps its compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


class Recorder:
    """Collects the distinct launches that are made while it is active.

    Attributes:
        launches: in the order they came.
        num_launches: with those that were known already.
        label: of the call at hand; set by who makes it.
    """

    def __init__(self, machine: Machine) -> None:
        self.launches: list[Launch] = []
        self.num_launches = 0
        self.label = ""
        self._machine = machine
        self._known: set[str] = set()

    @contextlib.contextmanager
    def active(self) -> Iterator[Recorder]:
        """Launches inside compile and run nothing."""
        recorder = self

        def record(
            kernel: JITFunction,
            key: Any,
            signature: dict[str, Any],
            device: int,
            constexprs: Any,
            options: Any,
            attrs: Any,
            warmup: bool,
        ) -> None:
            recorder._add(ASTSource(kernel, signature, constexprs, attrs), dict(options.__dict__))

        driver.set_active(_NoDevice(_target(self._machine)))
        with mock.patch.object(JITFunction, "_do_compile", record):
            yield self

    def _add(self, source: ASTSource, options: dict[str, Any]) -> None:
        self.num_launches += 1
        key = source.hash() + repr(sorted((name, repr(value)) for name, value in options.items()))
        if key not in self._known:
            self._known.add(key)
            self.launches.append(Launch(self._machine, self.label, source, options))


def record(machine: Machine, calls: dict[str, Callable[[Machine], object]]) -> Recorder:
    """Make some calls of wrappers, by label."""
    recorder = Recorder(machine)
    with recorder.active():
        for recorder.label, call in calls.items():
            call(machine)
    return recorder


def compile_launch(launch: Launch) -> Compiled:
    """All the way to machine code."""
    names = launch.source.fn.arg_names
    constants = {
        ".".join([names[path[0]], *map(str, path[1:])]): value for path, value in launch.source.constants.items()
    }
    outcome = Compiled(
        launch.machine.name,
        launch.kernel,
        launch.label,
        {name: value for name, value in constants.items() if isinstance(value, bool | int | float | str | None)},
        launch.options["num_warps"],
        launch.options["num_stages"],
    )
    log, start = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(launch.source, target=_target(launch.machine), options=launch.options)
    except Exception as error:  # a failure is a result here
        return dataclasses.replace(outcome, error=f"{type(error).__name__}: {error}"[:2000])
    return dataclasses.replace(
        outcome,
        shared=int(compiled.metadata.shared),
        seconds=time.perf_counter() - start,
        **_assembler_report(log.getvalue()),
    )


def _assembler_report(log: str) -> dict[str, int]:
    """Registers and spilled bytes out of what `ptxas -v` says.

    Raises:
        ValueError: it does not say it.
    """
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise ValueError(f"the assembler said nothing of registers or spills: {log[:500]!r}")
    return {"registers": int(registers[1]), "spilled": int(spills[1]) + int(spills[2])}


def compile_all(launches: list[Launch], num_processes: int) -> list[Compiled]:
    """In forked processes: what was recorded does not travel, and Triton holds the interpreter while it compiles."""
    triton.knobs.nvidia.dump_ptxas_log = True
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache),
        mock.patch.object(sys.modules[__name__], "_pending", launches, create=True),
        multiprocessing.get_context("fork").Pool(num_processes) as pool,
    ):
        return pool.map(_compile_pending, range(len(launches)), chunksize=1)


def _compile_pending(index: int) -> Compiled:
    return compile_launch(globals()["_pending"][index])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--machine", action="append", choices=MACHINES, help="default: all")
    parser.add_argument("--all", action="store_true", help="all calls, not just enough for every table and option")
    parser.add_argument("--only", default="", help="calls whose label contains this")
    parser.add_argument("--json", action="store_true", help="one document on stdout instead of a table")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    from tests.engine.triton.calls import step_calls, trial_calls

    start = time.perf_counter()
    recorders = []
    for name in arguments.machine or MACHINES:
        calls = trial_calls(MACHINES[name], everything=arguments.all)
        recorders.append(
            record(MACHINES[name], {label: call for label, call in calls.items() if arguments.only in label})
        )
    steps = record(MACHINES["h200"], step_calls())
    outcomes = compile_all([launch for recorder in recorders for launch in recorder.launches], arguments.processes)
    document = {
        "triton": triton.__version__,
        "path": str(Path(triton.__file__).parent),
        "launches": sum(recorder.num_launches for recorder in recorders),
        "variants": dict(Counter(launch.kernel for launch in steps.launches)),
        "seconds": round(time.perf_counter() - start, 1),
        "compiled": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    sys.stdout.write(json.dumps(document) if arguments.json else _table(document))


def _table(document: dict[str, Any]) -> str:
    lines = []
    for row in sorted(document["compiled"], key=lambda row: (row["machine"], row["kernel"], row["label"])):
        figures = f"{row['registers']:4} registers {row['spilled']:5} spilled {row['shared'] / KIBIBYTE:6.1f} KiB"
        launch = f"{row['num_warps']:2} warps {row['num_stages']} stages {row['seconds']:5.2f} s"
        lines.append(f"{row['machine']:5} {row['kernel']:24} {figures} {launch}  {row['label']} {row['constants']}")
        if row["error"]:
            lines.append(f"      {row['error']}")
    lines.append(f"{len(document['compiled'])} compiled, {document['launches']} launches, {document['seconds']} s, "
                 f"variants in one model's steps {document['variants']}, Triton {document['triton']}")  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
