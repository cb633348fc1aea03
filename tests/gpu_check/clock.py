"""Seconds of work on a device, and how much of a stretch of time the device was busy.

On CUDA by events, which the device itself stamps; on CPU by the host's clock.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Work = Callable[[], Any]
_DEVICE_ACTIVITIES = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories in Kineto's trace
_HOST_ACTIVITIES = {"cpu_op"}
_NUM_NAMES = 12  # kernels that are named, those of most time


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Give back what no longer lives: an engine's cache and graphs, before the next one measures what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def median_seconds(work: Work, device: torch.device, *, repeats: int = 10, before: Work | None = None) -> float:
    """Median over runs, after two that warm up.

    Args:
        work: launched once a run.
        device: where it runs.
        repeats: runs that count.
        before: launched before each run and not timed, such as what empties a cache.
    """
    for _ in range(2):
        work()
    synchronize(device)
    timed = _by_events if device.type == "cuda" else _by_host
    return statistics.median(timed(work, before) for _ in range(repeats))


def _by_events(work: Work, before: Work | None) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if before is not None:
        before()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000  # it is in milliseconds


def _by_host(work: Work, before: Work | None) -> float:
    if before is not None:
        before()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def captured(work: Work, device: torch.device) -> Work:
    """The same launches as one CUDA graph, so that the host's time to launch them does not count; on CPU as it is."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is compiled or allocated at first use may not be captured
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@dataclass(frozen=True, slots=True)
class Trace:
    """What a profiler saw.

    Attributes:
        span_seconds: from the start of the first activity of the device to the end of the last.
        busy_seconds: of these, with at least one activity.
        shares: name -> share of all activities' time, the greatest first.
    """

    span_seconds: float
    busy_seconds: float
    num_activities: int
    shares: dict[str, float]

    @property
    def idle_share(self) -> float | None:
        """None where nothing was seen."""
        return 1 - self.busy_seconds / self.span_seconds if self.span_seconds else None


def trace(work: Work, device: torch.device) -> Trace:
    """Run work under torch's profiler (Kineto) and read when the device was busy; of CPU, when operators ran.

    No empty session comes before, as is sometimes advised where graphs were recorded earlier: on CUDA 13 profilers have
    seen no kernel at all after one.
    """
    from torch.profiler import ProfilerActivity, profile

    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        work()
        synchronize(device)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return summarize(events, _DEVICE_ACTIVITIES if is_cuda else _HOST_ACTIVITIES)


def summarize(events: Iterable[dict[str, Any]], categories: set[str]) -> Trace:
    """Of a Chrome trace: complete events (`"ph": "X"`) of these categories, times in microseconds."""
    intervals: list[tuple[float, float]] = []
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in categories:
            start, duration = float(event["ts"]), float(event.get("dur", 0))
            intervals.append((start, start + duration))
            seconds[str(event["name"])[:80]] += duration / 1e6
    if not intervals:
        return Trace(0.0, 0.0, 0, {})
    total = sum(seconds.values()) or 1.0
    most = sorted(seconds.items(), key=lambda item: -item[1])[:_NUM_NAMES]
    return Trace(
        span_seconds=(max(stop for _, stop in intervals) - min(start for start, _ in intervals)) / 1e6,
        busy_seconds=covered(intervals) / 1e6,
        num_activities=len(intervals),
        shares={name: round(value / total, 4) for name, value in most},
    )


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
