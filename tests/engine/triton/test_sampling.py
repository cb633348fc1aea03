"""Argmax and draws on Triton's interpreter, against the reference in torch and a naive twin in float64.

The interpreter is slow, so vocabularies are small. The kernels are tried as they are on a GPU and with tiles so small
that small vocabularies have several, and so few candidates that the search over a whole row happens as well.
"""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from cbgen.engine.operators.base import DrawParams, Penalties, SampleTensors
from cbgen.engine.operators.reference import ReferenceOperators
from cbgen.engine.operators.triton import TritonOperators
from cbgen.engine.sampling_input import random_states, uniforms
from cbgen.engine.slot_state import bits_of
from cbgen.engine.triton.sampling import TritonSampling, _uniform
from tests.engine.native import test_sampling as cases
from tests.engine.native.test_sampling import INF, make_logits, make_params

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REFERENCE = ReferenceOperators()
SHAPES = {"as on a GPU": {}, "small": {"part": 64, "tile": 128, "max_candidates": 64}}

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # by numpy, where a temperature is tiny


def make_operators(**shape):
    operators = TritonOperators((9, 0), 132)
    operators._sampling = TritonSampling(**shape)
    return operators


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def operators(request):
    return make_operators(**request.param)


@pytest.fixture(scope="module")
def small():
    return make_operators(**SHAPES["small"])


def naive_draw(logits, temperature, top_k, top_p, min_p, uniform):
    """One token at a time, by a full sort, in Python's own numbers; only the scaled logits are float32."""
    logits = logits.float()
    scaled = [float(x) for x in (logits - logits.max()) / temperature]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    order = order[:top_k] if top_k > 0 else order
    order = [i for i in order if min_p <= 0 or scaled[i] >= float(np.log(np.float32(min_p)))]
    if top_p < 1:
        wanted, mass, size = top_p * math.fsum(math.exp(scaled[i]) for i in order), 0.0, 0
        while size < len(order) and (size == 0 or mass < wanted):
            mass += math.exp(scaled[order[size]])
            size += 1
        order = order[:size]
    order.sort()
    target, mass = uniform * math.fsum(math.exp(scaled[i]) for i in order), 0.0
    for i in order:
        mass += math.exp(scaled[i])
        if mass > target:
            return i
    return order[-1]


def assert_draws(operators, logits, rows, params):
    """As the reference, and as the naive twin."""
    drawn = operators.draw(logits, rows, params).tolist()
    columns = zip(params.temperature, params.top_k, params.top_p, params.min_p, params.uniforms, strict=True)
    naive = [
        naive_draw(logits[row], float(t), int(k), float(p), float(m), float(u))
        for row, (t, k, p, m, u) in zip(rows, columns, strict=True)
    ]
    assert drawn == REFERENCE.draw(logits, rows, params).tolist() == naive


# -- the most likely token --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 513, 1003])
def test_argmax_is_the_reference_s(operators, dtype, vocab_size):
    for seed, num_rows in enumerate((0, 1, 12)):
        logits = make_logits(seed, num_rows, vocab_size + 7, dtype, scale=0.01)[:, :vocab_size]
        logits = (logits * 100).round() / 100  # many equal maxima
        assert torch.equal(operators.argmax(logits), REFERENCE.argmax(logits))


def test_argmax_of_rows_that_are_not_sound(small):
    clean = make_logits(0, 14, 300)
    for place in (0, 63, 64, 299):
        logits = clean.clone()
        for row, values in enumerate(([float("nan")], [INF], [float("nan"), INF], [INF, -INF], [float("nan"), -INF])):
            logits[row, [place, 150][: len(values)]] = torch.tensor(values)
        expected = [-1] * 5 + clean.argmax(-1).tolist()[5:]
        assert small.argmax(logits).tolist() == REFERENCE.argmax(logits).tolist() == expected
    cases.test_minus_infinity_forbids_and_a_row_of_it_is_not_sound(small)


# -- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab_size", "scale", "num_rows"), [(1, 1.0, 3), (64, 0.1, 8), (500, 3.0, 12)])
def test_draws(operators, dtype, vocab_size, scale, num_rows):
    logits = make_logits(0, 30, vocab_size + 3, dtype, scale)[:, :vocab_size]  # a view, so that rows are strided
    rows = np.random.default_rng(0).integers(0, 30, num_rows)
    assert_draws(operators, logits, rows, make_params(vocab_size, num_rows))


@pytest.mark.parametrize("given", [{}, {"top_k": 0}, {"top_k": 0, "temperature": 2.0, "min_p": 0.0}], ids=str)
def test_draws_of_more_tokens_than_one_tile(given):
    logits = make_logits(3, 6, 2999)
    assert_draws(make_operators(), logits, np.arange(6), make_params(3, 6, **given))


@pytest.mark.parametrize(
    "given",
    [
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"top_p": 1.0, "min_p": 0.0}, {"top_k": 0, "min_p": 0.0},
        {"top_k": 0, "top_p": 1.0}, {"top_k": 0, "top_p": 5e-324}, {"top_k": 0, "top_p": 1 - 2**-24, "min_p": 0.0},
        {"temperature": 1e-30}, {"temperature": 1e6}, {"temperature": 1e-45}, {"top_k": 1}, {"top_k": -1},
        {"top_k": 299}, {"min_p": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_each_way_of_truncation_alone_and_at_its_bounds(small, given):
    for seed, scale in enumerate((0.0, 0.3, 3.0, 1e5)):  # all equal, flat, as models give them, one token alone
        logits = make_logits(seed, 2, 300, scale=scale)
        logits[:, 9] = -INF
        params = make_params(seed, 2, **given)
        got = small.draw(logits, np.arange(2), params).tolist()
        assert got == REFERENCE.draw(logits, np.arange(2), params).tolist()
        assert 9 not in got


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_ties_are_kept_by_lowest_id(operators, top_p):
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    logits = torch.arange(4.0).repeat_interleave(50)[order][None]
    rows = np.zeros(6, dtype=np.int64)
    for given in ({"top_k": 0, "top_p": top_p}, {"top_k": 70, "top_p": 1.0}, {"top_k": 49, "top_p": top_p}):
        params = make_params(1, 6, temperature=1.0, min_p=0.0, **given)
        params.uniforms[:] = np.linspace(0, 1, 6) * (1 - 2**-53)  # the first and the last of those that are kept, too
        assert_draws(operators, logits, rows, params)


def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last(small):
    logits = torch.zeros(1, 500)
    logits[0, 0] = logits[0, -1] = -INF
    params = make_params(0, 2, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    params.uniforms[:] = 0.0, np.nextafter(1.0, 0.0)
    assert small.draw(logits, np.zeros(2, dtype=np.int64), params).tolist() == [1, 498]


def test_a_row_draws_the_same_alone(small):
    logits, params = make_logits(5, 8, 400, torch.bfloat16), make_params(5, 8)
    together = small.draw(logits, np.arange(8), params).tolist()
    for row in range(8):
        one = [getattr(params, name)[row : row + 1] for name in ("temperature", "top_k", "top_p", "min_p", "uniforms")]
        assert small.draw(logits[row : row + 1], np.array([0]), DrawParams(*one)).tolist() == together[row : row + 1]


def test_bad_rows_give_some_id_and_nothing_else_happens(small):
    cases.test_bad_rows_give_some_id_and_nothing_else_happens(small)


# -- whole samples ----------------------------------------------------------------------------------------------------


@triton.jit
def _uniforms_kernel(random_ptr, position_ptr, out_ptr):
    row = tl.program_id(0)
    tl.store(out_ptr + row, _uniform(random_ptr + row, position_ptr + row, True))


def make_words(num_rows):
    rng = np.random.default_rng(num_rows)
    words = rng.integers(0, 2**64, (num_rows, 4), dtype=np.uint64)
    words[::2] >>= rng.integers(0, 64, (len(words[::2]), 4), dtype=np.uint64)  # small ones, as most are
    words[:, 3] >>= np.uint64(1)
    return words


def states_and_positions(words):
    states = random_states(words[:, :3]).view(np.int64)
    return torch.from_numpy(states), torch.from_numpy(words[:, 3].astype(np.int64))


def test_uniforms_are_the_same_bits():
    words = make_words(500)
    out = torch.empty(500, dtype=torch.float64)
    _uniforms_kernel[(500,)](*states_and_positions(words), out)
    assert np.array_equal(out.numpy(), uniforms(words))


def test_a_sample_is_the_reference_s(operators):
    """Greedy rows and rows that draw, of which some must not stop yet, and some are not sound."""
    logits, params = make_logits(7, 16, 200), make_params(7, 16, temperature=1.0)
    logits[3, 7], logits[4, 7], logits[5] = float("nan"), INF, -INF
    logits[6:8] = -INF
    logits[6:8, 2] = 1.0
    params.temperature[::3] = 0.0
    stops = logits.nan_to_num(0.0).topk(4, dim=1).indices
    stops[::2, 0] = -1
    stops[6:8, 2] = 2  # all that is left
    forbids = torch.arange(16) % 4 != 0
    columns = (torch.from_numpy(column) for column in (params.temperature, params.top_k, params.top_p, params.min_p))
    tensors = SampleTensors(*columns, *states_and_positions(make_words(16)))
    factor = torch.tensor([1.0, 1.3, 0.5, 50.0]).repeat(4)
    seen = np.stack([bits_of(np.arange(start, 200, 5).astype(np.int32), 200) for start in range(7)])
    penalties = Penalties(factor, torch.from_numpy(seen), torch.arange(16) % 7)
    nobody = torch.zeros(16, dtype=torch.bool)
    settings = [(), (stops, forbids), (stops[:, :1], forbids), (stops, nobody)]
    settings += [(None, None, penalties), (stops, forbids, penalties)]
    for given in settings:
        before = logits.clone()
        got = operators.sample(logits, tensors, *given)
        assert got.tolist() == REFERENCE.sample(logits, tensors, *given).tolist()
        assert got[3:6].tolist() == [-1, -1, -1]
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
        if len(given) == 2 and bool(given[1].any()):
            assert got[6].tolist() == (0 if given[0].shape[1] > 1 else 2)
    assert operators.sample(logits[:0], SampleTensors(*(torch.empty(0) for _ in range(6)))).tolist() == []


def test_what_the_kernels_do_not_read_goes_to_the_reference(small):
    logits = make_logits(0, 3, 50).double()
    assert torch.equal(small.argmax(logits), logits.argmax(-1))
    params = make_params(0, 3)
    assert torch.equal(small.draw(logits, np.arange(3), params), REFERENCE.draw(logits, np.arange(3), params))
