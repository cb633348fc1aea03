"""Tiny random problems for operators, shaped like the model at hand: what `trust.py` compares with the reference.

Enters: a `ModelShape`. Leaves: `Trial`s; each gives the operators it is run on inputs of its own, always the same ones,
and returns all that they made or changed. The KV cache holds NaN where no sequence has written, so that a kernel that
looks there betrays itself; draws are made from few tokens, at numbers well inside their shares, so that no rounding
moves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.kv_cache import LayerSpec
from cbgen.engine.operators.base import (
    Activation,
    DrawParams,
    HeadLayout,
    HeadNorms,
    Operators,
    Penalties,
    SampleTensors,
)
from cbgen.engine.slot_state import SlotState

_ROWS = 5
_BLOCK_SIZE = 16
_WINDOW = 16  # windows are tried at this length: kernels for longer ones are the same, and short contexts feel it
_UNSPLIT = 512  # rows times KV heads that are too many to be split on any GPU
_NUM_LIKELY = 8  # tokens that draws choose between; each has about half the weight of the one before
_FIRST_POSITION = 7  # of draws whose random numbers come from their position; with these, none is near a border


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides which kernels it needs, and in which form.

    Attributes:
        vocab_size: columns of its logits.
        layers: as `LoadedModel.layers`.
    """

    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]

    @property
    def kinds(self) -> list[LayerSpec]:
        """Layers that differ in more than their index and the length of their window."""
        kinds = {replace(s, layer_idx=0, window=s.window and min(s.window, _WINDOW)): None for s in self.layers}
        return list(kinds)


@dataclass(frozen=True, slots=True)
class Trial:
    """One problem for the operator of this name; `run` returns all that it made or changed, by name."""

    operator: str
    run: Callable[[Operators], dict[str, Tensor]]


def make_trials(shape: ModelShape) -> Iterator[Trial]:
    """Every operator at least once, in all forms that the model may need."""
    yield Trial("rms_norm", partial(_rms_norm, shape))
    yield Trial("rms_norm", partial(_add_rms_norm, shape))
    yield Trial("activation_mul", partial(_activation_mul, shape, "silu"))
    yield Trial("activation_mul", partial(_activation_mul, shape, "gelu_tanh"))
    for kind in shape.kinds:
        yield Trial("store", partial(_store, shape, kind))
        if kind.key_dim == kind.value_dim:
            for has_norms, num_rotated in ((False, kind.key_dim), (True, kind.key_dim), (False, kind.key_dim // 4 * 2)):
                yield Trial("rope_and_store", partial(_rope_and_store, shape, kind, has_norms, num_rotated))
        for lengths, chunks in _steps(kind):
            yield Trial("attention", partial(_attention, shape, kind, lengths, chunks))
    yield Trial("argmax", partial(_argmax, shape))
    yield Trial("draw", partial(_draw, shape))
    yield Trial("sample", partial(_sample, shape, False))
    yield Trial("sample", partial(_sample, shape, True))
    yield Trial("gather_step", partial(_gather_step, shape))
    yield Trial("gather_sampling", partial(_gather_sampling, shape))
    yield Trial("advance", partial(_advance, shape))


class _Random:
    """Random tensors of the model's dtype, the same in each process and on each device."""

    def __init__(self, shape: ModelShape, seed: int = 0) -> None:
        self._shape = shape
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*size, generator=self.generator)
        return values.to(self._shape.device, dtype or self._shape.dtype)

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator).to(self._shape.device)


# -- elementwise ------------------------------------------------------------------------------------------------------


def _rms_norm(shape: ModelShape, operators: Operators) -> dict[str, Tensor]:
    random = _Random(shape)
    x = random.normal(_ROWS, shape.hidden_size)
    return {"norm": operators.rms_norm(x, random.normal(shape.hidden_size, dtype=torch.float32), 1e-5)}


def _add_rms_norm(shape: ModelShape, operators: Operators) -> dict[str, Tensor]:
    random = _Random(shape)
    x, residual = random.normal(_ROWS, shape.hidden_size), random.normal(_ROWS, shape.hidden_size)
    weight = random.normal(shape.hidden_size, dtype=torch.float32)
    return {"norm": operators.rms_norm(x, weight, 1e-5, residual), "sum": residual}


def _activation_mul(shape: ModelShape, activation: Activation, operators: Operators) -> dict[str, Tensor]:
    gate_up = _Random(shape).normal(_ROWS, 2 * shape.intermediate_size)
    return {activation: operators.activation_mul(gate_up, activation)}


def _empty_caches(shape: ModelShape, kind: LayerSpec, num_blocks: int) -> tuple[Tensor, Tensor]:
    key_cache, value_cache = (
        torch.full((num_blocks, kind.num_kv_heads, _BLOCK_SIZE, dim), math.nan, dtype=shape.dtype, device=shape.device)
        for dim in (kind.key_dim, kind.value_dim)
    )
    return key_cache, value_cache


def _store(shape: ModelShape, kind: LayerSpec, operators: Operators) -> dict[str, Tensor]:
    random = _Random(shape)
    keys, values = _empty_caches(shape, kind, 2)
    key = random.normal(_ROWS, kind.num_kv_heads, kind.key_dim)
    value = random.normal(_ROWS, kind.num_kv_heads, kind.value_dim)
    operators.store(key, value, keys, values, random.permutation(2 * _BLOCK_SIZE)[:_ROWS])
    return {"keys": keys, "values": values}


def _rope_and_store(
    shape: ModelShape, kind: LayerSpec, has_norms: bool, num_rotated: int, operators: Operators
) -> dict[str, Tensor]:
    random = _Random(shape)
    dim = kind.key_dim
    keys, values = _empty_caches(shape, kind, 2)
    qkv = random.normal(_ROWS, (kind.num_heads + 2 * kind.num_kv_heads) * dim)
    weights = (random.normal(dim, dtype=torch.float32), random.normal(dim, dtype=torch.float32))
    layout = HeadLayout(kind.num_heads, kind.num_kv_heads, dim, HeadNorms(*weights, 1e-6) if has_norms else None)
    angles = random.normal(_ROWS, num_rotated // 2, dtype=torch.float32).repeat(1, 2)
    cos, sin = angles.cos().to(shape.dtype), angles.sin().to(shape.dtype)
    slots = random.permutation(2 * _BLOCK_SIZE)[:_ROWS]
    query = operators.rope_and_store(qkv, layout, cos, sin, keys, values, slots)
    return {"queries": query, "keys": keys, "values": values}


# -- attention --------------------------------------------------------------------------------------------------------


def _steps(kind: LayerSpec) -> Iterator[tuple[list[int], list[int]]]:
    """(Positions that sequences hold, and how many of the last sequences' are in this step, one of all others.)"""
    yield [700, 33, 1], []  # few rows, long ones: kernels may split them
    yield [1 + index % 40 for index in range(_UNSPLIT // kind.num_kv_heads + 1)], []
    yield [40, 70, 1], [40, 9, 1]  # a prompt, the end of one that was begun before, one of one token
    yield [19, 50, 34, 90], [34, 17]


def _attention(
    shape: ModelShape, kind: LayerSpec, lengths: list[int], chunks: list[int], operators: Operators
) -> dict[str, Tensor]:
    random = _Random(shape)
    counts = [1] * (len(lengths) - len(chunks)) + chunks
    keys, values, tables = _filled_caches(random, shape, kind, lengths, counts)
    starts = np.cumsum([0, *counts]).tolist()
    metadata = AttentionMetadata(
        slot_mapping=torch.empty(0, dtype=torch.int64, device=shape.device),
        block_tables=tables,
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=shape.device),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=shape.device),
        num_decodes=len(lengths) - len(chunks),
        max_context_len=max(lengths),
        query_starts=starts,
        host_context_lens=lengths,
    )
    sinks = random.normal(kind.num_heads) if kind.has_sinks else None
    call = AttentionCall(0, kind.key_dim**-0.5, kind.window, kind.softcap, sinks)
    # Longer queries than a model's: few positions have most of the weight, so that to miss one shows.
    query = 2 * random.normal(starts[-1], kind.num_heads + 2 * kind.num_kv_heads, kind.key_dim)[:, : kind.num_heads]
    return {"output": operators.attention(call, query, keys, values, metadata)}


def _filled_caches(
    random: _Random, shape: ModelShape, kind: LayerSpec, lengths: list[int], counts: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """(keys, values, block tables) of sequences in blocks of no order; NaN past their ends, and before the windows of
    those with one token."""
    num_blocks = [-(-length // _BLOCK_SIZE) for length in lengths]
    blocks = random.permutation(sum(num_blocks))
    keys, values = _empty_caches(shape, kind, len(blocks))
    tables = torch.zeros(len(lengths), max(num_blocks) + 1, dtype=torch.int32, device=shape.device)
    slots = []
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own, blocks = blocks[: num_blocks[index]], blocks[num_blocks[index] :]
        tables[index, : len(own)] = own
        first = max(0, length - kind.window) if kind.window and count == 1 else 0
        positions = torch.arange(first, length, device=shape.device)
        slots.append(own[positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE)
    slot = torch.cat(slots)
    for cache in (keys, values):
        written = random.normal(len(slot), kind.num_kv_heads, cache.shape[3])
        cache.transpose(1, 2)[slot // _BLOCK_SIZE, slot % _BLOCK_SIZE] = written
    return keys, values, tables


# -- sampling ---------------------------------------------------------------------------------------------------------


def _argmax(shape: ModelShape, operators: Operators) -> dict[str, Tensor]:
    """Two good rows, and one of each kind that has no answer."""
    logits = _Random(shape).normal(_ROWS, shape.vocab_size)
    logits[1, shape.vocab_size // 2 :] = 9.0  # the first of many that are equal
    logits[2, -1] = math.nan
    logits[3, 0] = math.inf
    logits[4] = -math.inf
    return {"token ids": operators.argmax(logits)}


def _likely_ids(shape: ModelShape) -> list[int]:
    count = min(_NUM_LIKELY, shape.vocab_size)
    return [index * (shape.vocab_size - 1) // max(1, count - 1) for index in range(count)]


def _drawable_logits(shape: ModelShape, num_rows: int) -> Tensor:
    """Rows of which few ids have all the weight, in the same order of ids whatever the vocabulary is."""
    logits = torch.full((num_rows, shape.vocab_size), -80.0, dtype=shape.dtype, device=shape.device)
    order = (3, 0, 6, 1, 7, 4, 2, 5)
    for token_id, rank in zip(_likely_ids(shape), order, strict=False):
        logits[:, token_id] = -0.75 * rank
    return logits


# (temperature, top_k, top_p, min_p): all tokens, cooler, warmer, each filter, all of them.
_SETTINGS = (
    (1.0, 0, 1.0, 0.0),
    (0.5, 0, 1.0, 0.0),
    (2.0, 0, 1.0, 0.0),
    (1.0, 2, 1.0, 0.0),
    (1.0, 0, 0.7, 0.0),
    (1.0, 0, 1.0, 0.3),
    (2.0, 5, 0.8, 0.05),
)
_UNIFORMS = (0.03, 0.21, 0.42, 0.59, 0.78, 0.97)  # for each of them


def _draw(shape: ModelShape, operators: Operators) -> dict[str, Tensor]:
    temperature, top_k, top_p, min_p = np.repeat(np.array(_SETTINGS), len(_UNIFORMS), axis=0).T
    rows = np.arange(len(temperature))[::-1].copy()  # not in order, and one left out
    params = DrawParams(
        temperature=temperature.astype(np.float32),
        top_k=top_k.astype(np.int32),
        top_p=top_p.astype(np.float32),
        min_p=min_p.astype(np.float32),
        uniforms=np.tile(np.array(_UNIFORMS), len(_SETTINGS)),
    )
    return {"token ids": operators.draw(_drawable_logits(shape, len(rows) + 1), rows, params)}


def _sample(shape: ModelShape, with_stops: bool, operators: Operators) -> dict[str, Tensor]:
    """The settings of `_draw`, two greedy rows, and one without an answer."""
    settings = torch.tensor(_SETTINGS).repeat_interleave(len(_UNIFORMS), dim=0)
    settings = torch.cat([settings, torch.tensor([(0.0, 0, 1.0, 0.0)] * 3)]).to(shape.device)
    temperature, top_k, top_p, min_p = settings.T.contiguous()
    logits = _drawable_logits(shape, len(settings))
    logits[-1, 0] = math.nan
    row = torch.arange(len(settings), device=shape.device)
    params = SampleTensors(temperature, top_k.int(), top_p, min_p, (row - 3) * 0x123456789ABCDEF, row + _FIRST_POSITION)
    if not with_stops:
        return {"token ids": operators.sample(logits, params)}
    likely = _likely_ids(shape)
    stops = torch.tensor([likely[1 % len(likely)], -1], device=shape.device).repeat(len(row), 1)
    # Every seventh token was seen, the likeliest among them or not by the row.
    factor = torch.tensor([1.0, 1.1, 0.9], device=shape.device)[row % 3]
    seen = torch.tensor([0x10204081, 0x02040810], dtype=torch.int64, device=shape.device).to(torch.int32)
    penalties = Penalties(factor, seen[:, None].repeat(1, -(-logits.shape[1] // 32)), row % 2)
    return {"token ids": operators.sample(logits, params, stops, row % 2 == 1, penalties)}


# -- slots ------------------------------------------------------------------------------------------------------------


def _slot_state(shape: ModelShape) -> SlotState:
    """Six slots of three blocks: the third has ended, of the others some are about to."""
    state = SlotState.empty(6, 3, 99, shape.vocab_size, shape.device)
    slot = torch.arange(6, device=shape.device)
    state.last_token[:-1] = slot % shape.vocab_size
    state.num_tokens[:-1] = 5 + 8 * slot
    state.num_prompt_tokens[:-1] = 2 + slot
    state.max_total_tokens[:-1] = state.num_tokens[:-1] + 1 + slot // 3
    state.min_total_tokens[:-1] = state.num_tokens[:-1] + 2 * (slot % 2)
    state.is_done[2] = True
    state.stop_token_ids[:-1, 1] = slot % shape.vocab_size
    state.block_tables[:-1] = (torch.arange(18, device=shape.device) * 7 % 18).view(6, 3).int()
    state.temperature[:-1], state.top_k[:-1] = slot / 2, slot.int()
    state.top_p[:-1], state.min_p[:-1], state.repetition_penalty[:-1] = slot / 5, slot / 7, 1 + slot / 3
    state.random_state[:-1] = (slot - 3) * 0x123456789ABCDEF
    return state


def _some_slots(shape: ModelShape) -> Tensor:
    return torch.tensor([4, 0, 6, 1, 5, 6, 3], device=shape.device)  # 6 is the trash slot


def _gather_step(shape: ModelShape, operators: Operators) -> dict[str, Tensor]:
    slots = torch.arange(7, device=shape.device)
    return operators.gather_step(_slot_state(shape), slots, 3, _BLOCK_SIZE)._asdict()


def _gather_sampling(shape: ModelShape, operators: Operators) -> dict[str, Tensor]:
    params, stops, forbids, penalties = operators.gather_sampling(_slot_state(shape), _some_slots(shape))
    columns = {str(index): column for index, column in enumerate(astuple(params))}
    return columns | {"stops": stops, "forbidding": forbids, "penalties": penalties.factor}


def _advance(shape: ModelShape, operators: Operators) -> dict[str, Tensor]:
    state, slots = _slot_state(shape), _some_slots(shape)
    token_ids = slots % shape.vocab_size
    token_ids[-1] = -1  # of logits that were not sound
    ring, cursor = torch.zeros(3, 8, dtype=torch.int64, device=shape.device), torch.ones_like(slots[:1])
    operators.advance(state, slots, token_ids, ring, cursor)
    changed = {"tokens": state.last_token, "lengths": state.num_tokens, "ends": state.is_done}
    return changed | {"seen tokens": state.seen_tokens[:-1], "ring": ring, "cursor": cursor}
