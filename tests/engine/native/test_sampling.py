"""Argmax and draws of the kernels against the reference in torch, over seeds, dtypes and ways of truncation."""

import numpy as np
import pytest
import torch

from cbgen.engine.operators.base import DrawParams
from cbgen.engine.operators.native import NativeOperators
from cbgen.engine.operators.reference import ReferenceOperators

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REFERENCE = ReferenceOperators()
INF = float("inf")


@pytest.fixture(scope="session")
def native(library):
    return NativeOperators(library)


def make_logits(seed, num_rows, vocab_size, dtype=torch.float32, scale=3.0):
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.to(dtype)


def make_params(seed, num_rows, **given):
    rng = np.random.default_rng(seed)
    values = {
        "temperature": rng.choice([0.2, 0.7, 1.0, 2.0], num_rows),
        "top_k": rng.choice([0, 1, 5, 50, 3000, 2**31 - 1], num_rows),
        "top_p": rng.choice([1.0, 0.95, 0.5, 0.01], num_rows),
        "min_p": rng.choice([0.0, 0.02, 0.3, 1.0], num_rows),
        **{name: np.full(num_rows, value) for name, value in given.items()},
    }
    return DrawParams(
        temperature=values["temperature"].astype(np.float32),
        top_k=values["top_k"].astype(np.int32),
        top_p=values["top_p"].astype(np.float32),
        min_p=values["min_p"].astype(np.float32),
        uniforms=rng.random(num_rows),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 511, 513, 5003])
def test_argmax_is_the_reference_s_with_any_number_of_threads(native, dtype, vocab_size):
    before = torch.get_num_threads()
    for seed, num_rows in enumerate((0, 1, 2, 3, 40)):
        # Scaled down, so that 16-bit logits have many equal maxima; a view, so that rows are strided.
        logits = make_logits(seed, num_rows, vocab_size + 7, dtype, scale=0.01)[:, :vocab_size]
        logits = (logits * 100).round() / 100
        expected = REFERENCE.argmax(logits)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(native.argmax(logits), expected)
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [40, 2000])
def test_rows_with_nan_or_infinity_are_minus_one_and_harm_no_other(native, dtype, vocab_size):
    clean = make_logits(0, 30, vocab_size, dtype)
    rng = np.random.default_rng(0)
    for bad in ([float("nan")], [INF], [float("nan"), INF], [INF, -INF], [float("nan"), -INF]):
        for place in (0, 1, 16, 31, 39, vocab_size - 1):
            logits = clean.clone()
            logits[7, place] = bad[0]
            logits[7, rng.integers(vocab_size)] = bad[-1]
            logits[7, place] = bad[0]
            got = native.argmax(logits)
            assert got.tolist() == [-1 if row == 7 else i for row, i in enumerate(clean.argmax(-1).tolist())]


def test_minus_infinity_forbids_and_a_row_of_it_is_not_sound(native):
    logits = torch.full((3, 100), -INF)
    logits[1, 99] = -3.0
    logits[2, 5] = torch.finfo(torch.float32).min
    assert native.argmax(logits).tolist() == REFERENCE.argmax(logits).tolist() == [-1, 99, 5]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 1000, 5003])
def test_draws_are_the_reference_s(native, dtype, vocab_size):
    for seed in range(3):
        logits = make_logits(seed, 50, vocab_size + 3, dtype, scale=[0.1, 1.0, 5.0][seed % 3])[:, :vocab_size]
        rows = np.random.default_rng(seed).integers(0, 50, 80)
        params = make_params(seed, 80)
        got, expected = native.draw(logits, rows, params), REFERENCE.draw(logits, rows, params)
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "given",
    [
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"top_p": 1.0, "min_p": 0.0}, {"top_k": 0, "min_p": 0.0},
        {"top_k": 0, "top_p": 1.0}, {"top_k": 0, "top_p": 5e-324}, {"top_k": 0, "top_p": 1 - 2**-24, "min_p": 0.0},
        {"temperature": 1e-30}, {"temperature": 1e6}, {"top_k": 1}, {"min_p": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_each_way_of_truncation_alone_and_at_its_bounds(native, given):
    for seed, scale in enumerate((0.0, 0.3, 3.0, 1e5)):  # all equal, flat, as models give them, one token alone
        logits = make_logits(seed, 40, 3001, scale=scale)
        logits[:, 9] = -INF
        rows, params = np.arange(40), make_params(seed, 40, **given)
        got = native.draw(logits, rows, params)
        assert got.tolist() == REFERENCE.draw(logits, rows, params).tolist()
        assert 9 not in got.tolist()


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_ties_are_kept_by_lowest_id(native, top_p):
    logits = (
        torch.arange(4.0)
        .repeat_interleave(500)
        .flip(0)[torch.randperm(2000, generator=torch.Generator().manual_seed(0))][None]
    )
    rows = np.zeros(200, dtype=np.int64)
    for given in ({"top_k": 0, "top_p": top_p}, {"top_k": 700, "top_p": 1.0}, {"top_k": 499, "top_p": top_p}):
        params = make_params(1, 200, temperature=1.0, min_p=0.0, **given)
        assert native.draw(logits, rows, params).tolist() == REFERENCE.draw(logits, rows, params).tolist()


def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last(native):
    logits = torch.zeros(1, 5000)
    logits[0, 0] = logits[0, -1] = -INF
    params = make_params(0, 2, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    params.uniforms[:] = 0.0, np.nextafter(1.0, 0.0)
    assert native.draw(logits, np.zeros(2, dtype=np.int64), params).tolist() == [1, 4998]


def test_frequencies_are_the_distribution_s(native):
    logits = make_logits(0, 1, 40)
    params = make_params(0, 100_000, temperature=1.3, top_k=0, top_p=1.0, min_p=0.0)
    drawn = native.draw(logits, np.zeros(100_000, dtype=np.int64), params)
    observed = torch.bincount(drawn, minlength=40) / 100_000
    assert float((observed - torch.softmax(logits[0] / 1.3, dim=-1)).abs().sum()) < 0.02


def test_a_row_draws_the_same_alone_and_with_two_threads(native):
    logits, params = make_logits(5, 60, 4000, torch.bfloat16), make_params(5, 60)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    together = native.draw(logits, np.arange(60), params).tolist()
    torch.set_num_threads(1)
    assert native.draw(logits, np.arange(60), params).tolist() == together
    for row in range(60):
        one = [getattr(params, name)[row : row + 1] for name in ("temperature", "top_k", "top_p", "min_p", "uniforms")]
        assert native.draw(logits[row : row + 1], np.array([0]), DrawParams(*one)).tolist() == together[row : row + 1]
    torch.set_num_threads(before)


def test_bad_rows_give_some_id_and_nothing_else_happens(native):
    logits, params = make_logits(0, 4, 300), make_params(0, 4)
    clean = native.draw(logits, np.arange(4), params).tolist()
    logits[1, 5], logits[2] = float("nan"), -INF
    got = native.draw(logits, np.arange(4), params).tolist()
    assert [got[0], got[3]] == [clean[0], clean[3]]
    assert all(0 <= token < 300 for token in got)
