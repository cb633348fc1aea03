"""From a `SchedulerOutput` to the arrays of one forward pass. numpy only; `ModelRunner` moves them to the device.

All scheduled tokens of all sequences are packed into one row, `(1, num_tokens)`, without padding:

    sequence        | decode A | decode B | prefill C ............ |
    input_ids       |    a9    |    b4    |  c0  c1  c2  c3  c4     |
    positions       |     9    |     4    |   0   1   2   3   4     |
    cu_seqlens_q    0          1          2                         7
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cbgen.engine.block_manager import BlockManager
from cbgen.engine.sampling_input import SamplingInput
from cbgen.engine.scheduler import SchedulerOutput
from cbgen.engine.sequence import Sequence, SequenceTable

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step's input. T = num_tokens, B = num_seqs, S = number of sequences that sample.

    Attributes:
        input_ids, positions: [T].
        slot_mapping: [T] flat KV write address of each token, block * block_size + offset.
        cu_seqlens_q: [B + 1] offsets of each sequence's tokens in the packed row.
        context_lens: [B] positions each sequence holds once this step is done.
        block_tables: [B, max blocks in use]; entries past a sequence's own are stale.
        num_decodes: the first that many sequences have exactly one token.
        logits_indices: [S] packed positions whose logits are wanted.
        sampling: [S] the sequences that sample, in the order of `logits_indices`; sampling_input: their parameters.
    """

    input_ids: Int64Array
    positions: Int64Array
    slot_mapping: Int64Array
    cu_seqlens_q: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    num_decodes: int
    logits_indices: Int64Array
    sampling: list[Sequence]
    sampling_input: SamplingInput

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """The tokens of some scheduled sequences, packed; the fields are those of `ModelInput`, all int64."""

    input_ids: Int64Array
    positions: Int64Array
    slot_mapping: Int64Array
    cu_seqlens_q: Int64Array
    context_lens: Int64Array


def token_arrays(
    table: SequenceTable, slots: Int64Array, counts: Int64Array, block_manager: BlockManager
) -> TokenArrays:
    """The next `counts` tokens of each of the slots, both [B], without a Python loop."""
    starts = table.num_computed_tokens[slots]  # [B]
    cu_seqlens_q = np.zeros(len(slots) + 1, dtype=np.int64)
    np.cumsum(counts, out=cu_seqlens_q[1:])
    positions = np.arange(cu_seqlens_q[-1]) + np.repeat(starts - cu_seqlens_q[:-1], counts)  # [T]
    token_slots = np.repeat(slots, counts)  # [T]
    block_size = block_manager.block_size
    blocks = block_manager.block_tables[token_slots, positions // block_size].astype(np.int64)  # [T]
    return TokenArrays(
        input_ids=table.token_ids[token_slots, positions].astype(np.int64),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=starts + counts,
    )


def build_model_input(output: SchedulerOutput, block_manager: BlockManager) -> ModelInput:
    """Arrays for one step."""
    table, slots = output.table, output.slots  # [B]
    tokens = token_arrays(table, slots, output.num_scheduled_tokens, block_manager)
    samples = np.flatnonzero(output.samples)  # a chunk amid a prompt has nothing to sample
    max_blocks = block_manager.blocks_for(int(tokens.context_lens.max(initial=0)))
    return ModelInput(
        input_ids=tokens.input_ids,
        positions=tokens.positions,
        slot_mapping=tokens.slot_mapping,
        cu_seqlens_q=tokens.cu_seqlens_q.astype(np.int32),
        context_lens=tokens.context_lens.astype(np.int32),
        block_tables=block_manager.block_tables[slots, :max_blocks],
        num_decodes=output.num_decodes,
        logits_indices=tokens.cu_seqlens_q[1:][samples] - 1,
        sampling=[output.sequences[i] for i in samples],
        sampling_input=SamplingInput.from_table(table, slots[samples]),
    )
