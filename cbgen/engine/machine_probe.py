"""What a CUDA device gives: bandwidth and arithmetic, free memory, and the settings of its allocator.

Enters: a device and a dtype. Leaves: plain numbers, from which `cbgen.engine.limits` chooses sizes. All calls that
measure a device are here, so that the choices themselves can be checked without one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from cbgen.engine.containment import judge
from cbgen.engine.sequence import FinishReason

_COPIED_BYTES = 256 << 20  # well beyond any L2 cache
_MATRIX_SIZE = 4096
_REPEATS = 4
_WAKING_SECONDS, _MOST_WAKING_RUNS = 0.01, 32
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Bytes a second that a copy reads and writes together, and floating-point operations a second of a product."""

    bandwidth: float
    flops: float

    def balanced_tokens(self, itemsize: int) -> float:
        """Tokens at which a step's arithmetic takes as long as reading the weights, each of `itemsize` bytes.

        A weight costs 2 operations a token: the machine balance of the roofline model (Williams et al., 2009).
        """
        return self.flops * itemsize / (2 * self.bandwidth)


def measure_speed(device: torch.device, dtype: torch.dtype) -> MachineSpeed | None:
    """Measure a CUDA device in some tens of milliseconds; None on another device, or where memory is short."""
    if device.type != "cuda":
        return None
    try:
        return speed_of(device, dtype, _cuda_seconds, _COPIED_BYTES, _MATRIX_SIZE)
    except Exception as error:
        if judge(error).reason is FinishReason.OUT_OF_MEMORY:
            return None
        raise
    finally:
        release_cached_memory(device)


def speed_of(
    device: torch.device,
    dtype: torch.dtype,
    seconds_of: Callable[[Callable[[], object]], float],
    copied_bytes: int,
    matrix_size: int,
) -> MachineSpeed:
    """The measurement itself: the best of a few copies and of a few square products.

    Args:
        device: any device.
        dtype: of the product.
        seconds_of: runs what it is given, and says how long the device took.
        copied_bytes: how much one copy reads.
        matrix_size: rows and columns of the matrices.
    """

    def best_seconds(run: Callable[[], object]) -> float:
        waking = 0.0  # the first runs load libraries and choose a kernel, and raise the clocks of a device that slept
        for _ in range(_MOST_WAKING_RUNS):
            waking += seconds_of(run)
            if waking >= _WAKING_SECONDS:
                break
        return min(seconds_of(run) for _ in range(_REPEATS))

    source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = best_seconds(lambda: target.copy_(source))
    # Not zeros: a device draws less power for them, and runs faster than it ever will.
    left = torch.rand(matrix_size, matrix_size, device=device).to(dtype) - 0.5
    right, product = left.t().contiguous(), torch.empty_like(left)
    multiplying = best_seconds(lambda: torch.mm(left, right, out=product))
    return MachineSpeed(2 * copied_bytes / copying, 2 * matrix_size**3 / multiplying)


def _cuda_seconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


# -- memory -----------------------------------------------------------------------------------------------------------


def free_device_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that nobody holds, this process' allocator included."""
    release_cached_memory(device)
    return int(torch.cuda.mem_get_info(device)[0])


def peak_memory_of(run: Callable[[], object], device: torch.device) -> int:
    """Bytes of a CUDA device that a call has allocated at its peak, beyond what was allocated before."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def release_cached_memory(device: torch.device) -> None:
    """Give back what torch's allocator keeps of a CUDA device. Waits for the device: not for the path of a step."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def end_failed_capture(pool: Any) -> None:
    """Tell torch's allocator that the recording of a graph into a pool is over, after it failed.

    Torch before 2.12 forgets it, and then neither gives back cached memory nor lets `empty_cache` pass
    (https://github.com/pytorch/pytorch/pull/180395).

    Args:
        pool: from `torch.cuda.graph_pool_handle`.
    """
    with contextlib.suppress(RuntimeError, AttributeError):  # it did not forget
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


def prefer_growing_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's CUDA allocator grow its segments and give back pages from their middle, unless the user set it.

    Joining layers frees weights between others that stay; of fixed segments those holes would be lost to the KV cache.
    Torch reads the variable when it first allocates on a device. CUDA graphs may use such segments, or do without
    (https://github.com/pytorch/pytorch/pull/128068).
    """
    if not any(name in environment for name in _ALLOCATOR_VARIABLES):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
