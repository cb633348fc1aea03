"""What a decode step has to know of each slot, kept on the device, so that steps follow each other without the host.

Enters: rows of the scheduler's `SequenceTable` when a sequence takes a slot, and block tables when they grow. In
between only the device changes it: `gather_step` reads the inputs of a step, `advance` adds the tokens that were
sampled. Both are plain torch here, work on any device and are what kernels are tested against.

Row N, past the N slots, is the trash slot: one token at position 0 of a block of its own, for ever. Padding is mapped
to it, and so is a sequence that has ended here while the host does not know it yet. That device state makes steps
independent of the host is the idea of vLLM's second model runner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NO_TOKEN = -2  # in place of a sampled id: the row had ended before, or is padding. -1 is a row with unsound logits.
STOP_WIDTH = 16  # stop ids of a slot that the device knows; of rows with more the host looks for them
_NEVER = 1 << 40  # more tokens than any sequence has


@dataclass(frozen=True, slots=True)
class SlotState:
    """Of each of N slots and the trash slot after them; all [N + 1].

    Attributes:
        last_token: int64, sampled or last of the prompt; the one that the next step computes.
        num_tokens: int64, prompt and output, `last_token` included: it is at position num_tokens - 1.
        num_prompt_tokens, max_total_tokens, min_total_tokens: int64, see `SequenceTable`.
        is_done: bool, the sequence has ended.
        stop_token_ids: [N + 1, STOP_WIDTH] int64, padded with -1.
        block_tables: [N + 1, P] int32, as in `BlockManager`.
        temperature, top_p, min_p: float32; top_k: int32. As in `SamplingInput`.
        random_state: int64, the bits of `sampling_input.random_states`.
        repetition_penalty: float32, 1 for none.
        seen_tokens: [N + 1, vocab_size / 32, rounded up] int32, a bit for each token id, the lowest first: whether it
            is in prompt or output. Only true where there is a penalty.
    """

    last_token: Tensor
    num_tokens: Tensor
    num_prompt_tokens: Tensor
    max_total_tokens: Tensor
    min_total_tokens: Tensor
    is_done: Tensor
    stop_token_ids: Tensor
    block_tables: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    random_state: Tensor
    repetition_penalty: Tensor
    seen_tokens: Tensor

    @classmethod
    def empty(
        cls, num_slots: int, max_blocks: int, trash_block: int, vocab_size: int, device: torch.device
    ) -> SlotState:
        """Every slot like the trash slot, which has its block."""
        rows = num_slots + 1

        def full(value: float, dtype: torch.dtype, *width: int) -> Tensor:
            return torch.full((rows, *width), value, dtype=dtype, device=device)

        return cls(
            last_token=full(0, torch.int64),
            num_tokens=full(1, torch.int64),
            num_prompt_tokens=full(1, torch.int64),
            max_total_tokens=full(_NEVER, torch.int64),
            min_total_tokens=full(0, torch.int64),
            is_done=full(False, torch.bool),
            stop_token_ids=full(-1, torch.int64, STOP_WIDTH),
            block_tables=full(trash_block, torch.int32, max_blocks),
            temperature=full(0, torch.float32),
            top_k=full(0, torch.int32),
            top_p=full(1, torch.float32),
            min_p=full(0, torch.float32),
            random_state=full(0, torch.int64),
            repetition_penalty=full(1, torch.float32),
            seen_tokens=full(0, torch.int32, -(-vocab_size // 32)),
        )

    @property
    def trash_slot(self) -> int:
        return len(self.last_token) - 1


def bits_of(token_ids: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.int32]:
    """[vocab_size / 32, rounded up] a row of `SlotState.seen_tokens` with these ids."""
    is_seen = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    is_seen[token_ids] = True
    return np.packbits(is_seen, bitorder="little").view(np.int32)


class StepInput(NamedTuple):
    """One decode step over B slots.

    Attributes:
        slots: [B] int64, the trash slot in place of slots that are done.
        input_ids, positions, slot_mapping: [B] int64.
        context_lens: [B] int32.
        block_tables: [B, number of columns asked for] int32.
    """

    slots: Tensor
    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    context_lens: Tensor
    block_tables: Tensor


def gather_step(state: SlotState, slots: Tensor, num_columns: int, block_size: int) -> StepInput:
    """Inputs of one decode step.

    Args:
        state: only read.
        slots: [B] int64, padded with the trash slot.
        num_columns: of the block tables; no sequence among them holds more blocks.
        block_size: tokens in a block.
    """
    slots = torch.where(state.is_done[slots], state.trash_slot, slots)
    num_tokens = state.num_tokens[slots]
    positions = num_tokens - 1
    block_tables = state.block_tables[slots, :num_columns]
    blocks = block_tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
    return StepInput(
        slots=slots,
        input_ids=state.last_token[slots],
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        context_lens=num_tokens.int(),
        block_tables=block_tables,
    )


def advance(state: SlotState, slots: Tensor, token_ids: Tensor, ring: Tensor, cursor: Tensor) -> None:
    """Add a sampled token to each slot, as `SequenceTable.append` does, and write the tokens to the ring for the host.

    Args:
        state: changed in place, but for the trash slot.
        slots: [B] int64, those that sampled; the trash slot for all others, and no other slot twice.
        token_ids: [B] int64, -1 where the logits were not sound: that ends the sequence.
        ring: [R, W] int64, W >= B: row `cursor` gets the tokens, NO_TOKEN for the trash slot.
        cursor: [1] int64, moved on by one.
    """
    is_trash = slots == state.trash_slot
    is_sound = token_ids >= 0
    num_tokens = state.num_tokens[slots] + is_sound
    stops = (state.stop_token_ids[slots] == token_ids[:, None]).any(dim=1) & is_sound
    stops &= num_tokens > state.min_total_tokens[slots]
    is_done = stops | ~is_sound | (num_tokens >= state.max_total_tokens[slots])
    state.last_token[slots] = token_ids.clamp(min=0).masked_fill(is_trash, 0)
    state.num_tokens[slots] = num_tokens.masked_fill(is_trash, 1)
    state.is_done[slots] = is_done & ~is_trash
    words, bits = token_ids.clamp(min=0) >> 5, 1 << (token_ids.clamp(min=0) & 31)
    state.seen_tokens[slots, words] |= bits.to(torch.int32)  # bit 31 is the sign
    ring[cursor, : len(slots)] = token_ids.masked_fill(is_trash, NO_TOKEN)[None]
    cursor += 1
