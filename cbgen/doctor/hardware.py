"""The hardware that a run gets: GPUs, the CPU's instructions, cores and memory, and what a container leaves of them.

Enters: the facts that `find_*` read from the system, and torch's own. Leaves: a `Check` for each.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cbgen.doctor.check import GIB, Check, as_gib
from cbgen.doctor.software import TorchFacts

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def check_devices(torch: TorchFacts) -> Iterator[Check]:
    """Each GPU with its memory."""
    for number, device in enumerate(torch.devices):
        free, total = device["free"], device["total"]
        text = f"cuda:{number} is {device['name']}, {as_gib(free)} of {as_gib(total)} free"
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
    text = f"{as_gib(available)} of {as_gib(total)} available"
    if limit is not None and limit < total:
        text += f", and this container may hold {as_gib(limit)}"
    if min(available, limit or available) < 2 * GIB:
        return Check("memory", "warn", f"{text}; that is little, so choose a small model or free some")
    return Check("memory", "ok", text)


def find_cpu_flags(path: Path = Path("/proc/cpuinfo")) -> set[str] | None:
    """What the CPU can do, in the kernel's words; None where they are not told."""
    with contextlib.suppress(OSError):
        match = re.search(r"^(?:flags|Features)\s*:(.*)$", path.read_text(errors="replace"), re.MULTILINE)
        return set(match[1].split()) if match else None
    return None


def find_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_cpu_quota(root: Path = _CGROUP, process: Path = _OWN_CGROUP) -> float | None:
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


def find_memory() -> tuple[int, int, int | None]:
    """Total, available, and the limit of the control groups, in bytes."""
    limit = _find_memory_limit()
    try:
        import psutil
    except ImportError:  # reported as a package
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page, limit
    memory = psutil.virtual_memory()
    return memory.total, memory.available, limit


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
