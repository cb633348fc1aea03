"""What runs in the next step. Reads top to bottom: add, schedule, update.

`schedule()` returns a `SchedulerOutput`, a value that says how many tokens each sequence gets; `update()` applies
what the model answered. Every step has one token budget (`max_num_batched_tokens`): running sequences first, one
decode token each or the next chunk of their prefill, then waiting sequences while budget, slots and blocks last.
There is no prefill phase and no decode phase (vLLM v1's idea; iteration-level scheduling is Orca's, OSDI 2022).

Deterministic: no clock, no hash order. The same class runs under the engine and under `cbgen simulate`.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from cbgen.engine.block_manager import BlockManager
from cbgen.engine.sequence import FinishReason, Sequence

Batching = Literal["continuous", "static"]
Order = Literal["file", "longest"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policies.

    Attributes:
        max_num_seqs: slots; how many sequences may run at once.
        max_num_batched_tokens: token budget of one step, at least `max_num_seqs`.
        batching: `continuous` refills a slot in the step after it frees. `static` is the baseline: a batch is prefilled
            together and nothing is admitted until its longest row ends.
        order: `file` admits in input order, `longest` by expected output length (longest processing time first).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batching: Batching = "continuous"
    order: Order = "file"

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence needs one token a step"
            )


@dataclass(slots=True)
class SchedulerOutput:
    """One step's decision: `sequences[i]` computes its next `num_scheduled_tokens[i]` tokens. Decodes come first."""

    sequences: list[Sequence] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_decodes: int = 0
    num_preempted: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)

    # A step that cannot be run whole is run in parts, one after the other; together they are the same step.

    def cut(self, max_tokens: int) -> list[SchedulerOutput]:
        """Parts of at most `max_tokens` tokens, at least 1; the chunk of a long prompt may be cut, too."""
        parts = [SchedulerOutput()]
        room = max_tokens
        for position, (sequence, num_tokens) in enumerate(zip(self.sequences, self.num_scheduled_tokens, strict=True)):
            while num_tokens:
                if not room:
                    parts.append(SchedulerOutput())
                    room = max_tokens
                taken = min(num_tokens, room)
                parts[-1]._take(sequence, taken, is_decode=position < self.num_decodes)
                num_tokens -= taken
                room -= taken
        return parts

    def halves(self) -> list[SchedulerOutput]:
        """Two parts of half the sequences each."""
        middle = len(self.sequences) // 2
        return [self._part(range(middle)), self._part(range(middle, len(self.sequences)))]

    def unfinished(self) -> SchedulerOutput:
        """Without the sequences that have ended since."""
        return self._part(i for i, sequence in enumerate(self.sequences) if sequence.finish_reason is None)

    def _part(self, positions: Iterable[int]) -> SchedulerOutput:
        part = SchedulerOutput()
        for i in positions:
            part._take(self.sequences[i], self.num_scheduled_tokens[i], is_decode=i < self.num_decodes)
        return part

    def _take(self, sequence: Sequence, num_tokens: int, *, is_decode: bool) -> None:
        self.sequences.append(sequence)
        self.num_scheduled_tokens.append(num_tokens)
        self.num_decodes += is_decode


class Scheduler:
    """Owns the waiting and running order and every change to a `Sequence`."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager) -> None:
        self.config = config
        self.block_manager = block_manager
        self.admits = True  # False while the run ends
        self.running: list[Sequence] = []  # in order of admission; the last is preempted first
        self._waiting: deque[Sequence] = deque()
        self._free_slots = list(range(config.max_num_seqs))  # a heap: the lowest slot is refilled first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self._waiting)

    # -- add ----------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> bool:
        """Queue a sequence. False, with its `finish_reason` set, when it could not run even alone."""
        longest, blocks = sequence.max_total_tokens, self.block_manager
        if longest > self.config.max_model_len or blocks.blocks_for(longest) > blocks.num_blocks:
            sequence.finish_reason = FinishReason.KV_NEVER_FITS
            return False
        if self.config.order == "longest":
            insort(self._waiting, sequence, key=_longest_first)
        else:
            self._waiting.append(sequence)
        return True

    # -- schedule -----------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide one step. Reserves blocks and moves sequences between the queues; no token id changes here."""
        decodes: list[Sequence] = []
        prefills: list[tuple[Sequence, int]] = []
        budget = self.config.max_num_batched_tokens
        budget, num_preempted = self._schedule_running(budget, decodes, prefills)
        if not num_preempted:  # blocks just ran out: admitting now would only preempt again
            self._admit(budget, prefills)
        output = SchedulerOutput(decodes, [1] * len(decodes), len(decodes), num_preempted)
        for sequence, num_tokens in prefills:
            output.sequences.append(sequence)
            output.num_scheduled_tokens.append(num_tokens)
        return output

    def _schedule_running(
        self, budget: int, decodes: list[Sequence], prefills: list[tuple[Sequence, int]]
    ) -> tuple[int, int]:
        """Give every running sequence its tokens, preempting from the back when blocks run out."""
        allocate, capacity = self.block_manager.allocate, self.block_manager.capacity
        num_preempted = 0
        # A static batch starts together: nobody decodes until every prompt is read.
        starting = self.config.batching == "static" and any(
            s.num_tokens - s.num_computed_tokens > 1 for s in self.running
        )
        # A decode token each comes first, so that a long prefill never stalls the others (stall-free batching,
        # Sarathi-Serve, arXiv 2403.02310).
        for sequence in [] if starting else list(self.running):
            if sequence.slot < 0:
                continue  # preempted for an earlier sequence in this very loop
            num_tokens = sequence.num_tokens
            if num_tokens - sequence.num_computed_tokens > 1:
                continue
            while num_tokens > capacity(sequence.slot) and not allocate(sequence.slot, num_tokens):
                num_preempted += 1
                if self._preempt_last() is sequence:
                    break
            else:
                decodes.append(sequence)
                budget -= 1
        for sequence in self.running:
            num_missing = sequence.num_tokens - sequence.num_computed_tokens
            if num_missing > 1 and budget > 0:
                num_tokens = min(num_missing, budget)
                prefills.append((sequence, num_tokens))
                budget -= num_tokens
        return budget, num_preempted

    def _admit(self, budget: int, prefills: list[tuple[Sequence, int]]) -> None:
        """Fill free slots from the queue. Blocks for all known tokens are taken at once: a prefill never gets stuck."""
        static = self.config.batching == "static"
        if not self.admits or (static and self.running):
            return
        while self._waiting and self._free_slots and (budget > 0 or static):
            sequence = self._waiting[0]
            slot = self._free_slots[0]
            if not self._has_room(sequence.num_tokens) or not self.block_manager.allocate(slot, sequence.num_tokens):
                return
            heapq.heappop(self._free_slots)
            self._waiting.popleft()
            sequence.slot = slot
            self.running.append(sequence)
            num_tokens = min(sequence.num_tokens, budget)
            if num_tokens:  # a static batch is admitted whole, and its prompts are read as the budget allows
                prefills.append((sequence, num_tokens))
                budget -= num_tokens

    def _has_room(self, num_tokens: int) -> bool:
        """Whether admitting leaves the running sequences a block in four to grow into; else they preempt each other."""
        blocks = self.block_manager
        return blocks.num_free_blocks - blocks.blocks_for(num_tokens) >= -(-len(self.running) // 4)

    def _preempt_last(self) -> Sequence:
        """Send the sequence admitted last back to the queue's head; its KV is dropped and computed again later."""
        sequence = self.running.pop()
        self._release(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self._waiting.appendleft(sequence)
        return sequence

    # -- update -------------------------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, token_ids: list[int | None]) -> list[Sequence]:
        """Apply a step's result; returns the sequences it finished, in batch order.

        Args:
            output: what `schedule` returned for this step.
            token_ids: one per scheduled sequence whose tokens are now all computed, in batch order; None where the
                logits were not finite.
        """
        finished = []
        sampled = iter(token_ids)
        for sequence, num_tokens in zip(output.sequences, output.num_scheduled_tokens, strict=True):
            sequence.num_computed_tokens += num_tokens
            if sequence.num_computed_tokens < sequence.num_tokens:
                continue  # more of its prompt to read
            sequence.finish_reason = self._append(sequence, next(sampled))
            if sequence.finish_reason is not None:
                finished.append(sequence)
        if finished:
            self.running = [sequence for sequence in self.running if sequence.finish_reason is None]
            for sequence in finished:
                self._release(sequence)
        return finished

    def end_row(self, index: int, reason: FinishReason) -> None:
        """End every sample of a row that is still here: one of them failed, and the row with it."""
        for sequence in [*self.running, *self._waiting]:
            if sequence.index == index:
                sequence.finish_reason = reason
                if sequence.slot >= 0:
                    self._release(sequence)
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]
        self._waiting = deque(sequence for sequence in self._waiting if sequence.finish_reason is None)

    def _append(self, sequence: Sequence, token_id: int | None) -> FinishReason | None:
        """Add one sampled token; the reason to end, or None."""
        if token_id is None:
            return FinishReason.NAN_LOGITS
        sequence.output_token_ids.append(token_id)
        num_output = len(sequence.output_token_ids)
        if sequence.stop_on_text is not None and sequence.stop_on_text(token_id):
            return FinishReason.STOP
        if token_id in sequence.stop_token_ids and num_output > sequence.params.min_tokens:
            return FinishReason.STOP
        if len(sequence.prompt_token_ids) + num_output >= sequence.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def _release(self, sequence: Sequence) -> None:
        self.block_manager.free(sequence.slot)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = -1

    def check_integrity(self) -> None:
        """Slots, queues and blocks agree. Called after each operation in tests."""
        self.block_manager.check_integrity()
        slots = [sequence.slot for sequence in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.config.max_num_seqs)), "a slot is lost or held twice"
        assert all(sequence.slot == -1 and not sequence.num_computed_tokens for sequence in self._waiting)
        for sequence in self.running:
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens
            assert sequence.num_computed_tokens <= self.block_manager.capacity(sequence.slot)


def _longest_first(sequence: Sequence) -> tuple[int, int]:
    return -sequence.expected_output_tokens, sequence.index
