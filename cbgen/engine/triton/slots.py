"""The state of slots on CUDA, one launch each for what `cbgen.engine.slot_state` does in dozens.

`gather_step` reads the inputs of a decode step, `gather_sampling` what its sampler has to know, `advance` adds the
tokens that were sampled. A decode step of a small model takes a millisecond; as operators of torch the three would be
some forty launches of it. Grids follow from shapes alone and the host reads nothing, so that CUDA graphs can hold all
three. Keeping and preparing the state of slots by such kernels is the idea of vLLM's second model runner.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbgen.engine.slot_state import NO_TOKEN, SlotState, StepInput

_GATHERED_ROWS = 32  # rows of one program of `gather_sampling`
_ADVANCED_ROWS = 256  # rows in one go of the only program of `advance`


class SamplingColumns(NamedTuple):
    """What a sampler has to know of B slots: the fields of `SampleTensors`, all [B], then what it edits logits by.

    Attributes:
        repetition_penalty: [B] float32.
        stop_token_ids: [B, W] int64.
        forbids_stops: [B] bool.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    random_state: Tensor
    position: Tensor
    repetition_penalty: Tensor
    stop_token_ids: Tensor
    forbids_stops: Tensor


def gather_step(state: SlotState, slots: Tensor, num_columns: int, block_size: int) -> StepInput:
    """See `cbgen.engine.slot_state.gather_step`; `slots` contiguous."""
    num_rows, device = len(slots), slots.device
    numbers = torch.empty((4, num_rows), dtype=torch.int64, device=device)
    context_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
    block_tables = torch.empty((num_rows, num_columns), dtype=torch.int32, device=device)
    if num_rows:
        _gather_step_kernel[(num_rows,)](
            slots, state.is_done, state.last_token, state.num_tokens, state.block_tables, numbers, context_lens,
            block_tables, state.trash_slot, state.block_tables.stride(0), num_columns, block_size, TILE=256,
            num_warps=2,
        )  # fmt: skip
    slots, input_ids, positions, slot_mapping = numbers.unbind()
    return StepInput(slots, input_ids, positions, slot_mapping, context_lens, block_tables)


def gather_sampling(state: SlotState, slots: Tensor) -> SamplingColumns:
    """What the sampler needs of slots [B] int64, contiguous: the next token is the one after `num_tokens`."""
    num_rows, width, device = len(slots), state.stop_token_ids.shape[1], slots.device
    floats = torch.empty((4, num_rows), dtype=torch.float32, device=device)  # temperature, top_p, min_p, penalty
    top_k = torch.empty(num_rows, dtype=torch.int32, device=device)
    numbers = torch.empty((2, num_rows), dtype=torch.int64, device=device)  # random state, position
    stops = torch.empty((num_rows, width), dtype=torch.int64, device=device)
    forbids = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows:
        _gather_sampling_kernel[(triton.cdiv(num_rows, _GATHERED_ROWS),)](
            slots, state.temperature, state.top_k, state.top_p, state.min_p, state.repetition_penalty,
            state.random_state, state.num_tokens, state.num_prompt_tokens, state.min_total_tokens,
            state.stop_token_ids, floats, top_k, numbers, stops, forbids, num_rows,
            ROWS=_GATHERED_ROWS, WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
    temperature, top_p, min_p, penalty = floats.unbind()
    random_state, position = numbers.unbind()
    return SamplingColumns(temperature, top_k, top_p, min_p, random_state, position, penalty, stops, forbids)


def advance(state: SlotState, slots: Tensor, token_ids: Tensor, ring: Tensor, cursor: Tensor) -> None:
    """See `cbgen.engine.slot_state.advance`; `slots` and `token_ids` contiguous. The trash slot sees no tokens."""
    width = state.stop_token_ids.shape[1]
    _advance_kernel[(1,)](
        slots, token_ids, state.last_token, state.num_tokens, state.min_total_tokens, state.max_total_tokens,
        state.stop_token_ids, state.is_done, state.seen_tokens, ring, cursor, state.trash_slot,
        state.seen_tokens.stride(0), ring.stride(0), len(slots),
        NO_TOKEN=NO_TOKEN, ROWS=_ADVANCED_ROWS, WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["trash_slot", "num_columns"])
def _gather_step_kernel(
    slots_ptr,  # [B] int64
    is_done_ptr,  # [N + 1]
    last_token_ptr,
    num_tokens_ptr,
    state_tables_ptr,  # [N + 1, P] int32
    numbers_ptr,  # [4, B] int64: slots, input ids, positions, slot mapping
    context_lens_ptr,  # [B] int32
    tables_ptr,  # [B, num_columns] int32
    trash_slot,
    state_tables_stride,
    num_columns,
    block_size,
    TILE: tl.constexpr,
):
    """Grid: (B,)."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    slot = tl.where(tl.load(is_done_ptr + slot), trash_slot, slot)
    num_tokens = tl.load(num_tokens_ptr + slot)
    position = num_tokens - 1
    block = tl.load(state_tables_ptr + slot * state_tables_stride + position // block_size).to(tl.int64)
    tl.store(numbers_ptr + row, slot)
    tl.store(numbers_ptr + num_rows + row, tl.load(last_token_ptr + slot))
    tl.store(numbers_ptr + 2 * num_rows + row, position)
    tl.store(numbers_ptr + 3 * num_rows + row, block * block_size + position % block_size)
    tl.store(context_lens_ptr + row, num_tokens.to(tl.int32))
    for start in range(0, num_columns, TILE):
        columns = start + tl.arange(0, TILE)
        blocks = tl.load(state_tables_ptr + slot * state_tables_stride + columns, mask=columns < num_columns)
        tl.store(tables_ptr + row * num_columns + columns, blocks, mask=columns < num_columns)


@triton.jit(do_not_specialize=["num_rows"])
def _gather_sampling_kernel(
    slots_ptr,  # [B] int64
    temperature_ptr,  # [N + 1], as those that follow
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    penalty_ptr,
    random_state_ptr,
    num_tokens_ptr,
    num_prompt_tokens_ptr,
    min_total_tokens_ptr,
    state_stops_ptr,  # [N + 1, WIDTH] int64
    floats_ptr,  # [4, B] float32: temperature, top_p, min_p, penalty
    to_top_k_ptr,  # [B] int32
    numbers_ptr,  # [2, B] int64: random state, position
    stops_ptr,  # [B, WIDTH] int64
    forbids_ptr,  # [B] bool
    num_rows,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """Grid: (B / ROWS,)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=is_row, other=0)
    tl.store(floats_ptr + rows, tl.load(temperature_ptr + slots, mask=is_row), mask=is_row)
    tl.store(floats_ptr + num_rows + rows, tl.load(top_p_ptr + slots, mask=is_row), mask=is_row)
    tl.store(floats_ptr + 2 * num_rows + rows, tl.load(min_p_ptr + slots, mask=is_row), mask=is_row)
    tl.store(floats_ptr + 3 * num_rows + rows, tl.load(penalty_ptr + slots, mask=is_row), mask=is_row)
    tl.store(to_top_k_ptr + rows, tl.load(top_k_ptr + slots, mask=is_row), mask=is_row)
    tl.store(numbers_ptr + rows, tl.load(random_state_ptr + slots, mask=is_row), mask=is_row)
    num_tokens = tl.load(num_tokens_ptr + slots, mask=is_row, other=0)
    position = num_tokens - tl.load(num_prompt_tokens_ptr + slots, mask=is_row, other=0)
    tl.store(numbers_ptr + num_rows + rows, position, mask=is_row)
    min_total_tokens = tl.load(min_total_tokens_ptr + slots, mask=is_row, other=0)
    tl.store(forbids_ptr + rows, num_tokens < min_total_tokens, mask=is_row)
    columns = tl.arange(0, WIDTH_PAD)
    is_stop = is_row[:, None] & (columns < WIDTH)[None, :]
    stops = tl.load(state_stops_ptr + slots[:, None] * WIDTH + columns[None, :], mask=is_stop)
    tl.store(stops_ptr + rows[:, None] * WIDTH + columns[None, :], stops, mask=is_stop)


@triton.jit(do_not_specialize=["trash_slot", "num_rows"])
def _advance_kernel(
    slots_ptr,  # [B] int64
    token_ids_ptr,  # [B] int64
    last_token_ptr,  # [N + 1], as those that follow
    num_tokens_ptr,
    min_total_tokens_ptr,
    max_total_tokens_ptr,
    stops_ptr,  # [N + 1, WIDTH] int64
    is_done_ptr,  # [N + 1] bool
    seen_ptr,  # [N + 1, vocabulary / 32] int32
    ring_ptr,  # [R, at least B] int64
    cursor_ptr,  # [1] int64
    trash_slot,
    seen_stride,
    ring_stride,
    num_rows,
    NO_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """Grid: (1,), since the cursor moves on once. Rows of the trash slot all write the same to it."""
    cursor = tl.load(cursor_ptr)
    tl.debug_barrier()  # all threads have read it before one changes it
    columns = tl.arange(0, WIDTH_PAD)
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        is_row = rows < num_rows
        slots = tl.load(slots_ptr + rows, mask=is_row, other=trash_slot)
        token_ids = tl.load(token_ids_ptr + rows, mask=is_row, other=0)
        is_trash, is_sound = slots == trash_slot, token_ids >= 0
        num_tokens = tl.load(num_tokens_ptr + slots, mask=is_row, other=1) + is_sound.to(tl.int64)
        is_stop = is_row[:, None] & (columns < WIDTH)[None, :]
        stops = tl.load(stops_ptr + slots[:, None] * WIDTH + columns[None, :], mask=is_stop, other=-1)
        stops_here = tl.max((stops == token_ids[:, None]).to(tl.int32), axis=1) > 0
        stops_here = stops_here & is_sound & (num_tokens > tl.load(min_total_tokens_ptr + slots, mask=is_row, other=0))
        is_full = num_tokens >= tl.load(max_total_tokens_ptr + slots, mask=is_row, other=0)
        is_done = (stops_here | (token_ids < 0) | is_full) & (slots != trash_slot)
        tl.store(last_token_ptr + slots, tl.where(is_trash | (token_ids < 0), 0, token_ids), mask=is_row)
        tl.store(num_tokens_ptr + slots, tl.where(is_trash, 1, num_tokens), mask=is_row)
        tl.store(is_done_ptr + slots, is_done, mask=is_row)
        chosen = tl.maximum(token_ids, 0)
        seen_ptrs = seen_ptr + slots * seen_stride + chosen // 32
        keeps_seen = is_row & (slots != trash_slot)
        seen = tl.load(seen_ptrs, mask=keeps_seen, other=0) | (1 << (chosen % 32)).to(tl.int32)  # bit 31 is the sign
        tl.store(seen_ptrs, seen, mask=keeps_seen)
        tl.store(ring_ptr + cursor * ring_stride + rows, tl.where(is_trash, NO_TOKEN, token_ids), mask=is_row)
    tl.store(cursor_ptr, cursor + 1)
