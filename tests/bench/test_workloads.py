"""The benchmark's rows: the same for a seed, of the shape they claim, and what a prefix cache could find in them."""

import random

import numpy as np
import pytest

from cbgen.bench.workloads import NAMES, make_workload, random_ids, shareable_tokens


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_draws_the_same_rows_and_another_does_not(name):
    first, again, other = (make_workload(name, rows=40, seed=seed) for seed in (3, 3, 4))
    assert first.texts == again.texts
    assert first.lengths.tolist() == again.lengths.tolist()
    assert first.texts != other.texts
    assert first.num_rows == 40
    assert first.lengths.min() >= 1
    assert [len(text.split()) for text in first.texts] == first.prompt_lengths.tolist()


def test_w1_small_is_ragged_as_documented():
    workload = make_workload("W1", rows=5000)
    assert np.median(workload.lengths) == pytest.approx(75, rel=0.05)
    assert workload.lengths.mean() == pytest.approx(101, rel=0.06)
    assert (workload.lengths.min(), workload.lengths.max()) == (16, 384)
    assert np.median(workload.prompt_lengths) == pytest.approx(40, rel=0.05)


def test_w1_full_has_the_parameters_of_the_study():
    workload = make_workload("W1", scale="full", rows=20000)
    assert np.median(workload.prompt_lengths) == pytest.approx(120, rel=0.05)
    assert np.std(np.log(workload.prompt_lengths[workload.prompt_lengths < 2048])) == pytest.approx(1.1, rel=0.1)
    assert np.median(workload.lengths) == pytest.approx(150, rel=0.05)
    assert workload.prompt_lengths.max() == 2048
    assert workload.lengths.max() == 1024


def test_w2_rows_of_a_group_share_their_prefix_and_groups_do_not():
    workload = make_workload("W2", rows=48)
    texts = [text.split() for text in workload.texts]
    assert workload.shares_prefixes
    assert len({tuple(words[:600]) for words in texts[:24]}) == 1
    assert texts[0][:600] != texts[24][:600]
    assert len({tuple(words) for words in texts}) == 48


def test_w3_has_a_long_tail_of_one_row_in_twenty():
    lengths = make_workload("W3", scale="full", rows=2000).lengths
    assert 100 <= (lengths >= 1000).sum() <= 102  # the usual rows are cut at 1,000
    assert make_workload("W3", rows=5).lengths.max() >= 400  # however few rows


def test_w4_and_w6_have_one_length():
    assert set(make_workload("W4").lengths.tolist()) == {1}
    assert set(make_workload("W6").lengths.tolist()) == {256}


@pytest.mark.parametrize(("name", "rows"), [("W7", 5), ("W1", 0), ("W1", -1)])
def test_what_does_not_exist_is_refused(name, rows):
    with pytest.raises(ValueError, match="workload"):
        make_workload(name, rows=rows)


def test_random_ids_have_the_exact_lengths_and_repeat_where_words_do():
    workload = make_workload("W2", rows=4)
    ids = random_ids(workload, 1000)
    assert [len(row) for row in ids] == workload.prompt_lengths.tolist()
    assert ids[0][:600] == ids[1][:600]
    assert all(0 <= token < 1000 for row in ids for token in row)


@pytest.mark.parametrize(
    ("prompts", "tokens"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 2),  # the last token is always computed, and with it its block
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 4),
        ([[1, 2, 3, 4, 5], [9, 2, 3, 4, 5]], 0),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 5]], 4),
        ([[1], [1]], 0),
    ],
)
def test_shareable_tokens_counted_by_hand(prompts, tokens):
    assert shareable_tokens(prompts, block_size=2) == tokens


def test_shareable_tokens_against_a_plain_search():
    for seed in range(30):
        rng = random.Random(seed)
        prompts = [[rng.randrange(2) for _ in range(rng.randrange(1, 20))] for _ in range(12)]
        expected = 0
        for row, ids in enumerate(prompts):
            for end in range(3, len(ids), 3):
                expected += 3 * any(other[:end] == ids[:end] for other in prompts[:row])
        assert shareable_tokens(prompts, block_size=3) == expected
