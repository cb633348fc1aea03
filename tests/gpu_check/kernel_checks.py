"""The comparisons of stage `kernels`, as a list. Options are paired with sizes rather than crossed, since each pair
that a kernel has not seen yet is compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.operators.base import DrawParams, HeadLayout, HeadNorms, Operators, Penalties, SampleTensors
from cbgen.engine.operators.reference import ReferenceOperators
from tests.engine.native.paged_case import PagedCase, make_case, naive_attention
from tests.gpu_check.kernels import Check, Finding, difference, equal_ids, exactly, together

_REFERENCE = ReferenceOperators()
_DRAWS_THAT_MAY_DIFFER = 0.005
_HEADS = {1: (4, 4), 3: (9, 3), 4: (8, 2), 7: (7, 1), 8: (16, 2)}  # ratio -> query heads, KV heads
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 37},
    {"softcap": 5.0},
    {"sinks": True},
    {"window": 100, "softcap": 20.0, "sinks": True},
)
_KINDS = ("decode", "decode, long", "decode, many", "extend", "mixed", "mixed, padded")


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of the problems, for a GPU or for Triton's interpreter, which rounds towards zero in bfloat16."""

    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...]
    lengths: dict[str, tuple[list[int], list[int]]]  # kind -> positions held, decodes first; tokens of the chunks
    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    vocabularies: tuple[int, ...]
    rows: int


def _sizes(*, dry: bool) -> _Sizes:
    if dry:
        lengths = {
            "decode": ([1, 17, 40], []),
            "decode, long": ([70], []),
            "decode, many": ([5] * 6, []),
            "extend": ([3, 20], [3, 9]),
            "mixed": ([8, 21, 25], [7]),
            "mixed, padded": ([8, 21, 18], [5, 18]),
        }
        return _Sizes((torch.float32, torch.float16), (16, 80), lengths, (64, 100), (1, 5), (37, 300), 12)
    rng = np.random.default_rng(0)
    lengths = {
        "decode": ([1, 16, 17, *rng.integers(2, 1500, 9).tolist()], []),
        "decode, long": ([5000, 130], []),
        "decode, many": (rng.integers(1, 200, 300).tolist(), []),
        "extend": ([1, 130, 700, 64], [1, 130, 90, 40]),
        "mixed": ([9, 300, 1200, 77, 513, 260], [77, 1, 129]),
        "mixed, padded": ([40, 700, 128, 333], [128, 50]),
    }
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    hidden, vocabularies = (64, 576, 1536, 4096, 5000), (32, 5003, 151_936)
    return _Sizes(dtypes, (64, 80, 128, 256), lengths, hidden, (1, 7, 300), vocabularies, 300)


def all_checks(*, dry: bool) -> list[Check]:
    """Those of attention first; neighbours differ in what is compiled for them."""
    sizes = _sizes(dry=dry)
    checks = _attention_checks(sizes)
    for dtype in sizes.dtypes:
        checks += _elementwise_checks(sizes, dtype) + _sampling_checks(sizes, dtype)
    return checks


# -- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Problem:
    """One attention problem; `options` are those of `make_case`."""

    kind: str
    dtype: torch.dtype
    head_dim: int
    ratio: int
    block_size: int
    options: dict[str, Any]
    seed: int

    @property
    def name(self) -> str:
        told = " ".join(self.options) or "plain"
        return f"{self.kind}, head size {self.head_dim}, ratio {self.ratio}, block {self.block_size}, {told}"

    def make(self, sizes: _Sizes) -> PagedCase:
        lengths, chunks = sizes.lengths[self.kind]
        generator, dims = torch.Generator().manual_seed(self.seed), (self.head_dim, self.head_dim)
        heads, block_size = _HEADS[self.ratio], self.block_size
        return make_case(
            generator, lengths, chunks, heads=heads, dims=dims, dtype=self.dtype, block_size=block_size, **self.options
        )


def _attention_checks(sizes: _Sizes) -> list[Check]:
    checks: list[Check] = []
    ratios = list(_HEADS)
    for dtype in sizes.dtypes:
        for head_dim in sizes.head_dims:
            for kind in _KINDS:
                number = len(checks)
                ratio, options = ratios[number % len(ratios)], _OPTIONS[(number // 2) % len(_OPTIONS)]
                block_size = 32 if kind == "extend" and number % 2 else 16
                problem = _Problem(kind, dtype, head_dim, ratio, block_size, options, number)
                checks.append(Check("attention", problem.name, dtype, partial(_attention, sizes, problem)))
    return checks


def _attention(sizes: _Sizes, problem: _Problem, operators: Operators, device: torch.device) -> Finding:
    case = problem.make(sizes)
    expected = naive_attention(case)
    if problem.kind.endswith("padded"):
        case = _padded(case)
    got = attend(operators, case, device)
    padding_is_finite = bool(torch.isfinite(got[len(expected) :]).all())
    if not padding_is_finite:
        return Finding(float("inf"), float("inf"))
    return difference(got[: len(expected)], expected, ulps=2, float32_ulps=64)


def _padded(case: PagedCase, *, num_seqs: int = 2, num_tokens: int = 5) -> PagedCase:
    """With sequences that have no token in this step, and tokens that belong to no sequence."""
    num_heads, head_dim = case.query.shape[1:]
    wide = torch.zeros(len(case.query) + num_tokens, num_heads + 1, head_dim, dtype=case.query.dtype)
    wide[: len(case.query), :num_heads] = case.query
    return replace(
        case,
        query=wide[:, :num_heads],
        block_tables=torch.cat([case.block_tables, case.block_tables[:1].expand(num_seqs, -1)]),
        cu_seqlens_q=torch.cat([case.cu_seqlens_q, case.cu_seqlens_q[-1:].expand(num_seqs)]),
        context_lens=torch.cat([case.context_lens, torch.ones(num_seqs, dtype=torch.int32)]),
    )


def attend(operators: Operators, case: PagedCase, device: torch.device) -> Tensor:
    """[T, Hq, Dv] on the device. The host's copies of lengths are left out: kernels must not need them."""
    on = {name: value.to(device) for name, value in vars(case).items() if isinstance(value, Tensor)}
    call = AttentionCall(0, case.scale, case.window, case.softcap, on.get("sinks"))
    metadata = AttentionMetadata(
        slot_mapping=torch.zeros(len(case.query), dtype=torch.int64, device=device),
        block_tables=on["block_tables"],
        context_lens=on["context_lens"],
        cu_seqlens_q=on["cu_seqlens_q"],
        num_decodes=case.num_decodes,
        max_context_len=int(case.context_lens.max()),
        query_starts=[],
        host_context_lens=[],
    )
    # Copying makes a view contiguous; a slice of something wider is what the engine passes.
    query = torch.cat([on["query"], on["query"][:, :1]], dim=1)[:, : case.query.shape[1]]
    return operators.attention(call, query, on["key_cache"], on["value_cache"], metadata)


# -- norms, activations, rotations -----------------------------------------------------------------------------------


def _elementwise_checks(sizes: _Sizes, dtype: torch.dtype) -> list[Check]:
    checks = []
    for hidden in sizes.hidden:
        checks.append(Check("rms_norm", f"hidden {hidden}", dtype, partial(_rms_norm, sizes, dtype, hidden)))
        for kind in ("silu", "gelu_tanh"):
            compare = partial(_activation_mul, sizes, dtype, hidden, kind)
            checks.append(Check("activation_mul", f"{kind}, {hidden}", dtype, compare))
    layouts = [(9, 3, 64, 64), (16, 8, 128, 128), (7, 1, 80, 20), (2, 1, 256, 64)]
    for layout in layouts if len(sizes.hidden) > 2 else layouts[:1] + layouts[2:3]:
        for normed in (False, True):
            name = f"{layout[0]}/{layout[1]} heads of {layout[2]}, {layout[3]} rotated{', normed' * normed}"
            compare = partial(_rope_and_store, sizes, dtype, layout, normed)
            checks.append(Check("rope_and_store", name, dtype, compare))
    return [*checks, Check("store", "strided", dtype, partial(_store, sizes, dtype))]


def _random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _rms_norm(sizes: _Sizes, dtype: torch.dtype, hidden: int, operators: Operators, device: torch.device) -> Finding:
    findings = []
    for seed, num_tokens in enumerate(sizes.tokens):
        x = _strided(_random(seed, num_tokens, hidden, dtype=dtype).to(device))
        residual, weight = _random(seed + 9, num_tokens, hidden, dtype=dtype).to(device), _random(3, hidden).to(device)
        plain = operators.rms_norm(x, weight, 1e-6)
        findings.append(difference(plain, _REFERENCE.rms_norm(x.float(), weight, 1e-6)))
        grown = residual.clone()
        added = operators.rms_norm(x, weight, 1e-6, grown)
        findings.append(exactly((grown, residual + x)))
        findings.append(difference(added, _REFERENCE.rms_norm((residual + x).float(), weight, 1e-6)))
    return together(*findings)


def _activation_mul(
    sizes: _Sizes, dtype: torch.dtype, hidden: int, kind: Any, operators: Operators, device: torch.device
) -> Finding:
    findings = []
    for seed, num_tokens in enumerate(sizes.tokens):
        gate_up = (3 * _random(seed, num_tokens, 2 * hidden)).to(device, dtype)
        expected = _REFERENCE.activation_mul(gate_up.float(), kind)
        findings.append(difference(operators.activation_mul(gate_up, kind), expected))
    return together(*findings)


def _rope_and_store(
    sizes: _Sizes,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    normed: bool,
    operators: Operators,
    device: torch.device,
) -> Finding:
    num_heads, num_kv_heads, head_dim, num_rotated = shape
    norms = [_random(seed, head_dim).to(device) for seed in (30, 40)]
    layout = HeadLayout(num_heads, num_kv_heads, head_dim, HeadNorms(norms[0], norms[1], 1e-6) if normed else None)
    findings = []
    for seed, num_tokens in enumerate(sizes.tokens):
        width = (num_heads + 2 * num_kv_heads) * head_dim
        qkv = _random(seed, num_tokens, width, dtype=dtype).to(device)
        angles = _random(seed + 1, num_tokens, num_rotated // 2).repeat(1, 2).to(device)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        slots = torch.randperm(512, generator=torch.Generator().manual_seed(seed))[:num_tokens].to(device)
        got, untouched = _rotate(operators, _strided(qkv), layout, cos, sin, slots)
        expected, _ = _rotate(_REFERENCE, qkv.float(), layout, cos, sin, slots)
        findings += [difference(ours, theirs) for ours, theirs in zip(got, expected, strict=True)]
        findings.append(exactly((untouched, torch.zeros_like(untouched))))
    return together(*findings)


def _strided(rows: Tensor) -> Tensor:
    """A copy whose rows are further apart than they are long."""
    return torch.cat([rows, rows[:, :3]], dim=1)[:, : rows.shape[1]]


def _rotate(
    operators: Operators, qkv: Tensor, layout: HeadLayout, cos: Tensor, sin: Tensor, slots: Tensor
) -> tuple[list[Tensor], Tensor]:
    """([queries, keys, values] as rotated and stored, what else is in the caches that held zeros). Changes `qkv`."""
    shape = 2, 32, layout.num_kv_heads, 16, layout.head_dim
    caches = torch.zeros(shape, dtype=qkv.dtype, device=qkv.device)
    query = operators.rope_and_store(qkv, layout, cos, sin, caches[0], caches[1], slots)
    by_slot = caches.transpose(2, 3).flatten(1, 2)  # [2, slots, Hkv, D]
    return [query, *by_slot[:, slots]], by_slot.index_fill(1, slots, 0)


def _store(sizes: _Sizes, dtype: torch.dtype, operators: Operators, device: torch.device) -> Finding:
    findings = []
    for seed, num_tokens in enumerate(sizes.tokens):
        key = _random(seed, 3, num_tokens, 80, dtype=dtype).transpose(0, 1).to(device)
        value = _random(seed + 9, num_tokens, 3, 96, dtype=dtype)[..., :64].to(device)
        slots = torch.randperm(512, generator=torch.Generator().manual_seed(seed))[:num_tokens].to(device)
        caches = [[torch.zeros(32, 3, 16, dim, dtype=dtype, device=device) for dim in (80, 64)] for _ in range(2)]
        operators.store(key, value, caches[0][0], caches[0][1], slots)
        _REFERENCE.store(key, value, caches[1][0], caches[1][1], slots)
        findings.append(exactly(*zip(*caches, strict=True)))
    return together(*findings)


# -- sampling ---------------------------------------------------------------------------------------------------------


def _sampling_checks(sizes: _Sizes, dtype: torch.dtype) -> list[Check]:
    checks = []
    ways: dict[str, Callable[..., Finding]] = {"argmax": _argmax, "draw": _draw, "sample": _sample}
    for vocab_size in sizes.vocabularies:
        for operator, compare in ways.items():
            checks.append(
                Check(operator, f"vocabulary {vocab_size}", dtype, partial(compare, sizes, dtype, vocab_size))
            )
    vocab_size = sizes.vocabularies[1]
    compare = partial(_sample, sizes, dtype, vocab_size, penalizes=True)
    return [*checks, Check("sample", f"vocabulary {vocab_size}, penalties", dtype, compare)]


def _logits(sizes: _Sizes, dtype: torch.dtype, vocab_size: int, device: torch.device) -> Tensor:
    """[rows, vocab_size], strided; with ties, -inf, and two rows that are not sound."""
    logits = 3 * _random(vocab_size, sizes.rows, vocab_size)
    logits[1::2] = (logits[1::2] * 2).round() / 2
    logits[2, vocab_size // 2 :] = float("-inf")
    logits[3, vocab_size - 1] = float("nan")
    logits[4, 0] = float("inf")
    return _strided(logits.to(device, dtype))


def _params(sizes: _Sizes, seed: int) -> dict[str, Any]:
    """Of every row, as numpy arrays [rows]."""
    rng, rows = np.random.default_rng(seed), sizes.rows
    return {
        "temperature": rng.choice([0.2, 0.7, 1.0, 2.0], rows).astype(np.float32),
        "top_k": rng.choice([0, 1, 5, 50, 2**31 - 1], rows).astype(np.int32),
        "top_p": rng.choice([1.0, 0.95, 0.5, 0.01], rows).astype(np.float32),
        "min_p": rng.choice([0.0, 0.02, 0.3], rows).astype(np.float32),
    }


def _argmax(sizes: _Sizes, dtype: torch.dtype, vocab_size: int, operators: Operators, device: torch.device) -> Finding:
    logits = _logits(sizes, dtype, vocab_size, device)
    return equal_ids(operators.argmax(logits), _REFERENCE.argmax(logits))


def _draw(sizes: _Sizes, dtype: torch.dtype, vocab_size: int, operators: Operators, device: torch.device) -> Finding:
    logits = _logits(sizes, dtype, vocab_size, device)
    rows = np.arange(5, sizes.rows)  # those before are not sound, and what is drawn from them is anything
    params = {name: values[rows] for name, values in _params(sizes, vocab_size).items()}
    uniforms = np.random.default_rng(vocab_size).random(len(rows))
    got, expected = (by.draw(logits, rows, DrawParams(**params, uniforms=uniforms)) for by in (operators, _REFERENCE))
    return equal_ids(got, expected, most_different=_DRAWS_THAT_MAY_DIFFER)


def _sample(
    sizes: _Sizes,
    dtype: torch.dtype,
    vocab_size: int,
    operators: Operators,
    device: torch.device,
    *,
    penalizes: bool = False,
) -> Finding:
    """Half of the rows greedy; every third must not stop yet, and with penalties four in five have one."""
    logits, rows = _logits(sizes, dtype, vocab_size, device), sizes.rows
    rng = np.random.default_rng(vocab_size)
    values = _params(sizes, vocab_size)
    values["temperature"][::2] = 0
    words = {
        "random_state": rng.integers(-(2**63), 2**63 - 1, rows),
        "position": rng.integers(0, 5000, rows),
    }
    params = SampleTensors(**{name: torch.from_numpy(array).to(device) for name, array in (values | words).items()})
    stops = torch.from_numpy(rng.integers(-1, vocab_size, (rows, 16))).to(device)
    stops[:, 0] = _REFERENCE.argmax(logits)  # so that what is forbidden would have been taken
    forbids = (torch.arange(rows) % 3 == 0).to(device)
    penalties = _penalties(rng, rows, vocab_size, device) if penalizes else None
    ids = [by.sample(logits, params, stops, forbids, penalties) for by in (operators, _REFERENCE)]
    greedy = equal_ids(ids[0][::2], ids[1][::2])
    return together(greedy, equal_ids(ids[0][1::2], ids[1][1::2], most_different=_DRAWS_THAT_MAY_DIFFER))


def _penalties(rng: np.random.Generator, rows: int, vocab_size: int, device: torch.device) -> Penalties:
    """Half of all tokens seen; rows of bits in another order than rows of logits."""
    factor = rng.choice([1.0, 0.8, 1.1, 1.3, 2.0], rows).astype(np.float32)
    seen = rng.integers(-(2**31), 2**31, (rows + 3, -(-vocab_size // 32))).astype(np.int32)
    which = rng.permutation(rows + 3)[:rows]
    return Penalties(*(torch.from_numpy(array).to(device) for array in (factor, seen, which)))
