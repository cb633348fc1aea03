"""How this process uses the CPU: threads, and memory that the C library should not hand back after each tensor.

Called once, before the model loads.
"""

from __future__ import annotations

import ctypes
import os
import sys

import psutil
import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEPT_BYTES = 32 << 20  # the most that glibc takes; a step's tensors are below it


def choose_threads() -> int:
    """One thread per physical core that this process may run on; OMP_NUM_THREADS and the like have the last word."""
    if os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


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
