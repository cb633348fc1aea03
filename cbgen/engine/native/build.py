"""Compiles the CPU operators in `kernels/` into one shared library, once per machine, and keeps it in the cache.

Enters: the C++ files of this package and the compiler of this machine. Leaves: the path of a library for `ctypes`. It
holds plain C functions without any torch or Python header, so that it compiles in seconds and outlives neither.

A library is named by a digest of all that went into it (sources, flags, CPU, torch, compiler). It appears under that
name complete or not at all, ends with the digest of its own bytes, and only one process at a time compiles.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from cbgen.engine.model_files import cache_directory

KERNELS = Path(__file__).parent / "kernels"
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}  # some network filesystems
_LOCK_SECONDS = 180.0  # a compile takes some ten seconds; past this its process hangs
_POLL_SECONDS = 0.1
_TEMPORARY = ".building-"
_BASE_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden")
_CPU_FLAGS = {
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
    "aarch64": ("-mcpu=native",),
}

Notice = Callable[[str], None]


class NativeBuildError(Exception):
    """There is no library; the message says why in half a sentence, and what helps."""


@dataclass(frozen=True, slots=True)
class _Compiler:
    command: str
    version: str


def build_library(notice: Notice, *, plain: bool = False, sources: Path = KERNELS) -> Path:
    """The library for this machine: from the cache, or compiled now.

    Args:
        notice: told when something takes seconds.
        plain: for tests: no instruction sets beyond the architecture's baseline, and `CBGEN_PLAIN` defined.
        sources: directory of the .cpp and .h files.

    Raises:
        NativeBuildError: no compiler, a failed compile, or a cache that cannot be written.
    """
    flags = compile_flags(plain)
    recipe = _recipe(flags, sources)
    directory = cache_directory() / "native"
    compiler = _find_compiler()
    if compiler is None:
        built = [path for path in directory.glob(f"{recipe}-*.so") if is_sound(path)]
        if built:  # when there was one
            return built[0]
        raise NativeBuildError("there is no C++ compiler (install g++, or set CXX)")
    target = directory / f"{recipe}-{_digest(compiler.version.encode())[:8]}.so"
    if is_sound(target):
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / "lock", notice):
            if not is_sound(target):
                notice("compiling operators for this CPU (once)")
                _compile(sources, flags, target)
    except OSError as error:
        raise NativeBuildError(f"{directory} cannot be written ({error.strerror or error})") from error
    return target


def compile_flags(plain: bool) -> tuple[str, ...]:
    """What the compiler is told. No -ffast-math: NaN and infinity mean something in logits."""
    if plain:
        return (*_BASE_FLAGS, "-DCBGEN_PLAIN")
    return (*_BASE_FLAGS, *_CPU_FLAGS.get(platform.machine(), ()))


def is_sound(path: Path) -> bool:
    """Whether the file is a library of ours, whole: its last 32 bytes are the digest of all before."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]


def _recipe(flags: tuple[str, ...], sources: Path) -> str:
    """Digest of all that decides about the library, but for the compiler."""
    parts = [" ".join(flags), _cpu(), torch.__version__, " ".join(platform.libc_ver())]
    for path in _files(sources, "*.cpp", "*.h"):
        parts += [path.name, path.read_text(encoding="utf-8")]
    return _digest("\0".join(parts).encode())[:16]


def _files(directory: Path, *patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in directory.glob(pattern))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _cpu() -> str:
    """What `native` means to the compiler: a home directory may be shared by machines of several kinds."""
    told = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(told))])


def _find_compiler() -> _Compiler | None:
    """What `$CXX` names, else `c++`; None when it does not run."""
    command = os.environ.get("CXX") or "c++"
    try:
        result = subprocess.run([*shlex.split(command), "--version"], capture_output=True, check=True, timeout=30)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return _Compiler(command, f"{command}\n{result.stdout.decode(errors='replace')}")


@contextlib.contextmanager
def _lock(path: Path, notice: Notice) -> Iterator[None]:
    """Hold the lock of all builds; it dies with its process. Without locks the renaming at the end still keeps order.

    Raises:
        NativeBuildError: another process has held it for minutes.
        OSError: the file cannot be made.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        waited = 0.0
        while not _try_lock(file):
            if waited == 0:
                notice("waiting for another process that compiles the operators")
            if waited > _LOCK_SECONDS:
                raise NativeBuildError("another process has been compiling for minutes")
            time.sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
        yield
    finally:
        os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _compile(sources: Path, flags: tuple[str, ...], target: Path) -> None:
    """Compile into a directory of its own, seal the library, and give it its name. The caller holds the lock.

    Raises:
        NativeBuildError: the compiler refused, or torch's builder cannot work.
        OSError: the cache cannot be written.
    """
    for left_over in target.parent.glob(f"{_TEMPORARY}*"):  # of a process that was killed: nobody else compiles now
        shutil.rmtree(left_over, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=target.parent))
    try:
        built = _run_builder(sources, flags, temporary)
        with built.open("r+b") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)  # an ELF file may be followed by anything
            file.flush()
            os.fsync(file.fileno())
        os.replace(built, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _run_builder(sources: Path, flags: tuple[str, ...], directory: Path) -> Path:
    """torch's extension builder, in a directory that nobody else has: a lock file it once left there cannot be met."""
    name = f"cbgen{directory.name.removeprefix(_TEMPORARY)}"  # the builder remembers names and would skip a known one
    try:
        import ninja
        from torch.utils import cpp_extension

        # torch's builder warns of compilers it does not know; what we compile does not touch torch's C++ at all
        logging.getLogger(cpp_extension.__name__).setLevel(logging.ERROR)
        with _path_with(ninja.BIN_DIR):
            cpp_extension.load(
                name=name,
                sources=[str(path) for path in _files(sources, "*.cpp")],
                extra_cflags=list(flags),
                extra_ldflags=["-Wl,--as-needed", *_openmp_of_torch(), "-fopenmp"],
                build_directory=str(directory),
                is_python_module=False,
            )
    except ImportError as error:
        raise NativeBuildError(f"torch's extension builder cannot be imported ({error})") from error
    except RuntimeError as error:
        raise NativeBuildError(f"the compiler failed ({_first_error(str(error))})") from error
    return directory / f"{name}.so"


def _openmp_of_torch() -> list[str]:
    """Link against the very OpenMP runtime that torch brings, so that both share one pool of threads."""
    return [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]]


@contextlib.contextmanager
def _path_with(directory: str) -> Iterator[None]:
    """The directory on PATH while the block runs; torch looks there for the ninja program."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = directory if before is None else f"{before}{os.pathsep}{directory}"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = next((line for line in lines if "error" in line.lower() and "error building" not in line.lower()), "")
    return (told or (lines[0] if lines else "it did not say why"))[:200]
