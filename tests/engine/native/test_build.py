"""Compiling the operators: cached, complete or absent, by one process at a time, and never fatal."""

import ctypes
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cbgen.engine.native.build import KERNELS, NativeBuildError, build_library, is_sound
from cbgen.engine.native.library import Int, NativeLibrary, open_library

SOURCE = '#include "answer.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CBGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture
def sources(tmp_path):
    directory = tmp_path / "kernels"
    directory.mkdir()
    (directory / "one.cpp").write_text(SOURCE)
    (directory / "answer.h").write_text("#define ANSWER 42\n")
    return directory


def answer(path):
    return NativeLibrary(path).function("answer", [], Int)()


def test_compiles_once_and_says_so(cache, sources):
    said = []
    path = build_library(said.append, sources=sources)
    assert answer(path) == 42
    assert build_library(said.append, sources=sources) == path
    assert said == ["compiling operators for this CPU (once)"]
    assert sorted(p.name for p in cache.iterdir()) == [path.name, "lock"]


def test_another_header_or_another_variant_is_another_library(cache, sources):
    paths = [build_library(print, sources=sources), build_library(print, sources=sources, plain=True)]
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    paths.append(build_library(print, sources=sources))
    assert len(set(paths)) == 3
    assert [answer(path) for path in paths] == [42, 42, 43]


@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b"", lambda b: b[:500] + b"\0" + b[501:] + b"x"])
def test_a_damaged_library_is_compiled_again(cache, sources, damage):
    path = build_library(print, sources=sources)
    damaged = path.with_suffix(".damaged")  # a file of its own: the library may be mapped into this process
    damaged.write_bytes(damage(path.read_bytes()))
    damaged.replace(path)
    assert not is_sound(path)
    said = []
    assert build_library(said.append, sources=sources) == path
    assert len(said) == 1
    assert answer(path) == 42


def test_leftovers_of_a_killed_compile_do_no_harm(cache, sources):
    left = cache / ".building-old"
    left.mkdir(parents=True)
    (left / "lock").touch()
    assert answer(build_library(print, sources=sources)) == 42
    assert not left.exists()


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler", '"'])
def test_without_a_compiler_it_says_what_helps(cache, sources, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler \(install g\+\+"):
        build_library(print, sources=sources)


def test_an_empty_path_has_no_compiler(cache, sources, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler"):
        build_library(print, sources=sources)


def test_what_was_compiled_serves_when_the_compiler_is_gone(cache, sources, monkeypatch):
    path = build_library(print, sources=sources)
    monkeypatch.setenv("CXX", "/bin/false")
    assert build_library(print, sources=sources) == path


def test_a_failed_compile_tells_the_first_error_and_leaves_nothing(cache, sources):
    (sources / "two.cpp").write_text("int broken() { return nothing_here; }\n")
    with pytest.raises(NativeBuildError, match="nothing_here"):
        build_library(print, sources=sources)
    assert [p.name for p in cache.iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path, sources, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CBGEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(NativeBuildError, match="cannot be written"):
        build_library(print, sources=sources)


def test_a_file_that_is_no_library_is_a_reason(tmp_path):
    (tmp_path / "x.so").write_text("no library")
    with pytest.raises(NativeBuildError, match="cannot be loaded"):
        NativeLibrary(tmp_path / "x.so")


def test_two_processes_compile_once(cache, sources):
    code = (
        "import sys; from pathlib import Path; from cbgen.engine.native.build import build_library;"
        "sys.stdin.readline();"  # torch is imported: both start together
        "print(build_library(lambda text: print(text), sources=Path(sys.argv[1])))"
    )
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(sources)], stdin=pipe, stdout=pipe, text=True)
        for _ in range(2)
    ]
    outputs = [p.communicate("go\n", timeout=120)[0].splitlines() for p in _all_told_to_go(processes)]
    assert [p.returncode for p in processes] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    said = [line for lines in outputs for line in lines[:-1]]
    assert said.count("compiling operators for this CPU (once)") == 1


def _all_told_to_go(processes):
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return processes


def test_who_waits_takes_what_the_other_built(cache, sources):
    path = build_library(print, sources=sources)
    content = path.read_bytes()
    path.unlink()
    holder = os.open(cache / "lock", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    said, built = [], []
    waiter = threading.Thread(target=lambda: built.append(build_library(said.append, sources=sources)))
    waiter.start()
    while not said:
        time.sleep(0.01)
    path.write_bytes(content)
    os.close(holder)
    waiter.join(60)
    assert built == [path]
    assert said == ["waiting for another process that compiles the operators"]


def test_the_library_shares_its_threads_with_torch():
    library = open_library(print)
    with Path("/proc/self/maps").open() as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line}
    assert len(runtimes) == 1
    assert "torch" in runtimes.pop()
    assert library.path.is_file()


def test_a_function_checks_the_number_of_its_arguments():
    cast = open_library(print).function("cbgen_cast", [ctypes.c_void_p] * 2)
    with pytest.raises(TypeError):
        cast(1)
    with pytest.raises(AttributeError):
        open_library(print).function("cbgen_nothing", [])


def test_the_sources_are_part_of_the_package():
    assert {"vec.h", "elementwise.cpp"} <= {path.name for path in KERNELS.iterdir()}
