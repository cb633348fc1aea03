"""Which operators a device and a run's settings get."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Set

import torch

from cbgen.engine.native.build import NativeBuildError
from cbgen.engine.native.library import open_library
from cbgen.engine.operators.base import Operators
from cbgen.engine.operators.native import NativeOperators
from cbgen.engine.operators.reference import ReferenceOperators
from cbgen.engine.operators.trials import ModelShape
from cbgen.engine.operators.trust import trusted


def choose_operators(
    device: torch.device, disabled: Set[str], notice: Callable[[str], None], shape: ModelShape | None = None
) -> Operators:
    """The fastest operators there are; the reference, with a word about it, where faster ones cannot be had.

    Args:
        device: where the model is.
        disabled: names out of `OPTIMIZATIONS`.
        notice: told what takes seconds, and once why a run will be slower than it could be.
        shape: of the model; kernels for CUDA are tried out on it first, and without it there are none.
    """
    if device.type == "cpu" and "native" not in disabled:
        return _native(notice)
    if device.type == "cuda" and "triton" not in disabled and shape is not None:
        return _triton(device, shape, notice)
    return ReferenceOperators()


def _native(notice: Callable[[str], None]) -> Operators:
    try:
        return NativeOperators(open_library(notice))
    except NativeBuildError as error:
        notice(f"operators are not compiled for this CPU, so this run is slower: {error}")
        return ReferenceOperators()


def _triton(device: torch.device, shape: ModelShape, notice: Callable[[str], None]) -> Operators:
    if importlib.util.find_spec("triton") is None:
        notice("Triton is not installed, so this run is slower: pip install triton")
        return ReferenceOperators()
    # Triton 3.10 no longer contracts a * b + c unless told to: the same sums with every version.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    try:
        # Only here: where there is no CUDA, there is no Triton.
        from cbgen.engine.operators.triton import TritonOperators

        properties = torch.cuda.get_device_properties(device)
        operators = TritonOperators((properties.major, properties.minor), properties.multi_processor_count)
    except Exception as error:  # a Triton that does not go with this torch or driver
        notice(f"Triton does not work here, so this run is slower: {type(error).__name__}: {error}")
        return ReferenceOperators()
    return trusted(operators, shape, notice)
