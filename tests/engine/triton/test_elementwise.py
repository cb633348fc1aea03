"""The small operators on Triton's interpreter: the same cases as the native ones, against the same in float64.

The interpreter cuts float32 off where bfloat16 is stored instead of rounding it, so bfloat16 has cases of its own.
"""

import pytest
import torch

from cbgen.engine.operators.reference import ReferenceOperators
from cbgen.engine.operators.triton import TritonOperators
from tests.engine.native import test_elementwise as cases
from tests.engine.native.test_elementwise import random

DTYPES = [torch.float32, torch.float16]


pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # by numpy, in exp far out


@pytest.fixture(scope="module")
def operators():
    return TritonOperators((9, 0), 132)


@pytest.fixture(autouse=True)
def _once(monkeypatch):
    """The interpreter has no threads: one run says it all."""
    monkeypatch.setattr(cases, "with_two_threads", lambda compute: compute())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 17, 64, 576])
def test_rms_norm(operators, dtype, size):
    cases.test_rms_norm(operators, dtype, size)
    cases.test_rms_norm_of_a_growing_residual(operators, dtype, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 17, 1000, 1300])
def test_activation_mul(operators, dtype, size):
    cases.test_activation_mul(operators, dtype, "silu", size)
    cases.test_activation_mul(operators, dtype, "gelu_tanh", size)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_far_out_and_of_nan(operators, activation):
    cases.test_activations_far_out_and_of_nan(operators, activation)


def test_rows_do_not_depend_on_their_company(operators):
    cases.test_nan_stays_in_its_row(operators)
    cases.test_rows_do_not_depend_on_their_company(operators)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "num_rotated"),
    [(9, 3, 64, 64), (16, 8, 128, 128), (7, 1, 80, 20), (4, 4, 6, 6), (2, 1, 256, 64), (3, 1, 96, 96)],
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_store(operators, dtype, num_heads, num_kv_heads, head_dim, num_rotated, normed):
    cases.test_rope_and_store(operators, dtype, num_heads, num_kv_heads, head_dim, num_rotated, normed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_equals_the_reference(operators, dtype):
    cases.test_store_equals_the_reference(operators, dtype)


def test_bfloat16_is_within_the_units_that_are_cut_off(operators):
    reference = ReferenceOperators()
    x, start, weight = (random(seed, 5, 100, dtype=torch.bfloat16) for seed in range(3))
    residuals = start.clone(), start.clone()
    layout = cases.HeadLayout(3, 1, 20, cases.HeadNorms(weight[0, :20].float(), weight[1, :20].float(), 1e-6))
    qkv = x.clone(), x.clone()
    caches = [[torch.zeros(1, 1, 16, 20, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2)]
    angles, slots = cases.rotary(0, 5, 12, torch.bfloat16), torch.arange(5)
    results = [
        [
            operators.rms_norm(x, weight[0].float(), 1e-6, residuals[i]),
            residuals[i],
            operators.activation_mul(x, "silu"),
            operators.activation_mul(x, "gelu_tanh"),
            operators.rope_and_store(qkv[i], layout, *angles, *caches[i], slots),
            *caches[i],
        ]
        for i, operators in enumerate((operators, reference))
    ]
    for got, expected in zip(*results, strict=True):
        assert got.dtype == torch.bfloat16
        assert torch.allclose(got.float(), expected.float(), rtol=2 * 2**-7, atol=1e-6)


def test_values_that_are_not_numbers_are_stored_as_they_are(operators):
    qkv = random(0, 2, 3 * 8)
    qkv[:, 16:] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e30, -1e-30, 1.0])
    caches = [torch.zeros(1, 1, 16, 8) for _ in range(2)]
    cos, sin = cases.rotary(0, 2, 8, torch.float32)
    layout = cases.HeadLayout(1, 1, 8, cases.HeadNorms(torch.ones(8), torch.ones(8), 1e-6))
    operators.rope_and_store(qkv, layout, cos, sin, *caches, torch.tensor([3, 5]))
    assert torch.equal(caches[1][0, 0, [3, 5]].view(torch.int32), qkv[:, 16:].view(torch.int32))


def test_offsets_in_large_tensors_are_64_bit(operators):
    """A stride and a slot past 2^31; nothing of that size is touched, so nothing of it is really there."""
    columns = 1 << 30
    wide = torch.empty(4, columns, dtype=torch.float16)
    x = wide[:, :16]
    x.copy_(random(0, 4, 16))
    got = operators.rms_norm(x, torch.ones(16), 1e-6)
    assert torch.equal(got, operators.rms_norm(x.contiguous(), torch.ones(16), 1e-6))
    cache = torch.empty(2**31 // 256 + 1, 1, 16, 16, dtype=torch.float16)
    operators.store(x[:1, None], x[:1, None], cache, cache, torch.tensor([len(cache) * 16 - 1]))
    assert torch.equal(cache[-1, 0, -1], x[0])


def test_what_the_kernels_do_not_read_goes_to_the_reference(operators):
    x = random(0, 4, 64, dtype=torch.float64)
    assert operators.rms_norm(x, torch.ones(64), 1e-6).dtype == torch.float64
    transposed = random(0, 64, 4).T
    got = operators.activation_mul(transposed, "silu")
    assert torch.equal(got, ReferenceOperators().activation_mul(transposed, "silu"))
