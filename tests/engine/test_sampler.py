"""The sampler: each row alone gives what it gives in company, and draws follow the truncated distribution."""

import functools

import numpy as np
import pytest
import torch

from cbgen.engine.native.library import open_library
from cbgen.engine.operators.base import Penalties, SampleTensors
from cbgen.engine.operators.native import NativeOperators
from cbgen.engine.operators.reference import ReferenceOperators, uniforms_of
from cbgen.engine.sampler import Sampler
from cbgen.engine.sampling_input import SamplingInput, random_states, uniforms
from cbgen.engine.slot_state import bits_of
from cbgen.params import SamplingParams
from tests.engine.test_scheduler import make_sequence

VOCAB = 50


def make_row(index=0, num_output=0, **params):
    sequence = make_sequence(index, 2, 100, params=SamplingParams(**params), random_stream=(3, index, 0))
    sequence.output_token_ids = list(range(num_output))
    return sequence


@functools.cache
def native_operators():
    return NativeOperators(open_library(print))


def sample(logits, rows):
    """By both kinds of operators, which have to agree; the logits are only read."""
    given, before = SamplingInput.from_sequences(rows), logits.clone()
    token_ids = Sampler(ReferenceOperators()).sample(logits, given)
    assert token_ids.dtype == np.int64
    assert np.array_equal(Sampler(native_operators()).sample(logits, given), token_ids)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    given = as_tensors(rows, logits.shape[1])
    on_device = ReferenceOperators().sample(logits, *given)
    plain = [not row.params.logit_bias for row in rows]  # all that it knows
    assert np.array_equal(on_device.numpy()[plain], token_ids[plain])
    assert torch.equal(native_operators().sample(logits, *given), on_device)
    return [None if token_id == -1 else token_id for token_id in token_ids.tolist()]


def as_tensors(rows, vocab_size):
    """What `Operators.sample` takes beside the logits: parameters, stop ids, who must not stop yet, and penalties."""
    given = SamplingInput.from_sequences(rows)
    params = SampleTensors(
        *(torch.from_numpy(column) for column in (given.temperature, given.top_k, given.top_p, given.min_p)),
        random_state=torch.from_numpy(random_states(given.random_words[:, :3]).view(np.int64)),
        position=torch.from_numpy(given.random_words[:, 3].astype(np.int64)),
    )
    stop_token_ids = torch.full((len(rows), 4), -1)
    for row, sequence in enumerate(rows):
        for column, token_id in enumerate(sorted(sequence.stop_token_ids)):
            stop_token_ids[row, column + row % 2] = token_id
    seen = [bits_of(row.tokens_between(0, row.num_tokens), vocab_size) for row in rows]
    penalties = Penalties(
        factor=torch.tensor([row.params.repetition_penalty for row in rows], dtype=torch.float32),
        seen_tokens=torch.from_numpy(np.stack(seen[::-1])),
        seen_rows=torch.arange(len(rows)).flip(0),
    )
    forbids_stops = torch.tensor([len(r.output_token_ids) < r.params.min_tokens for r in rows])
    return params, stop_token_ids, forbids_stops, penalties


def random_words(rows):
    return SamplingInput.from_sequences(rows).random_words


def make_logits(num_rows, seed=0):
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def kept_by_hand(logits, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0):
    """The set of ids that truncation keeps, computed one id at a time."""
    logits = logits.double() / temperature
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    order = order[: top_k or len(order)]
    weight = {i: float(torch.exp(logits[i] - logits.max())) for i in order}
    order = [i for i in order if weight[i] >= min_p * max(weight.values())]
    total, mass, kept = sum(weight[i] for i in order), 0.0, []
    for i in order:
        if mass >= top_p * total and kept:
            break
        kept.append(i)
        mass += weight[i]
    return set(kept)


@pytest.mark.parametrize(
    "params",
    [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 10, "top_p": 0.7, "min_p": 0.05, "temperature": 0.5}],
    ids=str,
)
def test_draws_come_from_the_kept_set_and_reach_all_of_it(params):
    logits = make_logits(1)
    rows = [make_row(index, **{"temperature": 1.0, **params}) for index in range(3000)]
    drawn = set(sample(logits.expand(3000, -1).clone(), rows))
    assert drawn == kept_by_hand(logits[0], **params)


def test_frequencies_match_the_softmax():
    logits = make_logits(1)
    rows = [make_row(index, temperature=1.3) for index in range(20_000)]
    drawn = torch.tensor(sample(logits.expand(20_000, -1).clone(), rows))
    observed = torch.bincount(drawn, minlength=VOCAB) / 20_000
    expected = torch.softmax(logits[0] / 1.3, dim=-1)
    assert float((observed - expected).abs().sum()) < 0.04


def test_a_row_draws_the_same_alone_and_in_any_company():
    mixes = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 5}, {"temperature": 0.7}]
    mixes += [{"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "min_p": 0.1, "seed": 9}]
    rows = [make_row(index, num_output=index % 5, **mixes[index % len(mixes)]) for index in range(60)]
    logits = make_logits(60)
    together = sample(logits.clone(), rows)
    alone = [sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    backwards = sample(logits.flip(0).clone(), rows[::-1])[::-1]
    assert together == alone == backwards


def test_a_wide_nucleus_needs_more_than_the_prefilter():
    logits = torch.zeros(1, 5000)
    rows = [make_row(index, temperature=1.0, top_p=0.9) for index in range(4000)]
    drawn = sample(logits.expand(4000, -1).clone(), rows)
    assert 1024 < max(drawn) < 4501


def test_top_k_one_of_two_equal_logits_is_one_token():
    logits = torch.zeros(1, VOCAB)
    rows = [make_row(index, temperature=1.0, top_k=1) for index in range(100)]
    assert set(sample(logits.expand(100, -1).clone(), rows)) == {0}


def test_greedy_is_the_argmax_of_the_raw_logits():
    logits = make_logits(8)
    assert sample(logits.clone(), [make_row(i) for i in range(8)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_bad_logits_is_none_and_harms_no_other(value, temperature):
    logits = make_logits(3)
    rows = [make_row(index, temperature=temperature) for index in range(3)]
    clean = sample(logits.clone(), rows)
    logits[1, 4] = value
    assert sample(logits, rows) == [clean[0], None, clean[2]]


def test_min_tokens_masks_every_stop_id_and_only_until_then():
    logits = torch.zeros(2, VOCAB)
    logits[:, 4], logits[:, 9], logits[:, 2] = 9.0, 8.0, 7.0
    early, late = (make_row(i, num_output=n, min_tokens=3) for i, n in enumerate((2, 3)))
    early.stop_token_ids = late.stop_token_ids = frozenset({4, 9})
    assert sample(logits, [early, late]) == [2, 4]


def test_repetition_penalty_counts_prompt_and_output_of_its_own_row_only():
    logits = torch.full((2, VOCAB), -1.0)
    logits[:, 7], logits[:, 0] = 1.9, 2.0
    penalized, plain = make_row(0, num_output=1, repetition_penalty=1.5), make_row(1, num_output=1)
    assert sample(logits.clone(), [penalized, plain]) == [7, 0]


def test_uniforms_are_a_pure_function_spread_over_the_unit_interval():
    rows = [make_row(index % 100, num_output=index // 100) for index in range(10_000)]
    first, second = uniforms(random_words(rows)), uniforms(random_words(rows[::-1]))[::-1]
    assert np.array_equal(first, second)
    assert len(np.unique(first)) == 10_000
    assert abs(first.mean() - 0.5) < 0.01
    assert np.histogram(first, bins=10, range=(0, 1))[0].min() > 900


def test_the_first_uniforms_never_change():
    """Outputs made with a seed must be reproducible by later versions, so the generator is part of the contract."""
    assert uniforms(random_words([make_row(0), make_row(1, num_output=4)])).tolist() == [
        0.8367955706748803,
        _splitmix_in_python([3, 1, 0, 4]),
    ]
    assert _splitmix_in_python([3, 0, 0, 0]) == 0.8367955706748803


def test_uniforms_on_the_device_are_the_same_bits():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**64, (20_000, 4), dtype=np.uint64)
    words[:10_000] >>= rng.integers(0, 64, (10_000, 4), dtype=np.uint64)  # small ones, as most are
    words[:, 3] >>= np.uint64(1)
    state = torch.from_numpy(random_states(words[:, :3]).view(np.int64))
    got = uniforms_of(state, torch.from_numpy(words[:, 3].astype(np.int64)))
    assert np.array_equal(got.numpy(), uniforms(words))


def test_a_row_whose_every_token_is_forbidden_on_the_device_gets_token_0():
    rows = [make_row(i, temperature=i % 2, min_tokens=1) for i in range(4)]
    for row in rows:
        row.stop_token_ids = frozenset({0, 1, 2})
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 3 + [[1.0, float("nan"), 3.0]])
    assert sample(logits, rows) == [0, 0, 0, None]


def _splitmix_in_python(words):
    """The same mixer in exact integers: no numpy, no wrap-around surprises."""
    mask, state = 2**64 - 1, 0
    for word in words:
        state = (state + 0x9E3779B97F4A7C15 + word) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


# -- logit_bias, and parameters at their bounds -----------------------------------------------------------------------


def test_a_bias_is_added_to_its_own_row():
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = 1.0
    rows = [make_row(0), make_row(1, logit_bias=((3, 2.0), (9, 5.0), (7, 1.0))), make_row(2, logit_bias=((7, -0.5),))]
    assert sample(logits.clone(), rows) == [7, 9, 7]


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 1e6])
def test_minus_100_forbids_a_token_however_likely_it_is(temperature):
    logits = torch.zeros(200, VOCAB)
    logits[:, 7] = 1e6
    rows = [make_row(i, temperature=temperature, logit_bias=((7, -100.0),)) for i in range(200)]
    drawn = set(sample(logits, rows))
    assert drawn == {0} if temperature == 0 else drawn <= set(range(VOCAB)) - {7}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_forbids_everything_still_gets_a_token(temperature):
    rows = [make_row(i, temperature=temperature, logit_bias=tuple((t, -100.0) for t in range(VOCAB))) for i in range(9)]
    assert None not in sample(make_logits(9), rows)


def test_min_tokens_outranks_a_bias():
    row = make_row(0, min_tokens=1, logit_bias=((7, 100.0), (8, 50.0)))
    row.stop_token_ids = frozenset({7})
    assert sample(torch.zeros(1, VOCAB), [row]) == [8]


def test_biased_rows_do_not_depend_on_their_company():
    rows = [make_row(i, temperature=i % 2, logit_bias=((i, 3.0), (2 * i, -100.0))[: i % 3]) for i in range(24)]
    logits = make_logits(24)
    alone = [sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    assert sample(logits.clone(), rows) == alone


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 5e-324}, {"temperature": 1e-30}, {"temperature": 1e6}, {"temperature": 1e6, "min_tokens": 5},
        {"temperature": 1.0, "top_p": 5e-324}, {"temperature": 1.0, "top_p": 1 - 1e-12},
        {"temperature": 1.0, "min_p": 5e-324}, {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "top_k": 2**62}, {"repetition_penalty": 1e3}, {"repetition_penalty": 1e-3},
        {"temperature": 1e-30, "repetition_penalty": 1e3, "logit_bias": ((0, 100.0), (1, -100.0))},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_every_parameter_at_its_bound_gives_a_token_that_the_logits_allow(params, scale):
    rows = [make_row(i, num_output=2, **params) for i in range(50)]
    for row in rows:
        row.stop_token_ids = frozenset({4, 5})
    logits = make_logits(50) * scale
    logits[:, 9] = float("-inf")
    tokens = sample(logits, rows)
    assert all(token is not None and token != 9 for token in tokens)
    if params.get("min_tokens"):
        assert not {4, 5} & set(tokens)
