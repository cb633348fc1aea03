"""The scheduler against a naive twin and its own invariants, over random workloads. No model, no torch."""

import random

import numpy as np
import pytest

from cbgen.engine.block_manager import BlockManager
from cbgen.engine.scheduler import Scheduler, SchedulerConfig
from cbgen.engine.sequence import FinishReason, Sequence
from cbgen.params import SamplingParams


def make_sequence(index=0, num_prompt=1, num_output=1, **changes):
    return Sequence(
        index=index,
        prompt_token_ids=np.arange(num_prompt, dtype=np.int32),
        params=changes.pop("params", SamplingParams(max_tokens=num_output)),
        max_total_tokens=num_prompt + num_output,
        **changes,
    )


def make_scheduler(num_blocks=1000, block_size=4, max_num_seqs=4, budget=64, prefix_cache=False, **changes):
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=num_blocks * block_size, **changes
    )
    length = num_blocks * block_size
    return Scheduler(config, BlockManager(num_blocks, block_size, max_num_seqs, length, prefix_cache=prefix_cache))


def sampled(output, token_id=7):
    """The same token for each sequence that samples."""
    return np.full(output.samples.sum(), token_id)


def run_step(scheduler, token_id=7):
    """One step in which every sequence that is ready samples `token_id`."""
    output = scheduler.schedule()
    scheduler.block_manager.check_integrity()
    finished = scheduler.update(output, sampled(output, token_id))
    scheduler.check_integrity()
    return output, finished


@pytest.mark.parametrize("seed", range(60))
def test_every_row_ends_with_its_own_length_under_random_limits(seed):
    """Slots, budget and blocks at random, often too few: nothing is lost or run twice, limits hold at each step."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    max_num_seqs = rng.randint(1, 6)
    budget = rng.randint(max_num_seqs, 40)
    rows = [(rng.randint(1, 40), rng.randint(1, 30)) for _ in range(25)]
    longest = max(p + n for p, n in rows)
    num_blocks = -(-longest // block_size) + rng.randint(0, 20)
    scheduler = make_scheduler(
        num_blocks, block_size, max_num_seqs, budget, batching=rng.choice(["continuous", "static"])
    )
    sequences = [make_sequence(i, p, n) for i, (p, n) in enumerate(rows)]
    ended, arriving = [], list(sequences)
    for _ in range(20_000):
        while arriving and rng.random() < 0.5:
            assert scheduler.add(arriving.pop(0))
        if not scheduler.has_unfinished:
            if not arriving:
                break
            continue
        output, finished = run_step(scheduler)
        assert output.sequences, f"seed {seed}: a step that does nothing while rows wait"
        assert output.num_tokens <= budget
        assert len(scheduler.running) <= max_num_seqs
        ended += finished
    assert sorted(s.index for s in ended) == list(range(25))
    assert [len(s.output_token_ids) for s in sequences] == [n for _, n in rows]
    assert scheduler.block_manager.num_free_blocks == num_blocks


def test_steps_equal_a_naive_simulation():
    """With one-token prompts and room for all, continuous batching is a list of slots that refill from a queue."""
    for seed in range(30):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 50) for _ in range(40)]
        slots = rng.randint(1, 8)
        scheduler = make_scheduler(max_num_seqs=slots)
        for index, length in enumerate(lengths):
            scheduler.add(make_sequence(index, 1, length))
        num_steps = 0
        while scheduler.has_unfinished:
            run_step(scheduler)
            num_steps += 1

        free_at = [0] * slots
        for length in lengths:
            slot = free_at.index(min(free_at))
            free_at[slot] += length
        assert num_steps == max(free_at), f"seed {seed}"


def test_a_slot_is_refilled_in_the_step_after_its_row_ends():
    scheduler = make_scheduler(max_num_seqs=1)
    first, second = make_sequence(0, 1, 2), make_sequence(1, 1, 1)
    scheduler.add(first)
    scheduler.add(second)
    batches = [[s.index for s in run_step(scheduler)[0].sequences] for _ in range(3)]
    assert batches == [[0], [0], [1]]


def test_a_long_prompt_is_read_in_chunks_while_others_decode():
    scheduler = make_scheduler(max_num_seqs=2, budget=8)
    scheduler.add(make_sequence(0, 1, 10))
    run_step(scheduler)
    scheduler.add(make_sequence(1, 20, 1))
    steps = [run_step(scheduler)[0] for _ in range(3)]
    assert [step.num_scheduled_tokens.tolist() for step in steps] == [[1, 7], [1, 7], [1, 6]]
    assert all(step.num_decodes == 1 for step in steps)


def test_static_batching_admits_nothing_until_the_longest_row_ends():
    scheduler = make_scheduler(max_num_seqs=2, batching="static")
    for index, length in enumerate([1, 3, 1]):
        scheduler.add(make_sequence(index, 1, length))
    batches = [[s.index for s in run_step(scheduler)[0].sequences] for _ in range(4)]
    assert batches == [[0, 1], [1], [1], [2]]


def test_static_batching_decodes_nothing_until_every_prompt_is_read():
    scheduler = make_scheduler(max_num_seqs=2, budget=4, batching="static")
    scheduler.add(make_sequence(0, 3, 3))
    scheduler.add(make_sequence(1, 5, 3))
    steps = [run_step(scheduler)[0] for _ in range(3)]
    shapes = [(step.num_decodes, step.num_scheduled_tokens.tolist()) for step in steps]
    assert shapes == [(0, [3, 1]), (0, [4]), (2, [1, 1])]


def test_longest_first_admits_by_expected_length():
    scheduler = make_scheduler(max_num_seqs=1, order="longest")
    for index, length in enumerate([2, 5, 3, 5]):
        scheduler.add(make_sequence(index, 1, length))
    ended = []
    while scheduler.has_unfinished:
        ended += [s.index for s in run_step(scheduler)[1]]
    assert ended == [1, 3, 2, 0]


def test_out_of_blocks_preempts_the_row_admitted_last_and_computes_it_again():
    scheduler = make_scheduler(num_blocks=5, block_size=2, max_num_seqs=2, prediction=False)
    first, second = make_sequence(0, 2, 8), make_sequence(1, 2, 6)
    scheduler.add(first)
    scheduler.add(second)
    while scheduler.has_unfinished:
        run_step(scheduler)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert (len(first.output_token_ids), len(second.output_token_ids)) == (8, 6)


def test_a_row_that_can_never_fit_is_refused_and_the_others_run():
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    assert not scheduler.add(too_long := make_sequence(0, 5, 4))
    assert too_long.finish_reason is FinishReason.KV_NEVER_FITS
    assert scheduler.add(make_sequence(1, 5, 3))
    while scheduler.has_unfinished:
        _, finished = run_step(scheduler)
    assert [s.index for s in finished] == [1]


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, 1), (1, 2), (3, 4)], ids=["at once", "after one", "after three"]
)
def test_a_stop_token_ends_a_row_once_min_tokens_are_out(min_tokens, expected):
    params = SamplingParams(max_tokens=10, min_tokens=min_tokens)
    scheduler = make_scheduler()
    scheduler.add(sequence := make_sequence(0, 1, 10, params=params, stop_token_ids=frozenset({7})))
    while scheduler.has_unfinished:
        run_step(scheduler, token_id=7)
    assert (len(sequence.output_token_ids), sequence.finish_reason) == (expected, FinishReason.STOP)


def test_a_stop_token_at_the_very_limit_is_a_stop():
    scheduler = make_scheduler()
    scheduler.add(sequence := make_sequence(0, 1, 1, stop_token_ids=frozenset({7})))
    run_step(scheduler, token_id=7)
    assert sequence.finish_reason is FinishReason.STOP


def test_text_may_end_a_row():
    scheduler = make_scheduler()
    scheduler.add(sequence := make_sequence(0, 1, 9, stop_on_text=lambda _: len(sequence.output_token_ids) == 3))
    while scheduler.has_unfinished:
        run_step(scheduler)
    assert (len(sequence.output_token_ids), sequence.finish_reason) == (3, FinishReason.STOP)


def test_logits_that_are_not_finite_end_their_row_alone():
    scheduler = make_scheduler()
    scheduler.add(bad := make_sequence(0, 1, 3))
    scheduler.add(good := make_sequence(1, 1, 3))
    finished = scheduler.update(scheduler.schedule(), np.array([-1, 7]))
    assert (finished, bad.finish_reason, bad.output_token_ids) == ([bad], FinishReason.NAN_LOGITS, [])
    assert good.finish_reason is None


def test_a_budget_below_the_slots_is_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(4\)"):
        make_scheduler(budget=3)


# -- steps in parts, rows that end from outside -----------------------------------------------------------------------


def test_the_parts_of_a_step_are_the_step():
    """Random steps cut at random: every token once, in order, decodes in front, never two chunks of a row in a part."""
    for seed in range(40):
        rng = random.Random(seed)
        scheduler = make_scheduler(max_num_seqs=6, budget=40)
        for index in range(8):
            scheduler.add(make_sequence(index, rng.choice([1, 2, 15, 60]), 5))
        for _ in range(rng.randint(0, 3)):
            run_step(scheduler)
        output = scheduler.schedule()
        most = rng.randint(1, 45)
        parts = output.cut(most)
        counts = dict.fromkeys((s.index for s in output.sequences), 0)
        for part in parts:
            assert 0 < part.num_tokens <= most
            assert len({s.index for s in part.sequences}) == len(part.sequences)
            assert part.num_scheduled_tokens[: part.num_decodes].tolist() == [1] * part.num_decodes
            assert part.num_decodes == sum(s in output.sequences[: output.num_decodes] for s in part.sequences)
            for sequence, num_tokens in zip(part.sequences, part.num_scheduled_tokens, strict=True):
                assert part.table.sequences[sequence.slot] is sequence
                counts[sequence.index] += num_tokens
        assert list(counts.values()) == output.num_scheduled_tokens.tolist()
        assert len(parts) == -(-output.num_tokens // most)
        first, second = output.halves()
        assert len(first.sequences) == len(output.sequences) // 2
        assert first.sequences + second.sequences == output.sequences
        counts = [*first.num_scheduled_tokens, *second.num_scheduled_tokens]
        assert counts == output.num_scheduled_tokens.tolist()
        assert first.num_decodes + second.num_decodes == output.num_decodes
        assert first.num_decodes <= len(first.sequences)


def test_a_step_run_in_parts_leaves_the_books_as_one_run_whole():
    for seed in range(20):
        rng = random.Random(seed)
        whole, parted = (make_scheduler(max_num_seqs=4, budget=16) for _ in range(2))
        rows = [(rng.randint(1, 40), rng.randint(1, 8)) for _ in range(12)]
        pairs = [(make_sequence(i, p, n), make_sequence(i, p, n)) for i, (p, n) in enumerate(rows)]
        for first, second in pairs:
            whole.add(first)
            parted.add(second)
        while whole.has_unfinished:
            _, finished = run_step(whole)
            ended = []
            for part in parted.schedule().cut(rng.randint(1, 9)):
                ended += parted.update(part, sampled(part))
            parted.check_integrity()
            assert [s.index for s in ended] == [s.index for s in finished]
        assert not parted.has_unfinished


def test_a_row_ends_with_all_its_samples_running_or_waiting():
    scheduler = make_scheduler(max_num_seqs=3)
    rows = [make_sequence(index, 3, 5) for index in (0, 1, 1, 1, 2)]
    for sequence in rows:
        scheduler.add(sequence)
    output = scheduler.schedule()
    scheduler.end_row(1, FinishReason.OUT_OF_MEMORY)
    scheduler.check_integrity()
    assert [s.finish_reason for s in rows] == [None, *[FinishReason.OUT_OF_MEMORY] * 3, None]
    assert output.unfinished().sequences == [rows[0]]
    scheduler.update(output.unfinished(), np.array([7]))
    while scheduler.has_unfinished:
        run_step(scheduler)
    assert scheduler.block_manager.num_free_blocks == 1000
    assert [len(s.output_token_ids) for s in rows] == [5, 0, 0, 0, 5]
