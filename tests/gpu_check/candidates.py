"""The operators that are put to the test: Triton's, as the engine would choose them for this device."""

from __future__ import annotations

from typing import Any

import torch

from cbgen.engine.operators.base import Operators
from cbgen.engine.operators.triton import TritonOperators
from tests.gpu_check.context import Context

_REHEARSED = (9, 0), 132  # in a dry run tables and splits are those of an H200


class WrongOperators:
    """The same with one operator that answers wrongly."""

    def __init__(self, operators: Operators, wrong: str) -> None:
        self._operators, self._wrong = operators, wrong

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._operators, name)
        if name != self._wrong:
            return operator
        return lambda *arguments, **options: operator(*arguments, **options) + 1


def candidate(context: Context) -> Operators:
    """Triton's kernels, in a dry run through its interpreter, where `context.breaks` asks for it with a fault."""
    capability, num_multiprocessors = _of_gpu(context.device) if context.is_cuda else _REHEARSED
    operators: Any = TritonOperators(capability, num_multiprocessors)
    return WrongOperators(operators, context.breaks) if context.breaks else operators


def _of_gpu(device: torch.device) -> tuple[tuple[int, int], int]:
    properties = torch.cuda.get_device_properties(device)
    return torch.cuda.get_device_capability(device), properties.multi_processor_count
