"""`cbgen doctor`: is this machine fit to run, and what to do where it is not.

Enters: nothing but the machine, and a path where an output would go. Leaves: a list of `Check`, as text or as one JSON
document. Torch is asked in a process of its own: so a missing, broken or endlessly loading build is a finding like any
other. What is looked up (`_find_*`, `_probe_torch`) is apart from what is made of it (`check_*`, which are pure but for
the disk).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cbgen import __version__
from cbgen.errors import ModelError

Status = Literal["ok", "warn", "fail"]
DOCUMENT_VERSION = 1
EXIT_FAIL = ModelError.exit_code  # the one that says: it is the environment
_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_PROBE_SECONDS = 30
_PROBE = """
import json, sys
try:
    import torch
except BaseException as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    sys.exit()
facts = {"version": torch.__version__, "cuda": torch.version.cuda or getattr(torch.version, "hip", None), "devices": []}
try:
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        facts["devices"].append({"name": torch.cuda.get_device_name(number), "free": free, "total": total})
except Exception as error:
    facts["device_error"] = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
print(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: a sentence that says what is, and the way out where something is wrong."""

    name: str
    status: Status
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What torch says about itself. `cuda` is the version it was built for, or None for a CPU build."""

    version: str = ""
    cuda: str | None = None
    devices: list[dict[str, Any]] = field(default_factory=list)
    device_error: str = ""
    error: str = ""


def examine(output: str | None = None) -> list[Check]:
    """Look at the whole machine; takes seconds and leaves nothing behind.

    Args:
        output: where an output would go; the working directory if not given.
    """
    torch = _probe_torch()
    directory = output_directory(output)
    cache = Path(_hub_cache())
    checks = [
        check_python(),
        *check_packages(),
        check_torch(torch, _find_driver()),
        *check_devices(torch),
        check_bfloat16(_find_cpu_flags(), has_gpu=bool(torch.devices)),
        check_cores(_find_cores(), _find_cpu_quota()),
        check_memory(*_find_memory()),
        check_cache(cache),
        check_free_space("cache disk", cache, enough=20 * _GIB),
        check_hub(),
    ]
    if directory is None:
        return [*checks, Check("output", "warn", f"{output} is on an object store, which was not tried")]
    return [*checks, check_free_space("output disk", directory, enough=_GIB), check_writing(directory)]


def format_checks(checks: list[Check]) -> str:
    """One line each, for people."""
    width = max(len(check.name) for check in checks)
    lines = [f"{check.status:<4}  {check.name:<{width}}  {check.message}" for check in checks]
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail")}
    return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items())])


def as_document(checks: list[Check]) -> dict[str, Any]:
    """The same for programs."""
    return {"version": DOCUMENT_VERSION, "ok": not failed(checks), "checks": [asdict(check) for check in checks]}


def failed(checks: list[Check]) -> bool:
    """Whether anything stands in the way of a run."""
    return any(check.status == "fail" for check in checks)


# -- software ---------------------------------------------------------------------------------------------------------


def check_python() -> Check:
    """The interpreter."""
    system = f"{platform.system()} {platform.machine()}"
    return Check("python", "ok", f"Python {platform.python_version()} on {system}, cbgen {__version__}")


def check_packages() -> Iterator[Check]:
    """What cbgen depends on: one line for all that is well, and one for each that is not."""
    try:
        requirements = importlib.metadata.requires("cbgen") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check("packages", "warn", "cbgen is not installed as a package, so its dependencies are not known")
        return
    good = []
    for requirement in requirements:
        match = re.match(r"([\w.-]+)\s*>=\s*([\d.]+)\s*$", requirement)
        if match is None:  # an extra
            continue
        name, least = match.groups()
        version = _version_of(name)
        if name == "torch" and version is None:  # has a check of its own
            continue
        if version is None:
            yield Check("packages", "fail", f"{name} is not installed; run `pip install '{name}>={least}'`")
        elif _numbers(version) < _numbers(least):
            yield Check("packages", "fail", f"{name} {version} is older than {least}; run `pip install -U {name}`")
        else:
            good.append(f"{name} {version}")
    yield Check("packages", "ok", ", ".join(good))


def check_torch(torch: TorchFacts, driver: str | None) -> Check:
    """Whether torch loads, and was built for what this machine has."""
    if torch.error.startswith("ModuleNotFoundError: No module named 'torch'"):
        return Check("torch", "fail", "torch is not installed; run `pip install torch`")
    if torch.error:
        return Check("torch", "fail", f"torch cannot be used ({torch.error}); reinstall it")
    if torch.cuda is None and driver is not None:
        return Check(
            "torch",
            "warn",
            f"torch {torch.version} is a CPU build, but NVIDIA driver {driver} is present; reinstall it with "
            "`uv pip install --reinstall torch --torch-backend=auto` to use the GPU",
        )
    if torch.cuda is None:
        return Check("torch", "ok", f"torch {torch.version}, a CPU build")
    if not torch.devices:
        reason = f"; torch says: {torch.device_error}" if torch.device_error else ""
        way_out = (
            f"the driver {driver} may be too old, or CUDA_VISIBLE_DEVICES may hide the GPU"
            if driver
            else "no NVIDIA driver was found, and in a container the GPU must be passed in"
        )
        return Check(
            "torch",
            "warn",
            f"torch {torch.version} is built for CUDA {torch.cuda} but sees no GPU, so runs use the CPU: "
            f"{way_out}{reason}",
        )
    built = f"torch {torch.version} for CUDA {torch.cuda}"
    return Check("torch", "ok", f"{built}, NVIDIA driver {driver}" if driver else built)


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers; what follows them (rc1, +cpu) does not decide here."""
    return tuple(int(number) for number in re.match(r"[\d.]*", version).group().strip(".").split(".") if number)  # type: ignore[union-attr]


def _probe_torch() -> TorchFacts:
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
        return TorchFacts(**json.loads(result.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"loading it took more than {_PROBE_SECONDS} seconds")
    except OSError as error:
        return TorchFacts(error=f"Python cannot be started: {error.strerror}")
    except (ValueError, IndexError, TypeError):
        return TorchFacts(error=f"loading it ended Python with exit code {result.returncode}")


def _find_driver(proc: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Version of the NVIDIA driver, or None where there is none."""
    with contextlib.suppress(OSError):
        match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", proc.read_text(errors="replace"))
        if match is not None:
            return match[1]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return result.stdout.split("\n")[0].strip() or None
    return None


# -- hardware ---------------------------------------------------------------------------------------------------------


def check_devices(torch: TorchFacts) -> Iterator[Check]:
    """Each GPU with its memory."""
    for number, device in enumerate(torch.devices):
        free, total = device["free"], device["total"]
        text = f"cuda:{number} is {device['name']}, {_gib(free)} of {_gib(total)} free"
        if free < total / 2:
            yield Check("device", "warn", f"{text}; another process holds the rest, which leaves less for the KV cache")
        else:
            yield Check("device", "ok", text)
    if not torch.devices:
        yield Check("device", "ok", "cpu")


def check_bfloat16(flags: set[str] | None, *, has_gpu: bool) -> Check:
    """Whether the CPU computes in bfloat16; without, GGUF models run in float32 on it."""
    if flags is None:
        return Check("bfloat16", "ok", "the CPU's instructions are not known here")
    found = sorted(flags & {"amx_bf16", "avx512_bf16", "bf16"})
    if found:
        return Check("bfloat16", "ok", f"the CPU has {', '.join(found)}")
    if has_gpu:
        return Check("bfloat16", "ok", "the CPU has none, which does not matter to a GPU")
    return Check("bfloat16", "warn", "the CPU has no bfloat16 instructions; --dtype float32 is likely faster here")


def check_cores(cores: int, quota: float | None) -> Check:
    """Cores this process may use, and the container's limit on them."""
    if quota is not None and quota < cores:
        threads = max(1, int(quota))
        if not os.environ.get("OMP_NUM_THREADS"):
            return Check(
                "cores",
                "warn",
                f"{cores} cores are visible but this container may use {quota:g} of them; set OMP_NUM_THREADS="
                f"{threads}, or torch starts too many threads",
            )
        return Check("cores", "ok", f"{cores}, of which this container may use {quota:g}")
    return Check("cores", "ok", str(cores))


def check_memory(total: int, available: int, limit: int | None) -> Check:
    """Memory for weights, KV cache and the run itself."""
    text = f"{_gib(available)} of {_gib(total)} available"
    if limit is not None and limit < total:
        text += f", and this container may hold {_gib(limit)}"
    if min(available, limit or available) < 2 * _GIB:
        return Check("memory", "warn", f"{text}; that is little, so choose a small model or free some")
    return Check("memory", "ok", text)


def _find_cpu_flags(path: Path = Path("/proc/cpuinfo")) -> set[str] | None:
    with contextlib.suppress(OSError):
        match = re.search(r"^(?:flags|Features)\s*:(.*)$", path.read_text(errors="replace"), re.MULTILINE)
        return set(match[1].split()) if match else None
    return None


def _find_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _find_cpu_quota(root: Path = _CGROUP, process: Path = _OWN_CGROUP) -> float | None:
    """Cores that the control groups allow (version 2, then 1); None without a limit."""
    quotas = []
    for directory in _control_groups(root, process):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (directory / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))  # "max" is no number
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        allowed = int((root / "cpu/cpu.cfs_quota_us").read_text())
        if allowed > 0:
            quotas.append(allowed / int((root / "cpu/cpu.cfs_period_us").read_text()))
    return min(quotas, default=None)


def _find_memory_limit(root: Path = _CGROUP, process: Path = _OWN_CGROUP) -> int | None:
    """Bytes that the control groups allow; None without a limit."""
    files = [directory / "memory.max" for directory in _control_groups(root, process)]
    limits = []
    for file in (*files, root / "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(file.read_text()))
    return min(limits, default=None)


def _control_groups(root: Path, process: Path) -> list[Path]:
    """Directories of this process's control group and those above it, each of which may limit it."""
    own = ""
    with contextlib.suppress(OSError):
        match = re.search(r"^0::/(.*)$", process.read_text(), re.MULTILINE)
        own = match[1] if match else ""
    directory = root / own
    return [directory, *(parent for parent in directory.parents if parent.is_relative_to(root))]


def _find_memory() -> tuple[int, int, int | None]:
    """Total, available, and the limit of the control groups, in bytes."""
    limit = _find_memory_limit()
    try:
        import psutil
    except ImportError:  # reported as a package
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page, limit
    memory = psutil.virtual_memory()
    return memory.total, memory.available, limit


def _gib(size: float) -> str:
    return f"{size / _GIB:,.1f} GiB"


# -- disks and caches -------------------------------------------------------------------------------------------------


def output_directory(output: str | None) -> Path | None:
    """The directory that an output would be written in; None for an object store."""
    if output is None:
        return Path.cwd()
    if "://" in output:
        return None
    path = Path(output)
    return path if path.is_dir() else path.parent


def check_free_space(name: str, directory: Path, *, enough: int) -> Check:
    """Room on the disk that a directory is on, or would be on."""
    place = _existing(directory)
    try:
        free = shutil.disk_usage(place).free
        inodes = os.statvfs(place)
    except OSError as error:
        return Check(name, "fail", f"{place} cannot be read: {error.strerror}; choose another place")
    if inodes.f_files and not inodes.f_favail:
        return Check(name, "fail", f"{place} can hold no more files, however large; delete some")
    if free < enough / 100:
        return Check(name, "fail", f"only {_gib(free)} free at {place}; free some, or choose another place")
    if free < enough:
        return Check(name, "warn", f"only {_gib(free)} free at {place}; a large job or model may not fit")
    return Check(name, "ok", f"{_gib(free)} free at {place}")


def check_cache(cache: Path) -> Check:
    """Where models are kept."""
    place = _existing(cache)
    if not os.access(place, os.W_OK | os.X_OK):
        return Check("model cache", "fail", f"{cache} cannot be written; set HF_HOME to a directory that can")
    with contextlib.suppress(OSError):
        num_models = sum(entry.name.startswith("models--") for entry in os.scandir(cache))
        return Check("model cache", "ok", f"{cache} holds {num_models} {'model' if num_models == 1 else 'models'}")
    return Check("model cache", "ok", f"{cache} is made with the first model")


def check_hub() -> Check:
    """How models are fetched. Whether there is a token is said, the token never."""
    token = "a token is set" if _has_token() else "no token is set, so models with terms to accept cannot be fetched"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Check("hub", "ok", f"HF_HUB_OFFLINE is set: only models in the cache can be used; {token}")
    return Check("hub", "ok", token)


def check_writing(directory: Path) -> Check:
    """Create, sync, rename, lock and delete a file, as a run does."""
    if not directory.is_dir():
        return Check("write test", "fail", f"{directory} is no directory; create it first")
    try:
        with tempfile.TemporaryDirectory(prefix=".cbgen-doctor-", dir=directory) as scratch:
            locks = _try_writing(Path(scratch))
    except OSError as error:
        return Check("write test", "fail", f"writing in {directory} failed: {error.strerror}; choose another place")
    if not locks:
        message = f"{directory} has no working file locks; never start two runs on the same output from two machines"
        return Check("write test", "warn", message)
    return Check("write test", "ok", f"create, sync, rename, lock and delete work in {directory}")


def _try_writing(scratch: Path) -> bool:
    """Whether locks work; that the rest does is said by no error.

    Raises:
        OSError: a step failed.
    """
    first, second = scratch / "first", scratch / "second"
    with first.open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
    first.replace(second)
    handle = os.open(scratch, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    if second.read_bytes() != b"x" * 4096:
        raise OSError(0, "what was written is not what is read")
    return _locks_exclude(second)


def _locks_exclude(path: Path) -> bool:
    with path.open("rb+") as first, path.open("rb+") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    path = path.absolute()
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


def _hub_home() -> str:
    return os.path.expanduser(
        os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    )


def _hub_cache() -> str:
    return os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(_hub_home(), "hub"))


def _has_token() -> bool:
    if os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    return os.path.exists(os.environ.get("HF_TOKEN_PATH") or os.path.join(_hub_home(), "token"))
