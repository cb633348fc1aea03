"""How this process uses the CPU: threads, and memory that the C library should not hand back after each tensor.

Called once, before the model loads.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEPT_BYTES = 32 << 20  # the most that glibc takes; a step's tensors are below it


def choose_threads(cgroup: Path = _CGROUP) -> int:
    """One thread per physical core that this process may use, within the quota of its container.

    A container that may use two cores' time on a machine of sixty-four sees all of them; threads beyond the quota only
    stop each other. OMP_NUM_THREADS has the last word.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    limits = [allowed, psutil.cpu_count(logical=False) or allowed, _quota(cgroup) or allowed]
    return max(1, min(limits))


def _quota(cgroup: Path) -> int | None:
    """Cores' worth of time that the container gets, rounded up; None for no limit (cgroup v2, then v1)."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join((cgroup / name).read_text() for name in names).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # not there, or "max"
            continue
        if quota > 0 and period > 0:
            return math.ceil(quota / period)
    return None


def apply_cpu_settings() -> None:
    """Set the number of threads, and keep freed memory in the process.

    glibc returns every block above 128 KiB to the system at once, and each step would page it in again.
    """
    threads = choose_threads()
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except (OSError, AttributeError):  # another C library
            return
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
