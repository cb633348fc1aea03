"""Comparisons of stage `kernels` for the state of slots: steps in a row by the kernels and by their twins in torch."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from cbgen.engine import slot_state as twin
from cbgen.engine.operators.base import Operators
from cbgen.engine.slot_state import SlotState
from cbgen.engine.triton import slots as kernels
from tests.gpu_check.kernels import Check, Finding, exactly, together

_BLOCK_SIZE = 16
_NUM_COLUMNS = 5
_VOCAB_SIZE = 70  # so small that stop ids come up
_NUM_STEPS = 5


def slot_checks(*, dry: bool) -> list[Check]:
    """One for a few slots, one for as many as an engine has."""
    counts = (3, 20) if dry else (3, 700)
    return [Check("slots", f"{count} slots", torch.int64, partial(_steps, count)) for count in counts]


def _steps(num_slots: int, _operators: Operators, device: torch.device) -> Finding:
    """All of the state is the same after every step; rows end in between, and some were padding from the start."""
    generator = torch.Generator().manual_seed(num_slots)
    ours = _random_state(num_slots, generator, device)
    theirs = replace(ours, **{field.name: getattr(ours, field.name).clone() for field in fields(ours)})
    order = torch.randperm(num_slots + 2, generator=generator).clamp_(max=num_slots).to(device)  # of these two padding
    rings = [torch.full((_NUM_STEPS, num_slots + 9), 7, dtype=torch.int64, device=device) for _ in range(2)]
    cursors = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
    findings = []
    for _ in range(_NUM_STEPS):
        steps = [
            by.gather_step(state, order, _NUM_COLUMNS, _BLOCK_SIZE) for by, state in ((kernels, ours), (twin, theirs))
        ]
        findings.append(exactly(*zip(*steps, strict=True)))
        token_ids = torch.randint(-1, _VOCAB_SIZE, (len(order),), generator=generator).to(device)
        kernels.advance(ours, steps[0].slots, token_ids, rings[0], cursors[0])
        twin.advance(theirs, steps[1].slots, token_ids, rings[1], cursors[1])
        ours.seen_tokens[num_slots], theirs.seen_tokens[num_slots] = 0, 0  # that of padding means nothing
        pairs = [(getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ours)]
        findings.append(exactly(*pairs, (rings[0], rings[1]), (cursors[0], cursors[1])))
    return together(*findings)


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
    return state
