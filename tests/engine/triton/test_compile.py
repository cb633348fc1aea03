"""Every kernel, in every form that is in use, becomes machine code that fits the GPU it is for. No GPU is needed."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from triton.runtime.interpreter import InterpretedFunction

import cbgen.engine.triton
from cbgen.engine.triton import tables
from tests.engine.triton.machines import MACHINES
from tests.engine.triton.older import OLDER_TRITON, ROOT, needs_older_triton, python_path

# Kernels of one model are compiled at its first steps; how many forms each may have. Each costs seconds in a run.
MAX_VARIANTS = 3


def compile_everything(*arguments, triton=None):
    """What `aot` says, in a process in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": python_path(triton), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.engine.triton.aot", "--json", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def current():
    return compile_everything()


@pytest.fixture(scope="module")
def older():
    return compile_everything("--machine", "h200", "--all", triton=OLDER_TRITON)


@pytest.fixture(params=["current", pytest.param("older", marks=needs_older_triton)])
def document(request):
    return request.getfixturevalue(request.param)


@needs_older_triton
def test_the_older_one_is_older(older):
    assert older["triton"].startswith("3.6.")
    assert Path(older["path"]).parent == OLDER_TRITON


def test_every_launch_compiles(document, capsys):
    compiled = document["compiled"]
    assert not [(row["machine"], row["kernel"], row["label"], row["error"]) for row in compiled if row["error"]]
    with capsys.disabled():
        sys.stdout.write(f"\n{len(compiled)} kernels, Triton {document['triton']}, {document['seconds']} s ")


def test_nothing_spills(document):
    assert not [(row["kernel"], row["machine"], row["label"]) for row in document["compiled"] if row["spilled"]]


def test_shared_memory_fits(document):
    for row in document["compiled"]:
        assert row["shared"] <= MACHINES[row["machine"]].max_shared, (row["kernel"], row["label"])


def test_registers_let_a_program_start(document):
    """A multiprocessor has 65,536 registers; a program that wants more of them fails at its launch."""
    for row in document["compiled"]:
        assert 0 < row["registers"] * 32 * row["num_warps"] <= 65_536, (row["kernel"], row["label"])


def test_every_kernel_is_among_them(document):
    """Kernels are the functions of Triton's whose names end so; others are called by them."""
    names = set()
    for module in pkgutil.iter_modules(cbgen.engine.triton.__path__, "cbgen.engine.triton."):
        members = vars(importlib.import_module(module.name))
        names |= {name for name, member in members.items() if isinstance(member, InterpretedFunction)}
    kernels = {name for name in names if name.endswith("kernel")}
    assert len(kernels) >= 8
    for machine in {row["machine"] for row in document["compiled"]} - {"l4"}:
        assert kernels == {row["kernel"] for row in document["compiled"] if row["machine"] == machine}


@pytest.mark.parametrize("kernel", ["decode_kernel", "extend_kernel"])
def test_every_entry_of_every_table_is_among_them(document, kernel):
    table = tables.DECODE if kernel == "decode_kernel" else tables.EXTEND
    for machine in {row["machine"] for row in document["compiled"]}:
        rows = [row for row in document["compiled"] if row["kernel"] == kernel and row["machine"] == machine]
        compiled = {(row["constants"]["TILE"], row["num_warps"], row["num_stages"]) for row in rows}
        entries = table[tables.architecture(MACHINES[machine].capability)]
        wanted = {(c.tile, c.num_warps, c.num_stages) for by_width in entries.values() for c in by_width.values()}
        assert wanted == compiled


def test_a_run_compiles_each_kernel_a_few_times_only(document):
    assert document["variants"]
    assert {kernel: count for kernel, count in document["variants"].items() if count > MAX_VARIANTS} == {}


# -- that these tests can fail ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "from tests.engine.triton.faulty_kernels import main; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return {row["kernel"]: row for row in json.loads(done.stdout)}


def test_a_kernel_that_does_not_compile_is_found(faulty):
    assert "CompilationError" in faulty["broken_kernel"]["error"]


def test_spills_and_too_much_shared_memory_are_found(faulty):
    assert faulty["spilling_kernel"]["spilled"] > 0
    assert faulty["wide_kernel"]["shared"] > MACHINES["l4"].max_shared


def test_a_launch_is_specialized_as_triton_does(faulty):
    """One count is a multiple of 16, one is 1, one is neither: three kernels. The fourth launch needs none."""
    assert faulty["count"] == {"kernel": "count", "specialized_kernel": 3}
