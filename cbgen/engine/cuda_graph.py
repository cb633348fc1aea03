"""Steps recorded once as CUDA graphs and replayed: which shapes are recorded, and when.

A graph holds one shape, so a step runs in the graph of a shape that covers its own; the rest is padding. Recording one
takes time and memory, so it is done when a shape is wanted, the largest first: smaller ones then find room in the
memory of the first, which all share. Until a graph of its own pays, a step runs in a larger one that is there, if that
does not mean many more tokens of prompts.

Enters: the shape of a step, and what runs a shape. Leaves: the shape to fill, and what replays it. What records is
passed in: `CudaCapture` on a GPU, and anything that keeps the function itself where there is none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from cbgen.engine.containment import judge, root_cause
from cbgen.engine.machine_probe import end_failed_capture
from cbgen.engine.sequence import FinishReason
from cbgen.errors import CbgenError

Run = Callable[[], None]
Capture = Callable[[Run], Run]

MOST_GRAPHS = 64
_SHORTEST_CONTEXT = 512
_TOLERATED_PADDING = 1.125  # a graph for this many times the tokens is as good as one of their own
_MOST_PADDING = 1.5  # where there are prompts, a step in a graph for more tokens than this takes longer than without
_WANTED_TO_RECORD = 8  # steps that would have been better off with a graph of their own


class CaptureError(Exception):
    """A step cannot be recorded; the message says why. It can still be run."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Everything about a step that its kernels' launches depend on.

    Attributes:
        num_decodes: sequences with one token each, padding included.
        num_prefills, num_prefill_tokens: of the others.
        max_context_len: no sequence is longer.
    """

    num_decodes: int
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    max_context_len: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return self.num_decodes + self.num_prefills

    def covers(self, other: StepShape) -> bool:
        """Whether the other fits in. Steps with and without prompts have graphs of their own."""
        return (
            self.num_decodes >= other.num_decodes
            and self.num_prefills >= other.num_prefills
            and self.num_prefill_tokens >= other.num_prefill_tokens
            and self.max_context_len >= other.max_context_len
            and bool(self.num_prefills) == bool(other.num_prefills)
        )


def padded(shape: StepShape, max_context_len: int) -> StepShape:
    """The shape of the graph made for steps like this: finer for few rows, where padding would be a larger share."""
    context = min(_power_of_two(max(shape.max_context_len, _SHORTEST_CONTEXT)), max_context_len)
    num_decodes = padded_rows(shape.num_decodes)
    if not shape.num_prefills:
        return StepShape(num_decodes, max_context_len=context)
    num_prefills = max(8, _power_of_two(shape.num_prefills))
    return StepShape(num_decodes, num_prefills, padded_tokens(shape.num_prefill_tokens), context)


def padded_rows(num_rows: int) -> int:
    """1, 2, 4, every 8 to 64, every 16 to 256, every 32 to 512, every 64 from there."""
    sizes = chain((1, 2, 4), range(8, 64, 8), range(64, 256, 16), range(256, 512, 32))
    return next((size for size in sizes if size >= num_rows), -(-num_rows // 64) * 64)


def padded_tokens(num_tokens: int) -> int:
    """Every 64 to 512, every 128 to 1,024, every 256 to 2,048, and so on: an eighth at most in a large step."""
    step = max(64, _power_of_two(num_tokens) // 8)
    return -(-num_tokens // step) * step


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


class GraphCache:
    """The graphs of one engine.

    Args:
        capture: records what it is given, after it ran once.
        blank: fills the input of a shape with padding; called before anything is recorded.
        run: runs a step of a shape on whatever its input holds.
        max_num_seqs: decodes of the largest step.
        max_context_len: of any sequence.

    Attributes:
        reason: why nothing can be recorded; empty where it works. Too little memory is no reason: what is recorded
            by then stays.
    """

    def __init__(
        self,
        capture: Capture,
        blank: Callable[[StepShape], None],
        run: Callable[[StepShape], None],
        max_num_seqs: int,
        max_context_len: int,
    ) -> None:
        self.reason = ""
        self._capture = capture
        self._blank = blank
        self._run = run
        self._max_num_seqs = max_num_seqs
        self._max_context_len = max_context_len
        self._graphs: dict[StepShape, Run] = {}
        self._num_wanted: Counter[StepShape] = Counter()
        self._is_full = False

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, shape: StepShape) -> tuple[StepShape, Run | None]:
        """The shape that the input of a step has to be padded to, and what replays it; None if there is no graph."""
        best = padded(shape, self._max_context_len)
        if not shape.num_decodes or self.reason:
            return shape, None
        if best not in self._graphs:
            self._consider(best)
        # Rows of decodes cost little. Tokens of prompts are arithmetic: many of padding cost more than launches do.
        most_tokens = _MOST_PADDING * best.num_tokens if shape.num_prefills else math.inf
        covering = (s for s in self._graphs if s.covers(shape) and s.num_tokens <= most_tokens)
        found = min(covering, key=_cost, default=None)
        return (shape, None) if found is None else (found, self._graphs[found])

    def _consider(self, best: StepShape) -> None:
        """Record what is worth it now."""
        if self._is_full or len(self._graphs) >= MOST_GRAPHS:
            return
        covering = [shape for shape in self._graphs if shape.covers(best)]
        if any(shape.num_tokens <= _TOLERATED_PADDING * best.num_tokens for shape in covering):
            return
        self._num_wanted[best] += 1
        if not covering and not best.num_prefills:  # the first of its context: the largest
            self.record(StepShape(padded_rows(self._max_num_seqs), max_context_len=best.max_context_len))
        elif self._num_wanted[best] >= _WANTED_TO_RECORD:
            self.record(best)

    def record(self, shape: StepShape) -> None:
        """Record a step of a shape, if there is memory for it."""
        self._blank(shape)
        try:
            self._graphs[shape] = self._capture(lambda: self._run(shape))
        except Exception as error:
            if _is_short_of_memory(error):
                self._is_full = True
            else:  # be it the recording or the step itself: that will be seen when it runs unrecorded
                self.reason = str(error) if isinstance(error, CaptureError) else root_cause(error)
                self._graphs.clear()


def _is_short_of_memory(error: Exception) -> bool:
    """Raises CbgenError where the device is broken; after a `CaptureError` it is well, whatever its text says."""
    try:
        return judge(error).reason is FinishReason.OUT_OF_MEMORY
    except CbgenError:
        if isinstance(error, CaptureError):
            return False
        raise


def _cost(shape: StepShape) -> tuple[int, int]:
    return shape.num_tokens + shape.num_prefills, shape.max_context_len


class CudaCapture:
    """Records on the current stream; all recordings share one memory pool, for they are replayed one at a time."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch names its type differently from release to release
        # Torch from 2.12 on frees the cuBLAS workspace of a stream with any graph that was recorded on it, while others
        # still use it (https://github.com/pytorch/pytorch/issues/193402): so what failed lives as long as what did not.
        self._failed: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Run) -> Run:
        """Run it once, so that what is compiled or allocated at first use is there, then record it.

        Raises:
            CaptureError: it does something that a graph cannot hold.
        """
        run()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                run()
        except Exception as error:
            self._failed.append(graph)
            torch.cuda.synchronize()  # a device that does not survive this raises here
            end_failed_capture(self._pool)
            raise CaptureError(root_cause(error)) from error
        replay: Run = graph.replay
        return replay
