"""What is learned from rows that ended: against plain sorted lists, and where nothing or little is known."""

import random

import numpy as np
import pytest

from cbgen.engine.prediction import LengthPredictor
from cbgen.params import SamplingParams
from tests.engine.test_scheduler import make_sequence


def make_row(num_prompt=10, num_output=0, max_tokens=1000, *, stops=True):
    params = SamplingParams(max_tokens=max_tokens)
    sequence = make_sequence(0, num_prompt, max_tokens, params=params, stop_token_ids=frozenset({2} if stops else ()))
    sequence.output_token_ids = [5] * num_output
    return sequence


def learn(predictor, lengths, **row):
    for length in lengths:
        predictor.ended(make_row(num_output=length, **row))


def test_a_row_that_cannot_stop_early_has_its_length_and_teaches_nothing():
    predictor = LengthPredictor()
    fixed = make_row(max_tokens=70, num_output=70, stops=False)
    for _ in range(50):
        predictor.ended(fixed)
    assert (predictor.version, predictor.expected_output(fixed), predictor.likely_total(fixed)) == (0, 70, 80)
    assert predictor.expected_output(make_row()) == 1000


def test_while_nothing_is_known_all_caps_are_believed_and_some_memory_is_reserved():
    predictor = LengthPredictor()
    assert predictor.expected_output(make_row()) == 1000
    assert predictor.likely_total(make_row()) == 10 + 256
    assert predictor.likely_total(make_row(max_tokens=100)) == 110
    assert predictor.likely_total(make_row(num_output=300)) == 10 + 600
    assert predictor.likely_total(make_row(num_output=700)) == 1010


def test_predictions_are_near_those_of_sorted_lists():
    for seed in range(20):
        rng = random.Random(seed)
        lengths = [max(1, int(rng.lognormvariate(4.5, 0.8))) for _ in range(400)]
        predictor = LengthPredictor()
        learn(predictor, lengths, max_tokens=100_000)
        assert predictor.expected_output(make_row(max_tokens=100_000)) == round(np.mean(lengths))
        for beyond in (0, 50, 100):
            longer = sorted(n for n in lengths if n > beyond)
            exact = longer[int(0.6 * len(longer))]
            likely = predictor.likely_total(make_row(num_output=beyond, max_tokens=100_000)) - 10
            assert max(beyond + 1, 0.75 * exact) <= likely <= 1.3 * exact, (seed, beyond)


@pytest.mark.parametrize("num_output", [0, 1, 2, 5, 100, 999])
@pytest.mark.parametrize("lengths", [[], [1] * 20, [1, 2, 3] * 9, [400] * 30])
def test_a_row_is_always_thought_to_go_on_but_never_past_its_cap(lengths, num_output):
    predictor = LengthPredictor()
    learn(predictor, lengths)
    row = make_row(num_output=num_output)
    assert row.num_tokens < predictor.likely_total(row) <= row.max_total_tokens


def test_kinds_of_rows_are_told_apart_once_they_have_been_seen_often_enough():
    predictor = LengthPredictor()
    learn(predictor, [10] * 15, num_prompt=20)
    learn(predictor, [500] * 40, num_prompt=300)
    assert predictor.expected_output(make_row(20)) == round((150 + 20_000) / 55)
    learn(predictor, [10], num_prompt=20)
    assert predictor.expected_output(make_row(20)) == 10
    assert predictor.expected_output(make_row(290)) == 500
    assert predictor.expected_output(make_row(290, max_tokens=100)) <= 100


def test_the_version_grows_ever_more_slowly():
    predictor, grew = LengthPredictor(), []
    for count in range(1, 300):
        before = predictor.version
        learn(predictor, [7])
        if predictor.version > before:
            grew.append(count)
    assert grew == [8, 16, 32, 64, 128, 256]
