"""The state of slots by kernels, on Triton's interpreter: the same as the plain one, over random states."""

import dataclasses

import pytest
import torch

from cbgen.engine import slot_state
from cbgen.engine.slot_state import SlotState
from cbgen.engine.triton import slots as kernels

BLOCK_SIZE, TRASH_BLOCK, VOCAB_SIZE = 16, 999, 70


def make_state(seed, num_slots, max_blocks):
    """Random slots: some done, some one token before an end or a minimum, with stop ids that get sampled."""
    generator = torch.Generator().manual_seed(seed)
    state = SlotState.empty(num_slots, max_blocks, TRASH_BLOCK, VOCAB_SIZE, torch.device("cpu"))

    def random(low, high, *size):
        return torch.randint(low, high, (num_slots, *size), generator=generator)

    state.last_token[:-1] = random(0, 50)
    state.num_tokens[:-1] = random(1, max_blocks * BLOCK_SIZE + 1)
    state.num_prompt_tokens[:-1] = torch.minimum(state.num_tokens[:-1], random(1, 40))
    state.max_total_tokens[:-1] = state.num_tokens[:-1] + random(1, 4)
    state.min_total_tokens[:-1] = state.num_tokens[:-1] + random(-2, 3)
    state.is_done[:-1] = random(0, 4) == 0
    state.stop_token_ids[:-1] = random(-1, 30, slot_state.STOP_WIDTH)
    state.block_tables[:-1] = random(0, 900, max_blocks).int()
    state.temperature[:-1] = random(0, 3).float()
    state.top_k[:-1], state.top_p[:-1], state.min_p[:-1] = random(0, 9).int(), random(0, 9) / 8, random(0, 9) / 8
    state.random_state[:-1] = random(-(2**62), 2**62)
    state.repetition_penalty[:-1] = random(4, 9) / 4
    state.seen_tokens[:-1] = random(-(2**31), 2**31, 3).int()
    return state


def choose_slots(seed, num_slots, num_rows):
    """Distinct slots in any order, and the trash slot for padding."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_slots, generator=generator)[:num_rows]
    slots = torch.cat([slots, torch.full((num_rows - len(slots),), num_slots)])
    return slots[torch.randperm(num_rows, generator=generator)]


def assert_same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def copy_of(state):
    return SlotState(*(getattr(state, field.name).clone() for field in dataclasses.fields(state)))


@pytest.mark.parametrize(("num_slots", "num_rows"), [(1, 1), (5, 8), (40, 33), (7, 0)])
@pytest.mark.parametrize("max_blocks", [1, 7, 300])
def test_gather_step(num_slots, num_rows, max_blocks):
    for seed in range(3):
        state, slots = make_state(seed, num_slots, max_blocks), choose_slots(seed, num_slots, num_rows)
        before = copy_of(state)
        got = kernels.gather_step(state, slots, max_blocks, BLOCK_SIZE)
        assert_same(got, slot_state.gather_step(state, slots, max_blocks, BLOCK_SIZE))
        assert_same(*(dataclasses.astuple(s) for s in (state, before)))


def test_gather_step_of_fewer_columns_than_there_are():
    state, slots = make_state(0, 20, 40), choose_slots(0, 20, 24)
    state.num_tokens.clamp_(max=3 * BLOCK_SIZE)
    got = kernels.gather_step(state, slots, 3, BLOCK_SIZE)
    assert got.block_tables.shape == (24, 3)
    assert_same(got, slot_state.gather_step(state, slots, 3, BLOCK_SIZE))


@pytest.mark.parametrize(("num_slots", "num_rows"), [(1, 1), (5, 8), (90, 70), (7, 0)])
def test_gather_sampling(num_slots, num_rows):
    for seed in range(3):
        state, slots = make_state(seed, num_slots, 4), choose_slots(seed, num_slots, num_rows)
        names = ("temperature", "top_k", "top_p", "min_p", "random_state")
        penalty = state.repetition_penalty[slots]
        position = state.num_tokens[slots] - state.num_prompt_tokens[slots]
        forbids = state.num_tokens[slots] < state.min_total_tokens[slots]
        expected = (
            *(getattr(state, name)[slots] for name in names),
            position,
            penalty,
            state.stop_token_ids[slots],
            forbids,
        )
        assert_same(kernels.gather_sampling(state, slots), expected)
        assert num_rows < 5 or 0 < forbids.sum() < num_rows


@pytest.mark.parametrize(("num_slots", "num_rows"), [(1, 1), (5, 8), (60, 50), (300, 301), (3, 0)])
def test_advance(num_slots, num_rows):
    """Several steps on end, as rounds take them; of 301 rows the kernel makes two goes."""
    for seed in range(4):
        state = make_state(seed, num_slots, 4)
        twin = copy_of(state)
        rings = [torch.full((3, num_rows + 2), 7) for _ in range(2)]
        cursors = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        generator = torch.Generator().manual_seed(seed)
        for step in range(3):
            slots = choose_slots(10 * seed + step, num_slots, num_rows)
            slots = torch.where(state.is_done[slots], state.trash_slot, slots)
            token_ids = torch.randint(-1, VOCAB_SIZE, (num_rows,), generator=generator)
            kernels.advance(state, slots, token_ids, rings[0], cursors[0])
            slot_state.advance(twin, slots, token_ids, rings[1], cursors[1])
            assert not state.seen_tokens[-1].any()
            twin.seen_tokens[-1] = 0  # what padding has seen does not matter
            assert_same(*(dataclasses.astuple(s) for s in (state, twin)))
            assert_same((rings[0], cursors[0]), (rings[1], cursors[1]))
        assert cursors[0].tolist() == [3]
        assert num_slots < 5 or not num_rows or 0 < state.is_done.sum() <= num_slots
