"""What this machine can do: bytes a second read from memory, and floating-point operations a second in a product.

    in   {"device": "cpu", "dtype": "bfloat16", "threads": 2}
    out  {"bandwidth": 2.5e10, "flops": 1.9e12, "versions": {...}}

Bandwidth: the sum over a buffer far larger than any cache, by all threads. Arithmetic: the best of products of several
shapes, with the weights in the layout that the library prefers where it offers one.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

_BUFFER_BYTES = 1 << 30
_SECONDS = 0.6  # for each measurement; the best run of it counts
_ROWS = (64, 128, 256, 512)
_WIDTHS = ((1536, 1536), (4096, 1536), (1536, 4096))  # (out, in)


def best_seconds(work: Callable[[], Any], wait: Callable[[], None], seconds: float = _SECONDS) -> float:
    """The shortest of as many runs as fit the time, at least three."""
    best, ends, count = float("inf"), time.perf_counter() + seconds, 0
    work()
    while count < 3 or time.perf_counter() < ends:
        wait()
        started = time.perf_counter()
        work()
        wait()
        best, count = min(best, time.perf_counter() - started), count + 1
    return best


def measure(device: str, dtype: str, threads: int) -> dict[str, float]:
    """Both figures."""
    import torch

    torch.set_num_threads(threads)
    wait: Callable[[], None] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    with torch.inference_mode():
        buffer = torch.ones(_BUFFER_BYTES // 4, dtype=torch.float32, device=device)
        bandwidth = buffer.numel() * 4 / best_seconds(buffer.sum, wait)
        del buffer
        flops = 0.0
        for rows in _ROWS:
            for out, width in _WIDTHS:
                x = torch.randn(rows, width, device=device).to(getattr(torch, dtype))  # [rows, width]
                weight = torch.randn(out, width, device=device).to(getattr(torch, dtype))  # [out, width]
                for work in _products(torch, x, weight):
                    with contextlib.suppress(RuntimeError):  # no packed product of this type on this CPU
                        flops = max(flops, 2 * rows * out * width / best_seconds(work, wait, _SECONDS / 6))
    return {"bandwidth": bandwidth, "flops": flops}


def _products(torch: Any, x: Any, weight: Any) -> list[Callable[[], Any]]:
    """Ways to compute x @ weight.T: plain, and with oneDNN's own layout on a CPU that has it."""
    works: list[Callable[[], Any]] = [lambda: torch.nn.functional.linear(x, weight)]
    if x.device.type == "cpu" and torch.backends.mkldnn.is_available():
        with contextlib.suppress(RuntimeError, AttributeError):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.to_mkldnn(), x.shape[0])
            works.append(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    return works


def main() -> None:
    """One question from stdin, one answer to stdout."""
    question = json.loads(sys.stdin.readline())
    import torch

    device = question["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    answer: dict[str, Any] = measure(device, question["dtype"], question["threads"])
    answer |= {"device": torch.cuda.get_device_name() if device.startswith("cuda") else device}
    sys.stdout.write(json.dumps({**answer, "versions": {"torch": torch.__version__}}) + "\n")


if __name__ == "__main__":
    main()
