"""Packed bfloat16 products against float64, over shapes, strides, epilogues and company."""

import pytest
import torch
import torch.nn.functional as F

from cbgen.engine.native.gemm import NativeGemm, interleave
from cbgen.engine.native.library import open_library

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def gemm():
    gemm = NativeGemm(open_library(lambda _: None))
    if not gemm.is_available:
        pytest.skip("this CPU has no AVX512-BF16")
    return gemm


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def _error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_rows", [1, 2, 13, 14, 15, 28, 29, 64, 100])
@pytest.mark.parametrize(("num_columns", "num_features"), [(1, 2), (31, 64), (32, 66), (33, 576), (96, 50), (960, 576)])
def test_product_is_as_exact_as_rounding_allows(gemm, num_rows, num_columns, num_features):
    x, weight = _random(num_rows, num_features), _random(num_columns, num_features, seed=1)
    bias = torch.randn(num_columns)
    exact = x.double() @ weight.double().T + bias.double()
    out = torch.full((num_rows, num_columns), float("nan"), dtype=BF16)
    gemm.linear(x, gemm.pack(weight), bias, out)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=2e-3 * num_features**0.5)
    assert _error(out, exact) < 1.05 * _error(exact.to(BF16), exact) + 1e-6


def test_rows_may_be_strided_and_nothing_beside_them_is_touched(gemm):
    wide, weight = _random(9, 200), _random(40, 64, seed=1)
    x = wide[:, 100:164]
    out = torch.full((9, 100), 7.0, dtype=BF16)
    gemm.linear(x, gemm.pack(weight), None, out[:, 30:70])
    assert torch.equal(out[:, :30], torch.full((9, 30), 7.0, dtype=BF16))
    assert torch.equal(out[:, 70:], torch.full((9, 30), 7.0, dtype=BF16))
    assert _error(out[:, 30:70], x.double() @ weight.double().T) < 4e-3


def test_add_rounds_once(gemm):
    x, weight, residual = _random(21, 64), _random(50, 64, seed=1), _random(21, 50, seed=2)
    exact = residual.double() + x.double() @ weight.double().T
    gemm.linear(x, gemm.pack(weight), None, residual, "add")
    assert _error(residual, exact) < 1.05 * _error(exact.to(BF16), exact) + 1e-6


@pytest.mark.parametrize("epilogue", ["silu_mul", "gelu_tanh_mul"])
def test_activation_inside_the_product(gemm, epilogue):
    x, gate, up = _random(17, 64), _random(48, 64, seed=1), _random(48, 64, seed=2)
    bias = torch.randn(96)
    gated = x.double() @ gate.double().T + bias[:48].double()
    other = x.double() @ up.double().T + bias[48:].double()
    activated = F.silu(gated) if epilogue == "silu_mul" else F.gelu(gated, approximate="tanh")
    exact = activated * other
    out = torch.empty(17, 48, dtype=BF16)
    gemm.linear(x, gemm.pack(interleave(gate, up)), interleave(bias[:48], bias[48:]), out, epilogue)
    assert _error(out, exact) < 1.05 * _error(exact.to(BF16), exact) + 1e-6


def test_activation_of_large_numbers(gemm):
    """exp neither overflows nor makes NaN; NaN stays NaN."""
    gates = torch.tensor([-1e4, -100.0, -88.0, -0.0, 0.0, 88.0, 1e4, float("inf"), float("nan")])
    x = torch.stack([gates, torch.ones_like(gates)], dim=1).to(BF16)  # [9, 2]
    gate, up = torch.tensor([[1.0, 0.0]]).expand(16, 2).to(BF16), torch.tensor([[0.0, 1.0]]).expand(16, 2).to(BF16)
    finite = x[:7]
    out = torch.empty(7, 16, dtype=BF16)
    gemm.linear(finite, gemm.pack(interleave(gate, up)), None, out, "silu_mul")
    expected = F.silu(finite[:, :1].double()).to(BF16).expand(7, 16)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-30)
    out = torch.empty(9, 16, dtype=BF16)
    gemm.linear(x, gemm.pack(interleave(gate, up)), None, out, "silu_mul")
    assert out[8].isnan().all()
    assert not out[:7].isnan().any()


@pytest.mark.parametrize("seed", range(5))
def test_a_row_is_bitwise_the_same_in_any_company_and_on_any_number_of_threads(gemm, seed):
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_columns = (int(torch.randint(2, 90, (), generator=generator)) for _ in range(2))
    x, packed = _random(num_rows, 130, seed=seed), gemm.pack(_random(num_columns, 130, seed=seed + 100))

    def product(rows):
        return gemm.linear(rows, packed, None, torch.empty(len(rows), num_columns, dtype=BF16))

    together, threads = product(x), torch.get_num_threads()
    alone = torch.cat([product(x[i : i + 1]) for i in range(num_rows)])
    assert torch.equal(together, alone)
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            assert torch.equal(product(x), together)
    finally:
        torch.set_num_threads(threads)


def test_no_rows(gemm):
    out = torch.empty(0, 40, dtype=BF16)
    assert gemm.linear(_random(0, 64), gemm.pack(_random(40, 64)), None, out).shape == (0, 40)


def test_what_is_not_accepted(gemm):
    assert gemm.accepts(torch.empty(3, 4, dtype=BF16))
    assert not gemm.accepts(torch.empty(3, 5, dtype=BF16))
    assert not gemm.accepts(torch.empty(3, 4))
    assert interleave(torch.empty(24, 4), torch.empty(24, 4)) is None


def test_a_library_for_any_cpu_has_no_such_kernel():
    assert not NativeGemm(open_library(lambda _: None, plain=True)).is_available
