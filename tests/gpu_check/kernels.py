"""Stage `kernels`: every operator on the device against plain answers, over dtypes, head sizes and options.

Attention is compared with the naive float64 answer that its tests on CPU have, everything else with the reference on
the same values in float32 (its own arithmetic) and without rounding in between. An error is stated in tolerances:
above 1 is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cbgen.engine.operators.base import Operators
from tests.gpu_check.candidates import candidate
from tests.gpu_check.context import Context


@dataclass(frozen=True, slots=True)
class Finding:
    """How far an operator was off.

    Attributes:
        worst: the greatest error in tolerances; infinite for NaN where there should be none.
        error: the greatest absolute one; of ids, how many differ.
    """

    worst: float
    error: float


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison; `compare` is called with the operators and the device."""

    operator: str
    name: str
    dtype: torch.dtype
    compare: Callable[[Operators, torch.device], Finding]


def run(context: Context) -> None:
    from tests.gpu_check.kernel_checks import all_checks
    from tests.gpu_check.slot_checks import slot_checks

    operators = candidate(context)
    checks = [*all_checks(dry=context.dry), *slot_checks(dry=context.dry)]
    context.facts(operators=operators.name, num_checks=len(checks))
    for check in context.mine(checks):
        if context.seconds_left < 0:
            context.case(operator=check.operator, name=check.name, ok=False, error="no time")
            continue
        started = time.monotonic()
        case: dict[str, Any] = {
            "operator": check.operator,
            "name": check.name,
            "dtype": str(check.dtype).removeprefix("torch."),
        }
        try:
            with torch.inference_mode():
                finding = check.compare(operators, context.device)
            case |= {"worst": finding.worst, "error": finding.error, "ok": finding.worst <= 1}
        except Exception as error:
            case |= {"worst": None, "error": f"{type(error).__name__}: {error}"[:400], "ok": False}
        context.case(**case, seconds=round(time.monotonic() - started, 2))


def difference(got: Tensor, expected: Tensor, *, ulps: float = 1, float32_ulps: float = 16) -> Finding:
    """Compare results. The tolerance of a value is in ulps of it and of a typical value of all: inner products are as
    exact as the larger of their terms.

    Args:
        got: of any float dtype.
        expected: of the same shape, in float32 or float64, on any device.
        ulps: the tolerance in 16 bits.
        float32_ulps: that of float32, where it is the order of sums that differs, and not one rounding at the end.
    """
    if got.shape != expected.shape:
        return Finding(float("inf"), float("inf"))
    if got.numel() == 0:
        return Finding(0.0, 0.0)
    actual, wanted = got.to("cpu", torch.float64), expected.to("cpu", torch.float64)
    typical = wanted.square().mean().sqrt()
    allowed = float32_ulps if got.dtype == torch.float32 else ulps
    tolerance = allowed * torch.finfo(got.dtype).eps * (wanted.abs() + typical)
    errors = (actual - wanted).abs()
    worst = (errors / tolerance.clamp_min(1e-30)).nan_to_num(float("inf"), float("inf")).max()
    return Finding(float(worst), float(errors.nan_to_num(float("inf"), float("inf")).max()))


def equal_ids(got: Tensor, expected: Tensor, *, most_different: float = 0.0) -> Finding:
    """Compare token ids. Draws may differ where a number falls between two sums that are rounded differently.

    Args:
        got, expected: [S].
        most_different: share of the rows that is let pass, one at least where it is not 0.
    """
    if got.shape != expected.shape:
        return Finding(float("inf"), float("inf"))
    count = int((got.cpu() != expected.cpu()).sum())
    allowed = max(1.0, most_different * len(expected)) if most_different else 0.5
    return Finding(count / allowed, count)


def exactly(*pairs: tuple[Tensor, Tensor]) -> Finding:
    """Every pair is the same, bit for bit."""
    count = sum(int((got.cpu() != expected.cpu()).sum()) for got, expected in pairs)
    return Finding(0.0 if count == 0 else float("inf"), count)


def together(*findings: Finding) -> Finding:
    """The worst of several."""
    return Finding(max(f.worst for f in findings), max(f.error for f in findings))
