"""Stage `machine`: what runs here, how fast it copies and multiplies. Other stages measure themselves against it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tests.gpu_check.clock import median_seconds
from tests.gpu_check.context import Context

_PACKAGES = ("torch", "triton", "transformers", "numpy", "accelerate")


def run(context: Context) -> None:
    context.facts(**_describe(context))
    with torch.inference_mode():
        copy = _copy_bytes_per_s(context)
        context.case(name="copy", gb_per_s=copy / 1e9)
        context.facts(copy_bytes_per_s=copy)
        read = _read_bytes_per_s(context)
        context.case(name="read", gb_per_s=read / 1e9)
        context.facts(read_bytes_per_s=read)
        for dtype, size in _products(context):
            flops = _flops(context, dtype, size)
            name = str(dtype).removeprefix("torch.")
            context.case(name=f"product {name}", size=size, tflops=flops / 1e12)
            context.facts(**{f"{name}_flops": flops})


def _describe(context: Context) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "device": platform.processor() or platform.machine(),
        "capability": None,
        "num_multiprocessors": None,
        "memory_bytes": None,
        "free_bytes": None,
        "l2_bytes": None,
    }
    return facts | (_describe_gpu(context.device) if context.is_cuda else {})


def _describe_gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "num_multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "free_bytes": torch.cuda.mem_get_info(device)[0],
        "l2_bytes": getattr(properties, "L2_cache_size", None),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _copy_bytes_per_s(context: Context) -> float:
    """Bytes read plus bytes written, of a copy far larger than any cache."""
    source = torch.ones((1 << 20) if context.dry else (1 << 30), dtype=torch.float32, device=context.device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), context.device, repeats=20)
    return 2 * source.numel() * source.itemsize / seconds


def _read_bytes_per_s(context: Context) -> float:
    source = torch.ones((1 << 20) if context.dry else (1 << 30), dtype=torch.float32, device=context.device)
    return source.numel() * source.itemsize / median_seconds(source.sum, context.device, repeats=20)


def _products(context: Context) -> list[tuple[torch.dtype, int]]:
    sizes = (128, 64) if context.dry else (8192, 4096)
    return [(torch.bfloat16, sizes[0]), (torch.float16, sizes[0]), (torch.float32, sizes[1])]


def _flops(context: Context, dtype: torch.dtype, size: int) -> float:
    """Of a square product of random numbers: zeros would be faster, since they cost less power."""
    left, right = (torch.randn(size, size, device=context.device).to(dtype) for _ in range(2))
    seconds = median_seconds(lambda: left @ right, context.device, repeats=20)
    return 2 * size**3 / seconds
