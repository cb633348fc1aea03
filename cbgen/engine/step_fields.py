"""What the host tells the device of one step of a round: one buffer of int64, laid out by the step's shape. numpy only.

Enters: a `SchedulerOutput`. Leaves: the buffer, filled up with padding where the shape is larger than the step; the
device reads it through the same views. The packed row that it describes:

    | decode | decode | trash | prompt A ...... | prompt B ... | trash ... |
      one token each of num_decodes slots         num_prefill_tokens of num_prefills sequences
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cbgen.engine.block_manager import BlockManager
from cbgen.engine.cuda_graph import StepShape
from cbgen.engine.model_input import TokenArrays, token_arrays
from cbgen.engine.scheduler import SchedulerOutput

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepFields:
    """What a step of some shape is told by the host, as views of one int64 buffer.

    Attributes:
        cursor: [1] row of the ring.
        slots: [num_decodes].
        prefill_slots: [num_prefills], the trash slot for padding.
        sampled_slots: [num_prefills], the same where a prompt ends in this step, else the trash slot.
        logits_indices: [num_prefills] the last token of each in the packed row.
        query_ends, context_lens: [num_prefills] where its tokens end, counted from the first token of any prompt; and
            its positions so far.
        input_ids, positions, slot_mapping: [num_prefill_tokens].
    """

    cursor: Any
    slots: Any
    prefill_slots: Any
    sampled_slots: Any
    logits_indices: Any
    query_ends: Any
    context_lens: Any
    input_ids: Any
    positions: Any
    slot_mapping: Any

    @classmethod
    def of(cls, buffer: Any, shape: StepShape) -> StepFields:
        """Views of a tensor or an array that is at least `StepFields.size` long."""
        sizes = cls._sizes(shape)
        starts = np.cumsum([0, *sizes]).tolist()
        return cls(*(buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)))

    @classmethod
    def size(cls, shape: StepShape) -> int:
        """Integers in all."""
        return sum(cls._sizes(shape))

    @staticmethod
    def _sizes(shape: StepShape) -> list[int]:
        return [1, shape.num_decodes, *[shape.num_prefills] * 5, *[shape.num_prefill_tokens] * 3]


@dataclass(frozen=True, slots=True)
class StepParts:
    """A step cut into its decodes and its prompts.

    Attributes:
        decodes: [num_decodes] slots.
        prefills: [num_prefills] slots; tokens: theirs.
        samples: [num_prefills] bool, whether the prompt ends here.
        max_decode_len: most positions that one of the decodes holds after the first step.
    """

    decodes: Int64Array
    prefills: Int64Array
    tokens: TokenArrays
    samples: npt.NDArray[np.bool_]
    max_decode_len: int

    @classmethod
    def of(cls, output: SchedulerOutput, block_manager: BlockManager) -> StepParts:
        table, num_decodes = output.table, output.num_decodes
        decodes, prefills = output.slots[:num_decodes], output.slots[num_decodes:]
        return cls(
            decodes=decodes,
            prefills=prefills,
            tokens=token_arrays(table, prefills, output.num_scheduled_tokens[num_decodes:], block_manager),
            samples=output.samples[num_decodes:],
            max_decode_len=int(table.num_tokens[decodes].max(initial=1)),
        )

    def shape(self, num_steps: int, max_context_len: int) -> StepShape:
        """As it is, without padding. A sequence that reaches the greatest length amid the steps grows no further."""
        longest = max(self.max_decode_len + num_steps - 1, int(self.tokens.context_lens.max(initial=1)))
        longest = min(longest, max_context_len)
        return StepShape(len(self.decodes), len(self.prefills), len(self.tokens.input_ids), longest)

    def columns(self, shape: StepShape) -> Int64Array:
        """[S] of the ring, for each that samples."""
        return np.concatenate([np.arange(len(self.decodes)), shape.num_decodes + np.flatnonzero(self.samples)])

    def fields(self, shape: StepShape, trash_slot: int, first_row: int, trash_position: int) -> Int64Array:
        """The buffer of a step of a shape that covers this one."""
        buffer = blank_fields(shape, trash_slot, trash_position)
        fields, tokens, num_prefills = StepFields.of(buffer, shape), self.tokens, len(self.prefills)
        fields.cursor[0] = first_row
        fields.slots[: len(self.decodes)] = self.decodes
        ends = tokens.cu_seqlens_q[1:]
        fields.prefill_slots[:num_prefills] = self.prefills
        fields.sampled_slots[:num_prefills] = np.where(self.samples, self.prefills, trash_slot)
        fields.logits_indices[:num_prefills] = shape.num_decodes + ends - 1
        fields.query_ends[:] = ends[-1] if num_prefills else 0
        fields.query_ends[:num_prefills] = ends
        fields.context_lens[:num_prefills] = tokens.context_lens
        for name in ("input_ids", "positions", "slot_mapping"):
            values = getattr(tokens, name)
            getattr(fields, name)[: len(values)] = values
        return buffer


def blank_fields(shape: StepShape, trash_slot: int, trash_position: int) -> Int64Array:
    """The buffer of a step of nothing but padding."""
    buffer = np.zeros(StepFields.size(shape), dtype=np.int64)
    fields = StepFields.of(buffer, shape)
    for slots in (fields.slots, fields.prefill_slots, fields.sampled_slots):
        slots[:] = trash_slot
    fields.slot_mapping[:] = trash_position
    return buffer
