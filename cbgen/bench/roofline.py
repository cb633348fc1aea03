"""The fastest that a workload can run on this machine: two bounds from exact lengths, bandwidth and arithmetic.

Enters: the model's sizes, each row's lengths, the slots, and what a probe of the machine measured. Leaves: seconds.
Pessimistic: memory and arithmetic one after the other, which is what an engine without overlap can reach; optimistic:
both at once. Neither counts attention's arithmetic, sampling, or the host.

    weights     steps x bytes of weights / bandwidth
    KV cache    bytes a token x positions read by decode steps / bandwidth
    arithmetic  2 x weights x tokens computed / FLOP/s; the output head only for tokens that are sampled
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, in the dtype it runs in.

    Attributes:
        layer_weights: parameters of all layers, each used once a token.
        head_weights: parameters of the output head.
        itemsize: bytes of a weight and of a KV element.
    """

    layer_weights: int
    head_weights: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    vocab_size: int = 0

    @property
    def weight_bytes(self) -> int:
        """What a step reads."""
        return (self.layer_weights + self.head_weights) * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """KV cache of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize


@dataclass(frozen=True, slots=True)
class Machine:
    """What the probe measured: bytes a second read from memory, floating-point operations a second in the dtype."""

    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds of a job. `num_tokens` are those it emits."""

    num_tokens: int
    weights_seconds: float
    kv_seconds: float
    arithmetic_seconds: float

    @property
    def pessimistic_seconds(self) -> float:
        return self.weights_seconds + self.kv_seconds + self.arithmetic_seconds

    @property
    def optimistic_seconds(self) -> float:
        return max(self.weights_seconds + self.kv_seconds, self.arithmetic_seconds)

    @property
    def pessimistic(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.pessimistic_seconds

    @property
    def optimistic(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.optimistic_seconds


def bound(
    shape: ModelShape,
    machine: Machine,
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    slots: int,
    cached_tokens: int = 0,
) -> Bound:
    """Bounds of one job.

    Args:
        shape: the model.
        machine: what it runs on.
        prompt_lengths: [N] prompt tokens.
        lengths: [N] tokens to emit, each at least 1.
        slots: rows that generate at once.
        cached_tokens: prompt tokens that need not be computed.
    """
    computed = sum(prompt_lengths) - cached_tokens + sum(n - 1 for n in lengths)  # the last token is never fed back
    positions = sum((n - 1) * p + n * (n - 1) // 2 for p, n in zip(prompt_lengths, lengths, strict=True))
    flop = 2 * shape.layer_weights * computed + 2 * shape.head_weights * sum(lengths)
    return Bound(
        num_tokens=sum(lengths),
        weights_seconds=continuous_steps(lengths, slots) * shape.weight_bytes / machine.bandwidth,
        kv_seconds=shape.kv_bytes * positions / machine.bandwidth,
        arithmetic_seconds=flop / machine.flops,
    )


def continuous_steps(lengths: Sequence[int], slots: int) -> int:
    """Steps when each slot takes the next row, in the given order, as soon as its own has ended."""
    ends = [0] * min(slots, max(len(lengths), 1))
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def static_steps(lengths: Sequence[int], slots: int) -> int:
    """Steps when a batch of rows starts together and the next one waits for its longest."""
    return sum(max(lengths[start : start + slots]) for start in range(0, len(lengths), slots))
