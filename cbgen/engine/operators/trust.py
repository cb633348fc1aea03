"""Operators are trusted after they have given the reference's answers to tiny problems; those that do not are replaced.

Enters: operators, and the shape of the model they are to serve. Leaves: the same operators where all went well, else
the reference in the place of each that differed or failed, and one sentence that says which and why. A kernel that
this compiler or GPU gets wrong so costs speed, never a wrong text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cbgen.engine.operators.base import Operators
from cbgen.engine.operators.reference import ReferenceOperators
from cbgen.engine.operators.trials import ModelShape, make_trials
from cbgen.errors import CbgenError

OPERATOR_NAMES = (
    "rms_norm",
    "activation_mul",
    "rope_and_store",
    "store",
    "attention",
    "argmax",
    "draw",
    "sample",
    "gather_step",
    "gather_sampling",
    "advance",
)
# Largest |difference| / (1 + |expected|). Rounding is some tenths of it; a wrong mask or index is of the order of 1.
_TOLERANCE = {torch.float32: 5e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SLOW_SECONDS = 5.0  # trials take less, unless kernels are compiled for them


class MixedOperators:
    """See `Operators`: each one out of one of two sets; a call costs what it costs there.

    Attributes:
        replaced: names of those that are the other's.
    """

    def __init__(self, operators: Operators, other: Operators, replaced: frozenset[str]) -> None:
        self.name = operators.name
        self.replaced = replaced
        self.is_capturable = operators.is_capturable and not replaced & {"attention", "sample"}

        def chosen(name: str) -> Operators:
            return other if name in replaced else operators

        self.rms_norm = chosen("rms_norm").rms_norm
        self.activation_mul = chosen("activation_mul").activation_mul
        self.rope_and_store = chosen("rope_and_store").rope_and_store
        self.store = chosen("store").store
        self.attention = chosen("attention").attention
        self.argmax = chosen("argmax").argmax
        self.draw = chosen("draw").draw
        self.sample = chosen("sample").sample
        self.gather_step = chosen("gather_step").gather_step
        self.gather_sampling = chosen("gather_sampling").gather_sampling
        self.advance = chosen("advance").advance


def trusted(operators: Operators, shape: ModelShape, notice: Callable[[str], None]) -> Operators:
    """The operators, without those that fail a trial.

    Args:
        operators: any; the reference is taken as it is.
        shape: of the model.
        notice: told once what was replaced and why, and once that kernels are compiled if that takes seconds.

    Raises:
        CbgenError: a kernel left the device unusable.
    """
    if type(operators) is ReferenceOperators:
        return operators
    reference = ReferenceOperators()
    faults = find_faults(operators, reference, shape, _Patience(notice))
    if not faults:
        return operators
    notice(_sentence(operators.name, faults))
    if faults.keys() == set(OPERATOR_NAMES):
        return reference
    return MixedOperators(operators, reference, frozenset(faults))


class _Patience:
    """Called after each trial; has a word when they have taken seconds."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._start = time.perf_counter()
        self._has_spoken = False

    def __call__(self) -> None:
        if not self._has_spoken and time.perf_counter() - self._start > _SLOW_SECONDS:
            self._notice("compiling operators for this GPU (once)")
            self._has_spoken = True


@torch.inference_mode()
def find_faults(
    operators: Operators, reference: Operators, shape: ModelShape, after_trial: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Name of each operator that fails a trial -> its first fault, in few words.

    Raises:
        CbgenError: after a fault the reference does not work either: what it broke cannot be mended in this process.
    """
    faults: dict[str, str] = {}
    for trial in make_trials(shape):
        if trial.operator in faults:
            continue
        try:
            expected = trial.run(reference)
        except Exception as error:
            if not faults:
                raise
            operator, fault = next(reversed(faults.items()))
            raise CbgenError(
                f"the operator {operator} of {operators.name} left the device unusable ({fault}); "
                f"run with --disable {operators.name}"
            ) from error
        try:
            actual = trial.run(operators)
            fault = _compare(expected, actual, _TOLERANCE[shape.dtype])
        except Exception as error:  # whatever a compiler or a driver may raise
            fault = _one_line(error)
        if fault:
            faults[trial.operator] = fault
        after_trial()
    return faults


def _compare(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], tolerance: float) -> str:
    """What is wrong with the first tensor that differs, or nothing."""
    for name, right in expected.items():
        value = actual[name]
        if value.shape != right.shape or value.dtype != right.dtype:
            return f"{name} {value.dtype} {list(value.shape)} in place of {right.dtype} {list(right.shape)}"
        if not right.is_floating_point():
            if not torch.equal(value, right):
                return f"other {name}"
            continue
        if not torch.equal(value.isnan(), right.isnan()):
            return f"NaN in {name}" if bool((value.isnan() & ~right.isnan()).any()) else f"{name} not all written"
        right = right.float()
        difference = ((value.float() - right).abs() / (1 + right.abs())).nan_to_num(0.0)  # NaN: in both, see above
        if float(difference.max()) > tolerance:
            return f"{name} off by {float(difference.max()):.2g}"
    return ""


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."


def _sentence(name: str, faults: Mapping[str, str]) -> str:
    by_fault: dict[str, list[str]] = {}
    for operator, fault in faults.items():
        by_fault.setdefault(fault, []).append(operator)
    listed = "; ".join(f"{', '.join(operators)} ({fault})" for fault, operators in by_fault.items())
    return f"plain torch in place of {name} operators that do not work here, so this run is slower: {listed}"
