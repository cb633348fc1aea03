"""Which operators a device and a run's settings get."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch

from cbgen.engine.native.build import NativeBuildError
from cbgen.engine.native.library import open_library
from cbgen.engine.operators.base import Operators
from cbgen.engine.operators.native import NativeOperators
from cbgen.engine.operators.reference import ReferenceOperators


def choose_operators(device: torch.device, disabled: Set[str], notice: Callable[[str], None]) -> Operators:
    """The fastest operators there are; the reference, with a word about it, where the native ones cannot be had.

    Args:
        device: where the model is.
        disabled: names out of `OPTIMIZATIONS`.
        notice: told what takes seconds, and once why a run will be slower than it could be.
    """
    if device.type != "cpu" or "native" in disabled:
        return ReferenceOperators()
    try:
        return NativeOperators(open_library(notice))
    except NativeBuildError as error:
        notice(f"operators are not compiled for this CPU, so this run is slower: {error}")
        return ReferenceOperators()
