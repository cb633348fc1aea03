"""Bounds against numbers computed by hand, and steps against the real scheduler."""

import random

import pytest

from cbgen.bench.roofline import Machine, ModelShape, bound, continuous_steps, static_steps
from cbgen.bench.simulate import Workload, simulate

SHAPE = ModelShape(
    layer_weights=1000, head_weights=100, num_layers=2, num_kv_heads=3, head_dim=4, itemsize=2, vocab_size=10
)


def test_bytes_of_weights_and_of_a_cached_token():
    assert SHAPE.weight_bytes == 2200
    assert SHAPE.kv_bytes == 2 * 2 * 3 * 4 * 2


def test_kv_bytes_of_published_models():
    smollm2 = ModelShape(0, 0, 30, 3, 64, 2)
    llama_8b = ModelShape(0, 0, 32, 8, 128, 2)
    assert (smollm2.kv_bytes, llama_8b.kv_bytes) == (23_040, 131_072)


def test_a_job_computed_by_hand():
    limit = bound(SHAPE, Machine(bandwidth=1e6, flops=1e7), prompt_lengths=[5, 7], lengths=[3, 1], slots=1)
    assert limit.num_tokens == 4
    assert limit.weights_seconds == pytest.approx(4 * 2200 / 1e6)  # one slot: 3 steps, then 1
    # Row 0 decodes twice, over 5 + 1 and 5 + 2 positions; row 1 has its only token from the prompt.
    assert limit.kv_seconds == pytest.approx((6 + 7) * 96 / 1e6)
    # Tokens computed: 12 of prompts, and 2 that were emitted and fed back; the head for 4.
    assert limit.arithmetic_seconds == pytest.approx((2 * 1000 * 14 + 2 * 100 * 4) / 1e7)
    total = 0.0088 + 0.001248 + 0.00288
    assert limit.pessimistic_seconds == pytest.approx(total)
    assert limit.pessimistic == pytest.approx(4 / total)
    assert limit.optimistic == pytest.approx(4 / (0.0088 + 0.001248))


def test_cached_tokens_need_no_arithmetic():
    machine = Machine(1e6, 1e7)
    with_cache, without = (bound(SHAPE, machine, [8, 8], [1, 1], 2, cached) for cached in (6, 0))
    assert without.arithmetic_seconds - with_cache.arithmetic_seconds == pytest.approx(6 * 2 * 1000 / 1e7)


def test_arithmetic_decides_the_optimistic_bound_when_it_takes_longest():
    limit = bound(SHAPE, Machine(1e9, 1e3), [5], [3], 1)
    assert limit.optimistic_seconds == limit.arithmetic_seconds


def test_steps_by_hand():
    lengths = [100, 20, 50, 200, 30]
    assert (continuous_steps(lengths, 4), static_steps(lengths, 4)) == (200, 230)
    assert continuous_steps([20, 200] * 50, 4) == 2840
    assert continuous_steps(lengths, 1) == static_steps(lengths, 1) == 400
    assert continuous_steps([7], 64) == 7


def test_steps_are_those_of_the_real_scheduler():
    for seed in range(25):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 30) for _ in range(rng.randint(1, 40))]
        slots = rng.randint(1, 8)
        rows = len(lengths)
        workload = Workload(
            lengths=lengths, prompt_lengths=[1] * rows, arrivals_ms=[0.0] * rows, slots=slots, step_ms=1.0
        )
        assert continuous_steps(lengths, slots) == simulate(workload, "continuous").num_steps
        assert static_steps(lengths, slots) == simulate(workload, "static").num_steps
