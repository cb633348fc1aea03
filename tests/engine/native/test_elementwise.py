"""The small operators against the same in float64, on both builds; rows alone and in company, one thread and two."""

import numpy as np
import pytest
import torch

from cbgen.engine.native.library import Int, Int64, Pointer
from cbgen.engine.operators.base import HeadLayout, HeadNorms
from cbgen.engine.operators.native import NativeOperators
from cbgen.engine.operators.reference import ReferenceOperators

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 15, 16, 17, 64, 576, 1000]


@pytest.fixture(scope="session")
def native(library):
    return NativeOperators(library)


def random(seed, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_close(got, expected):
    """Within half a unit of the last place of what is stored, and float32's own error before."""
    eps = torch.finfo(got.dtype).eps
    assert got.shape == expected.shape
    error = (got.double() - expected).abs()
    bound = expected.abs() * (0.5 * eps + 1e-6) + max(torch.finfo(got.dtype).smallest_normal * eps, 1e-6 * 1e-1)
    assert bool((error <= bound).all()), float((error / bound).max())


def with_two_threads(compute):
    """The result with one thread, after seeing that two give the same bits."""
    results, before = [], torch.get_num_threads()
    for count in (2, 1):
        torch.set_num_threads(count)
        results.append(compute())
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return results[-1]


# -- numbers -----------------------------------------------------------------------------------------------------------


def cast(library, x, dtype):
    codes = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
    function = library.function("cbgen_cast", [Pointer, Int, Pointer, Int, Int64, Int])
    y = torch.empty(len(x), dtype=dtype)
    function(x.data_ptr(), codes[x.dtype], y.data_ptr(), codes[dtype], len(x), 1)
    return y


def same_bits(got, expected, as_dtype):
    same = got.view(as_dtype) == expected.view(as_dtype)
    return bool((same | (got.isnan() & expected.isnan())).all())  # any NaN is as good as another


def test_casts_of_all_sixteen_bit_numbers_and_of_many_floats_are_torch_s(library):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        halves = every.view(dtype)
        assert same_bits(cast(library, halves, torch.float32), halves.float(), torch.int32)
        bits = np.random.default_rng(0).integers(0, 2**32, 1_000_003, dtype=np.uint32)
        near = (halves.float().view(torch.int32)[:, None] + torch.tensor([-1, 0, 1])).flatten()  # and around ties
        ties = halves.float().view(torch.int32)[:, None] + torch.tensor([0xFFF, 0x1000, 0x7FFF, 0x8000, 0x8001])
        floats = torch.cat([torch.from_numpy(bits.view(np.int32)), near, ties.flatten()]).to(torch.int32)
        floats = floats.view(torch.float32)
        assert same_bits(cast(library, floats, dtype), floats.to(dtype), torch.int16)


def test_exp_is_within_two_units_of_the_last_place(library):
    function = library.function("cbgen_exp", [Pointer, Pointer, Int64])
    x = torch.cat([torch.linspace(-110, 95, 2_000_001), torch.linspace(-1, 1, 100_001)])
    y = torch.empty_like(x)
    function(x.data_ptr(), y.data_ptr(), len(x))
    exact = torch.exp(x.double())
    normal = (exact > 1.2e-38) & (exact < 3.4e38)
    assert float(((y.double() - exact) / exact)[normal].abs().max()) < 2 * 2**-23
    assert float((y.double() - exact)[exact <= 1.2e-38].abs().max()) <= 2**-148
    assert bool(y[exact > 3.41e38].isinf().all())
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0])
    y = torch.empty_like(special)
    function(special.data_ptr(), y.data_ptr(), 4)
    assert str(y.tolist()) == "[nan, inf, 0.0, 1.0]"


# -- norms and activations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(native, dtype, size):
    for seed, num_rows in enumerate((0, 1, 3, 70)):
        wide = random(seed, num_rows, size + 5, dtype=dtype, scale=10.0**seed)
        x, weight = wide[:, 2 : size + 2], random(seed + 50, size)
        (got,) = with_two_threads(lambda x=x, weight=weight: [native.rms_norm(x, weight, 1e-5)])
        exact = x.double()
        assert_close(got, exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_of_a_growing_residual(native, dtype, size):
    for seed, num_rows in enumerate((1, 3, 70)):
        x, start = (
            random(seed, num_rows, size, dtype=dtype),
            random(seed + 9, num_rows, size + 3, dtype=dtype)[:, :size],
        )
        weight = random(seed + 50, size)

        def compute(x=x, start=start, weight=weight):
            residual = start.clone()
            return [native.rms_norm(x, weight, 1e-6, residual), residual]

        got, residual = with_two_threads(compute)
        assert torch.equal(residual, (x.float() + start.float()).to(dtype))
        exact = residual.double()
        assert_close(got, exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", SIZES)
def test_activation_mul(native, dtype, activation, size):
    for seed, num_rows in enumerate((0, 1, 3, 70)):
        gate_up = random(seed, num_rows, 2 * size + 3, dtype=dtype, scale=3.0)[:, : 2 * size]
        (got,) = with_two_threads(lambda x=gate_up: [native.activation_mul(x, activation)])
        gate, up = gate_up.double().chunk(2, dim=-1)
        act = torch.nn.functional.silu if activation == "silu" else _gelu_tanh
        assert_close(got, act(gate) * up)


def _gelu_tanh(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_far_out_and_of_nan(native, activation):
    gate = torch.tensor([-1e4, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30, float("inf"), float("nan")])
    got = native.activation_mul(torch.cat([gate, torch.ones(10)])[None], activation)[0]
    expected = ReferenceOperators().activation_mul(torch.cat([gate, torch.ones(10)])[None], activation)[0]
    assert torch.allclose(got, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_nan_stays_in_its_row(native):
    x = random(0, 8, 100)
    clean = native.rms_norm(x, torch.ones(100), 1e-6)
    x[3, 50] = float("nan")
    got = native.rms_norm(x, torch.ones(100), 1e-6)
    assert bool(got[3].isnan().all())
    assert torch.equal(got[[0, 1, 2, 4, 5, 6, 7]], clean[[0, 1, 2, 4, 5, 6, 7]])


def test_rows_do_not_depend_on_their_company(native):
    x, weight = random(1, 90, 576, dtype=torch.bfloat16), random(2, 576)
    together = native.rms_norm(x, weight, 1e-6)
    gated = native.activation_mul(x, "silu")
    for row in (0, 31, 89):
        assert torch.equal(native.rms_norm(x[row : row + 1], weight, 1e-6)[0], together[row])
        assert torch.equal(native.activation_mul(x[row : row + 1], "silu")[0], gated[row])


# -- rotary embedding and the cache ------------------------------------------------------------------------------------


def rotary(seed, num_tokens, num_rotated, dtype):
    angles = random(seed, num_tokens, num_rotated // 2, scale=3.0).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rope_in_float64(heads, norm_weight, eps, cos, sin):
    heads = heads.double()
    if norm_weight is not None:
        heads = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * norm_weight.double()
    size = cos.shape[-1]
    turned, first, second = heads[..., :size], heads[..., : size // 2], heads[..., size // 2 : size]
    turned = turned * cos.double()[:, None] + torch.cat([-second, first], -1) * sin.double()[:, None]
    return torch.cat([turned, heads[..., size:]], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "num_rotated"),
    [(9, 3, 64, 64), (16, 8, 128, 128), (7, 1, 80, 20), (4, 4, 6, 6), (2, 1, 256, 64)],
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_store(native, dtype, num_heads, num_kv_heads, head_dim, num_rotated, normed):
    for seed, num_tokens in enumerate((0, 1, 5, 40)):
        size = (num_heads + 2 * num_kv_heads) * head_dim
        start = random(seed, num_tokens, size + 3, dtype=dtype)[:, :size]
        cos, sin = rotary(seed, num_tokens, num_rotated, [dtype, torch.float32][seed % 2])
        weights = [random(seed + 30, head_dim), random(seed + 40, head_dim)] if normed else [None, None]
        layout = HeadLayout(num_heads, num_kv_heads, head_dim, HeadNorms(*weights, 1e-6) if normed else None)
        slots = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:num_tokens]

        def compute(start=start, layout=layout, cos=cos, sin=sin, slots=slots):
            qkv = start.clone()
            caches = [torch.zeros(4, layout.num_kv_heads, 16, layout.head_dim, dtype=dtype) for _ in range(2)]
            return [native.rope_and_store(qkv, layout, cos, sin, *caches, slots), qkv, *caches]

        query, qkv, key_cache, value_cache = with_two_threads(compute)
        heads = start.reshape(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        assert_close_after_sums(query, rope_in_float64(heads[:, :num_heads], weights[0], 1e-6, cos, sin))
        assert torch.equal(qkv[:, : num_heads * head_dim], query.flatten(1))
        assert torch.equal(qkv[:, num_heads * head_dim :], start[:, num_heads * head_dim :])
        key = rope_in_float64(heads[:, num_heads : num_heads + num_kv_heads], weights[1], 1e-6, cos, sin)
        assert_close_after_sums(key_cache.transpose(1, 2).flatten(0, 1)[slots], key)
        assert torch.equal(value_cache.transpose(1, 2).flatten(0, 1)[slots], heads[:, num_heads + num_kv_heads :])
        untouched = torch.ones(64, dtype=torch.bool).index_fill_(0, slots, False)
        for cache in (key_cache, value_cache):
            assert not cache.transpose(1, 2).flatten(0, 1)[untouched].any()


def assert_close_after_sums(got, expected):
    """As `assert_close`, but a difference of two products may cancel: the error is that of the larger ones."""
    eps = torch.finfo(got.dtype).eps
    assert bool(((got.double() - expected).abs() <= expected.abs() * 0.5 * eps + 3e-6).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_equals_the_reference(native, dtype):
    for seed, num_tokens in enumerate((0, 1, 30)):
        key = random(seed, 3, num_tokens, 20, dtype=dtype).transpose(0, 1)  # strided as attention modules give them
        value = random(seed + 9, num_tokens, 3, 50, dtype=dtype)[..., :24]
        slots = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:num_tokens]
        caches = [[torch.zeros(4, 3, 16, dim, dtype=dtype) for dim in (20, 24)] for _ in range(2)]
        native.store(key, value, *caches[0], slots)
        ReferenceOperators().store(key, value, *caches[1], slots)
        assert all(torch.equal(got, expected) for got, expected in zip(*caches, strict=True))


def test_what_the_kernels_do_not_read_goes_to_the_reference(native):
    x = random(0, 4, 64, dtype=torch.float64)
    assert native.rms_norm(x, torch.ones(64), 1e-6).dtype == torch.float64
    transposed = random(0, 64, 4).T
    got, expected = (native.activation_mul(t, "silu") for t in (transposed, transposed.contiguous()))
    assert torch.allclose(got, expected)
    assert native.argmax(random(3, 50, 4, dtype=torch.float64)).tolist() == random(3, 50, 4).argmax(-1).tolist()


def test_the_reference_is_right_too():
    reference = ReferenceOperators()
    for dtype in DTYPES:
        test_rms_norm(reference, dtype, 64)
        test_rms_norm_of_a_growing_residual(reference, dtype, 64)
        test_activation_mul(reference, dtype, "silu", 17)  # by torch, gelu near 0 is less exact than our bound
        test_rope_and_store(reference, dtype, 7, 1, 80, 20, True)
