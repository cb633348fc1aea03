"""The scheduler alone, with steps launched ahead: no row reads, writes or is told what is not its own."""

import numpy as np
import pytest

from tests.engine.jobs import Row, few_shot_rows, long_tail_rows, run_in_rounds


def random_rows(rng, num_rows):
    shared = rng.integers(10, 30_000, 70)
    rows = []
    for _ in range(num_rows):
        prompt = rng.integers(10, 30_000, rng.integers(1, 60))
        if rng.random() < 0.4:
            prompt = np.concatenate([shared[: rng.integers(16, 71)], prompt])
        length = int(rng.integers(1, 40))
        cap = None if rng.random() < 0.4 else length + int(rng.integers(0, 20))
        rows.append(Row(prompt.astype(np.int32), length, cap))
    return rows


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_rounds_of_random_lengths(seed, mixed):
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, 60)
    slots = int(rng.integers(1, 12))
    outcome = run_in_rounds(
        rows, slots=slots, budget=slots + int(rng.integers(0, 90)), num_blocks=int(rng.choice([13, 20, 40, 400])),
        steps=int(rng.choice([1, 2, 5, 16])), ahead=int(rng.integers(0, 3)), seed=seed, mixed=mixed,
        order=str(rng.choice(["file", "longest"])), prediction=bool(rng.random() < 0.5),
    )  # fmt: skip
    assert outcome.num_steps > 0


def test_rows_are_preempted_between_rounds():
    rng = np.random.default_rng(0)
    outcome = run_in_rounds(
        random_rows(rng, 80), slots=8, budget=64, num_blocks=16, steps=4, ahead=1, seed=0, prediction=False
    )
    assert outcome.num_preempted > 5


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_long_tails_and_shared_prefixes(batching):
    rng = np.random.default_rng(3)
    rows = long_tail_rows(rng, 60, scale=0.2, cap=900) + few_shot_rows(rng, groups=2, rows_per_group=10)
    run_in_rounds(rows, slots=8, budget=256, num_blocks=700, steps=8, ahead=1, seed=1, batching=batching)


def test_prompts_are_read_apart_when_a_part_of_the_slots_is_free():
    rows = long_tail_rows(np.random.default_rng(1), 300, scale=0.1)
    mixed = run_in_rounds(rows, slots=64, budget=512, num_blocks=4000, steps=1, ahead=1, seed=0)
    apart = run_in_rounds(rows, slots=64, budget=512, num_blocks=4000, steps=1, ahead=1, seed=0, mixed=False)
    assert mixed.num_steps < apart.num_steps < 2 * mixed.num_steps
