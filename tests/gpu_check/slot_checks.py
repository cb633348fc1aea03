"""Comparisons of stage `kernels` for the state of slots: steps in a row by the operators and by the reference."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cbgen.engine.operators.base import Operators
from cbgen.engine.operators.reference import ReferenceOperators
from cbgen.engine.slot_state import SlotState
from tests.gpu_check.kernels import Check, Finding, exactly, together

_BLOCK_SIZE = 16
_NUM_COLUMNS = 5
_VOCAB_SIZE = 70  # so small that stop ids come up
_NUM_STEPS = 5
_REFERENCE = ReferenceOperators()


def slot_checks(*, dry: bool) -> list[Check]:
    """One for a few slots, one for as many as an engine has."""
    counts = (3, 20) if dry else (3, 700)
    return [Check("slots", f"{count} slots", torch.int64, partial(_steps, count)) for count in counts]


def _steps(num_slots: int, operators: Operators, device: torch.device) -> Finding:
    """All of the state is the same after every step; rows end in between, and some were padding from the start."""
    generator = torch.Generator().manual_seed(num_slots)
    ours = _random_state(num_slots, generator, device)
    theirs = replace(ours, **{field.name: getattr(ours, field.name).clone() for field in fields(ours)})
    order = torch.randperm(num_slots + 2, generator=generator).clamp_(max=num_slots).to(device)  # of these two padding
    rings = [torch.full((_NUM_STEPS, num_slots + 9), 7, dtype=torch.int64, device=device) for _ in range(2)]
    cursors = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
    findings = []
    for _ in range(_NUM_STEPS):
        pairs = []
        token_ids = torch.randint(-1, _VOCAB_SIZE, (len(order),), generator=generator).to(device)
        for by, state, ring, cursor in zip((operators, _REFERENCE), (ours, theirs), rings, cursors, strict=True):
            step = by.gather_step(state, order, _NUM_COLUMNS, _BLOCK_SIZE)
            params, *others, penalties = by.gather_sampling(state, step.slots)
            before = [*step, *_columns(params), *others, penalties.factor, penalties.seen_rows]
            by.advance(state, step.slots, token_ids, ring, cursor)
            state.seen_tokens[num_slots] = 0  # that of padding means nothing
            pairs.append([*before, *_columns(state), ring, cursor])
        findings.append(exactly(*zip(*pairs, strict=True)))
    return together(*findings)


def _columns(values: Any) -> list[Tensor]:
    """Copies of the tensors in a dataclass."""
    return [getattr(values, field.name).clone() for field in fields(values)]


def _random_state(num_slots: int, generator: torch.Generator, device: torch.device) -> SlotState:
    """Slots whose sequences have some tokens; some end with the next one, and some must not stop yet."""
    state = SlotState.empty(num_slots, _NUM_COLUMNS + 2, 999, _VOCAB_SIZE, device)

    def fill(column: Tensor, low: int, high: int) -> None:
        shape = column[:num_slots].shape
        column[:num_slots] = torch.randint(low, high, shape, generator=generator).to(device, column.dtype)

    fill(state.last_token, 0, _VOCAB_SIZE)
    fill(state.num_prompt_tokens, 1, 30)
    fill(state.num_tokens, 30, _NUM_COLUMNS * _BLOCK_SIZE - _NUM_STEPS)
    fill(state.max_total_tokens, 40, _NUM_COLUMNS * _BLOCK_SIZE)
    fill(state.min_total_tokens, 20, 70)
    fill(state.stop_token_ids, -1, _VOCAB_SIZE)
    fill(state.block_tables, 0, 900)
    fill(state.top_k, 0, 90)
    fill(state.random_state, -(2**62), 2**62)
    fill(state.seen_tokens, 0, 2**31)
    for column in (state.temperature, state.top_p, state.min_p, state.repetition_penalty):
        column[:num_slots] = torch.rand(num_slots, generator=generator).to(device)
    return state
