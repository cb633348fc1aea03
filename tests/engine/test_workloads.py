"""Whole jobs through the scheduler: nothing is lost, shared blocks hold what they should, and the policies pay."""

import numpy as np
import pytest

from cbgen.engine.waiting import ROWS_PER_SLOT
from tests.engine.jobs import Row, few_shot_rows, long_tail_rows, run_job, shareable


def random_rows(rng, num_rows=40):
    """Prompts that share beginnings of any length with one another, or are equal; some rows of several samples."""
    rows, known = [], [rng.integers(10, 99, 60)]
    while len(rows) < num_rows:
        base = known[rng.integers(len(known))]
        prompt = np.concatenate([base[: rng.integers(len(base) + 1)], rng.integers(10, 99, rng.integers(0, 20))])
        if not len(prompt) or len(prompt) > 70:
            continue
        known.append(prompt)
        cap = None if rng.random() < 0.3 else 40
        row = Row(prompt.astype(np.int32), int(rng.integers(1, 40)), cap)
        rows += [row] * int(rng.choice([1, 1, 1, 3]))
    return rows


@pytest.mark.parametrize("seed", range(60))
def test_any_job_ends_with_its_answers_under_any_policy(seed):
    """Memory for one row or for all, policies at random: `run_job` checks answers, blocks and books at each step."""
    rng = np.random.default_rng(seed)
    rows = random_rows(rng)
    block_size, slots = int(rng.choice([1, 2, 4, 16])), int(rng.integers(1, 9))
    longest = max(len(row.prompt) + (row.cap or row.length) for row in rows)
    outcome = run_job(
        rows,
        slots=slots,
        budget=slots + int(rng.integers(0, 60)),
        num_blocks=-(-longest // block_size) + int(rng.choice([0, 3, 20, 400])),
        block_size=block_size,
        prefix_cache=bool(rng.random() < 0.8),
        batching=str(rng.choice(["continuous", "continuous", "static"])),
        order=str(rng.choice(["file", "longest", "auto"])),
        prediction=bool(rng.random() < 0.7),
    )
    assert outcome.num_prompt_tokens == sum(len(row.prompt) for row in rows)
    assert outcome.num_cached_tokens == sum(outcome.cached.values())
    assert outcome.num_preempted or not outcome.num_recomputed_tokens
    computed = outcome.num_prompt_tokens - outcome.num_cached_tokens + sum(r.length - 1 for r in rows)
    assert outcome.num_computed_tokens >= computed
    if not outcome.num_preempted:
        assert outcome.num_computed_tokens == computed


@pytest.mark.parametrize("order", ["file", "auto"])
@pytest.mark.parametrize("arrange", ["grouped", "interleaved", "shuffled"])
def test_what_rows_share_is_computed_once(arrange, order):
    rows = few_shot_rows(np.random.default_rng(1), arrange=arrange)
    outcome = run_job(rows, slots=64, budget=1024, num_blocks=6000, order=order, checks=False)
    assert outcome.num_cached_tokens >= 0.95 * sum(shareable(rows)) > 0.8 * outcome.num_prompt_tokens


def test_what_rows_share_is_computed_once_with_little_memory():
    """Room for few more blocks than the running rows need, over a file that jumps between the groups."""
    rows = few_shot_rows(np.random.default_rng(2), rows_per_group=20, arrange="interleaved")
    outcome = run_job(rows, slots=16, budget=512, num_blocks=300, order="file")
    assert outcome.num_cached_tokens >= 0.9 * sum(shareable(rows))


def test_equal_prompts_are_read_once_but_for_what_must_be_computed():
    prompt = np.arange(10, 58, dtype=np.int32)  # three full blocks: the last of them is computed by each row
    outcome = run_job([Row(prompt, 5)] * 6, slots=6, budget=64, num_blocks=100)
    assert list(outcome.cached.values()) == [0, 32, 32, 32, 32, 32]


def test_without_the_cache_nothing_is_shared():
    rows = few_shot_rows(np.random.default_rng(1), groups=2, rows_per_group=5)
    outcome = run_job(rows, slots=4, budget=512, num_blocks=1000, prefix_cache=False)
    assert outcome.num_cached_tokens == 0


@pytest.mark.parametrize(("num_rows", "slots"), [(192, 32), (128, 16), (512, 64)])
def test_longest_first_ends_a_long_tailed_job_in_fewer_steps(num_rows, slots):
    rows = long_tail_rows(np.random.default_rng(2), num_rows)
    steps = {
        order: run_job(rows, slots=slots, budget=512, num_blocks=20_000, order=order, checks=False).num_steps
        for order in ("file", "auto", "longest")
    }
    assert steps["file"] >= 1.1 * max(steps["auto"], steps["longest"])


def test_an_order_without_knowledge_costs_next_to_nothing():
    """Lengths that nothing announces: all caps are alike, and so are the prompts."""
    rows = long_tail_rows(np.random.default_rng(2), 192, cap=4096)
    steps = {
        order: run_job(rows, slots=32, budget=512, num_blocks=20_000, order=order, checks=False).num_steps
        for order in ("file", "auto")
    }
    assert steps["auto"] <= 1.03 * steps["file"]


@pytest.mark.parametrize("cap", [None, 600, 4000], ids=["known lengths", "some cap", "a high cap"])
@pytest.mark.parametrize("num_blocks", [300, 600])
def test_predicted_lengths_save_recomputation_and_cost_few_steps(num_blocks, cap):
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(300):
        length = int(min(max(1, rng.lognormal(np.log(120), 0.7)), 590))
        rows.append(Row(rng.integers(10, 30_000, rng.integers(20, 200)).astype(np.int32), length, cap))
    before, after = (
        run_job(rows, slots=64, budget=512, num_blocks=num_blocks, prediction=prediction, checks=False)
        for prediction in (False, True)
    )
    assert before.num_recomputed_tokens > 5000
    assert after.num_recomputed_tokens < (0.5 * before.num_recomputed_tokens if cap else 1)
    assert after.num_computed_tokens < 0.97 * before.num_computed_tokens
    assert after.num_steps < 1.12 * before.num_steps


def test_a_job_beyond_the_window_never_drains():
    """Longest first over 200 rows a slot: short rows that came first go before the window has to stop for them."""
    rng = np.random.default_rng(5)
    rows = [Row(rng.integers(10, 99, 3).astype(np.int32), int(rng.integers(1, 60))) for _ in range(800)]
    outcome = run_job(rows, slots=4, budget=64, num_blocks=200, order="longest", checks=False)
    ideal = sum(row.length for row in rows) / 4
    assert outcome.num_steps <= 1.02 * ideal
    assert outcome.most_ahead <= 4 * ROWS_PER_SLOT
