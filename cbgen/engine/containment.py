"""What a failed forward pass means, and how large the next one may be.

Enters: the exception of a step. Leaves: a `Failure`, which names the reason a row would end with if it failed like this
alone; or an exception that ends the run, when no row is to blame. Knows exceptions by name and text, since every
device has classes of its own for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from cbgen.engine.sequence import FinishReason
from cbgen.errors import CbgenError, ModelError

_OUT_OF_MEMORY_TEXTS = (
    "out of memory",  # CUDA, HIP, XPU and MPS allocators, the CUDA driver
    "can't allocate memory",  # torch's CPU allocator
    "cannot allocate memory",  # errno 12
    "not enough memory",  # torch's CPU allocator on other systems
    "alloc_failed",  # cuBLAS and cuDNN workspaces
    "cublas_status_not_initialized",  # what cuBLAS says when there is no memory for a handle
)
_BROKEN_DEVICE_TEXTS = (
    *("cuda error", "cuda driver error", "hip error", "device-side assert"),
    *("triton error [cuda]", "illegal memory access", "misaligned address", "unspecified launch failure"),
)
_CAPTURE_TEXT = "captur"  # a graph cannot be recorded; the device is well
_LONGEST_DETAIL = 300
_GOOD_STEPS_TO_DOUBLE = 64
_ROWS_IN_SUCCESSION = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a forward pass was given up. Holds no traceback: its frames would keep the memory that is short."""

    reason: FinishReason
    detail: str


def judge(error: Exception) -> Failure:
    """What the exception of a forward pass, or of sampling, says.

    Raises:
        CbgenError: the device is broken; nothing runs on it any more in this process.
    """
    detail = _first_line(error)
    text = str(error).lower()
    for cause in causes(error):  # what ended a recording says so and no more; why is in what came before it
        if isinstance(cause, MemoryError) or any(part in str(cause).lower() for part in _OUT_OF_MEMORY_TEXTS):
            return Failure(FinishReason.OUT_OF_MEMORY, _first_line(cause))
    is_broken = type(error).__name__ == "AcceleratorError" or any(part in text for part in _BROKEN_DEVICE_TEXTS)
    if is_broken and _CAPTURE_TEXT not in text:
        raise CbgenError(
            f"the device failed ({detail}); finished rows are kept, run the same command again to continue"
        )
    return Failure(FinishReason.ENGINE_ERROR, detail)


@contextlib.contextmanager
def short_memory_named(message: str) -> Iterator[None]:
    """Where memory runs out before the first step, that is one sentence.

    Raises:
        ModelError: with the message, and what was said of the memory.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, CbgenError) or judge(error).reason is not FinishReason.OUT_OF_MEMORY:
            raise
        raise ModelError(f"{message} ({judge(error).detail})") from error


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, then those that it came from, the last being the first that happened."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def root_cause(error: BaseException) -> str:
    """The first of an exception's causes in one short line."""
    *_, first = causes(error)
    return _first_line(first)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:_LONGEST_DETAIL]


@dataclass(slots=True)
class TokenLimit:
    """How many tokens one forward pass may have: the step's budget, and less while memory is short.

    Attributes:
        configured: token budget of a step.
        value: in force now.
    """

    configured: int
    value: int = field(init=False)
    _num_good_steps: int = 0

    def __post_init__(self) -> None:
        self.value = self.configured

    def halve(self, num_tokens: int) -> None:
        """A pass of `num_tokens`, at least 2, ran out of memory."""
        self.value = num_tokens // 2
        self._num_good_steps = 0

    def restore(self) -> None:
        """It was one row's fault, which is gone."""
        self.value = self.configured

    def step_done(self) -> None:
        """Memory may have been short for a while only: grow again, little by little."""
        if self.value < self.configured:
            self._num_good_steps += 1
            if self._num_good_steps >= _GOOD_STEPS_TO_DOUBLE:
                self.value = min(2 * self.value, self.configured)
                self._num_good_steps = 0


class RowsInSuccession:
    """Tells rows that break the model from a model that breaks on every row."""

    def __init__(self) -> None:
        self._failed: set[int] = set()  # rows that failed alone since anything ran; samples of a row count once

    def step_done(self, failed: dict[int, str], *, anything_ran: bool) -> None:
        """Account for a step.

        Args:
            failed: rows that failed alone in it, with what was wrong.
            anything_ran: whether any part of it went well.

        Raises:
            CbgenError: several rows have failed in succession, and nothing went well in between.
        """
        if anything_ran:
            self._failed.clear()
            return
        self._failed.update(failed)
        if len(self._failed) >= _ROWS_IN_SUCCESSION:
            detail = next(reversed(failed.values()))
            raise CbgenError(
                f"the model fails on every row ({detail}); finished rows are kept; try another --dtype or --device, "
                "then run again to continue"
            )
