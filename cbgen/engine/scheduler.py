"""What runs in the next step. Reads top to bottom: add, schedule, update.

`schedule()` returns a `SchedulerOutput`, a value that says how many tokens each sequence gets; `update()` applies
what the model answered. A device that needs no host between steps is given several at once: `launched()` moves the
counters on although the tokens are not known yet, and `resolve()` fills them in later. Every step has one token budget
(`max_num_batched_tokens`): running sequences first, one decode token each or the next chunk of their prefill, then
waiting sequences while budget, slots and blocks last.
There is no prefill phase and no decode phase (vLLM v1's idea; iteration-level scheduling is Orca's, OSDI 2022).

State of running sequences is in `SequenceTable`, so that a step costs a few numpy calls; Python loops only over
sequences that enter, end, read a prompt or need a block. Deterministic: no clock, no hash order. The same class runs
under the engine and under `cbgen simulate`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from cbgen.engine.block_manager import BlockManager, Prefix
from cbgen.engine.prediction import LengthPredictor
from cbgen.engine.sequence import FinishReason, Sequence, SequenceTable, TokenIds
from cbgen.engine.waiting import Order, WaitingQueue

Int64Array = npt.NDArray[np.int64]
Batching = Literal["continuous", "static"]

_MOST_PASSED_OVER = 256  # rows that cannot be admitted yet and are looked past in one step
_FREE_SHARE = 16  # unless steps are mixed, prompts are read when one slot in so many is free
_RESERVE_SHARE = 64  # one block in so many stays free for rows that run longer than predicted


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policies.

    Attributes:
        max_num_seqs: slots; how many sequences may run at once.
        max_num_batched_tokens: token budget of one step, at least `max_num_seqs`.
        batching: `continuous` refills a slot in the step after it frees. `static` is the baseline: a batch is prefilled
            together and nothing is admitted until its longest row ends.
        order: who is admitted first, see `cbgen.engine.waiting`.
        mixed: whether prompts are read in the steps in which other rows decode. If not, a step does one or the other,
            and prompts are read when a part of the slots has become free.
        prediction: whether rows are admitted while memory lasts for the length they will likely have, and the cheapest
            to compute again is preempted; else while a block in four is left to grow into, and the last is preempted.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batching: Batching = "continuous"
    order: Order = "file"
    mixed: bool = True
    prediction: bool = True

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
    """One step's decision: `sequences[i]` computes its next `num_scheduled_tokens[i]` tokens. Decodes come first.

    Attributes:
        table: where the state of the sequences is.
        slots: [B] int64; num_scheduled_tokens: [B] int64; sequences: the same B sequences.
        num_preempted: sequences that lost their slot for this step.
        num_prompt_tokens, num_cached_tokens: of the sequences admitted for the first time; in all, and in the cache.
        num_recomputed_tokens: of the sequences admitted again, what is computed once more.
    """

    table: SequenceTable
    slots: Int64Array
    num_scheduled_tokens: Int64Array
    sequences: list[Sequence]
    num_decodes: int = 0
    num_preempted: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())

    @property
    def samples(self) -> npt.NDArray[np.bool_]:
        """[B] whether a sequence gets a new token: all it has are computed after this step. Asked before `update`."""
        table = self.table
        is_ready: npt.NDArray[np.bool_] = (
            table.num_computed_tokens[self.slots] + self.num_scheduled_tokens == table.num_tokens[self.slots]
        )
        return is_ready

    @property
    def most_steps(self) -> int:
        """After how many such steps each sequence has reached its greatest length."""
        return int((self.table.max_total_tokens[self.slots] - self.table.num_tokens[self.slots]).max(initial=1))

    # A step that cannot be run whole is run in parts, one after the other; together they are the same step.

    def cut(self, max_tokens: int) -> list[SchedulerOutput]:
        """Parts of at most `max_tokens` tokens, at least 1; the chunk of a long prompt may be cut, too."""
        parts: list[dict[int, int]] = [{}]  # position -> tokens
        room = max_tokens
        for position, num_tokens in enumerate(self.num_scheduled_tokens.tolist()):
            while num_tokens:
                if not room:
                    parts.append({})
                    room = max_tokens
                taken = min(num_tokens, room)
                parts[-1][position] = taken
                num_tokens -= taken
                room -= taken
        return [self._part(part, list(part.values())) for part in parts]

    def halves(self) -> list[SchedulerOutput]:
        """Two parts of half the sequences each."""
        middle = len(self.sequences) // 2
        return [self._part(range(middle)), self._part(range(middle, len(self.sequences)))]

    def unfinished(self) -> SchedulerOutput:
        """Without the sequences that have ended since."""
        return self._part(i for i, sequence in enumerate(self.sequences) if sequence.finish_reason is None)

    def _part(self, positions: Iterable[int], num_tokens: list[int] | None = None) -> SchedulerOutput:
        chosen = np.fromiter(positions, dtype=np.int64)
        counts = self.num_scheduled_tokens[chosen] if num_tokens is None else np.array(num_tokens, dtype=np.int64)
        sequences = [self.sequences[position] for position in chosen]
        return SchedulerOutput(
            self.table, self.slots[chosen], counts, sequences, int((chosen < self.num_decodes).sum())
        )


@dataclass(frozen=True, slots=True)
class Launched:
    """Steps that are on their way: who gets tokens from them.

    Attributes:
        sequences: the S that sample in each step; slots: [S] int64, where they were.
        num_tokens: [S] int64, how many each gets if it does not stop before.
        num_computed: [S] int64, positions of each whose KV is there after the first step.
        num_steps: how many steps.
    """

    sequences: list[Sequence]
    slots: Int64Array
    num_tokens: Int64Array
    num_computed: Int64Array
    num_steps: int


class Scheduler:
    """Owns the waiting and running order and every change to a `Sequence`."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager) -> None:
        self.config = config
        self.block_manager = block_manager
        self.table = SequenceTable(config.max_num_seqs, config.max_model_len)
        self.admits = True  # False while the run ends
        self._running: Int64Array = np.zeros(0, dtype=np.int64)  # slots in order of admission
        self._leaving: list[Sequence] = []  # out of their slots, their last tokens pending
        self._predictor = LengthPredictor()
        self._sorted_at = self._predictor.version
        self._waiting = WaitingQueue(config.order, config.max_num_seqs, self._predictor.expected_output)
        self._last_prompt: TokenIds | None = None
        self._last_hashes: list[bytes] = []
        self._free_slots = list(range(config.max_num_seqs))  # a heap: the lowest slot is refilled first

    @property
    def running(self) -> list[Sequence]:
        """In order of admission."""
        return self._sequences(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_leaving(self) -> int:
        """Sequences that need no slot any more, and whose last tokens are not known yet."""
        return len(self._leaving)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the waiting sequences."""
        return self._waiting.num_prompt_tokens

    @property
    def has_unfinished(self) -> bool:
        return bool(len(self._running) or len(self._waiting))

    def _sequences(self, slots: Int64Array) -> list[Sequence]:
        sequences = self.table.sequences
        return [sequence for slot in slots.tolist() if (sequence := sequences[slot]) is not None]

    # -- add ----------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> bool:
        """Queue a sequence. False, with its `finish_reason` set, when it could not run even alone."""
        longest, blocks = sequence.max_total_tokens, self.block_manager
        if longest > self.config.max_model_len or blocks.blocks_for(longest) > blocks.num_blocks:
            sequence.finish_reason = FinishReason.KV_NEVER_FITS
            return False
        if sequence.prompt_token_ids is not self._last_prompt:  # the samples of a row share their prompt
            self._last_prompt = sequence.prompt_token_ids
            self._last_hashes = blocks.hashes(sequence.prompt_token_ids)
        sequence.block_hashes = self._last_hashes
        blocks.want(sequence.block_hashes)
        self._waiting.add(sequence)
        return True

    # -- schedule -----------------------------------------------------------------------------------------------------

    def schedule(self, num_steps: int = 1) -> SchedulerOutput:
        """Decide one step. Reserves blocks and moves sequences between the queues; no token id changes here.

        Args:
            num_steps: sequences that decode get blocks for so many steps.
        """
        if not self.config.mixed and len(self._running):
            if self._reads_first() and (output := self._schedule_step(self._running[:0], 0)).sequences:
                return output
            return self._schedule_step(*self._schedule_decodes(num_steps), only_decodes=True)
        return self._schedule_step(*self._schedule_decodes(num_steps))

    def lacks_blocks(self, num_steps: int) -> bool:
        """Whether `schedule` would have to preempt to decode so many steps."""
        table, blocks, slots = self.table, self.block_manager, self._running
        missing = -(-self._tokens_after(slots, num_steps) // blocks.block_size) - blocks.num_held[slots]
        is_decode = table.num_tokens[slots] - table.num_computed_tokens[slots] == 1
        return int(np.maximum(missing[is_decode], 0).sum()) > blocks.num_free_blocks

    def _tokens_after(self, slots: Int64Array, num_steps: int) -> Int64Array:
        """[len(slots)] tokens whose KV is computed by then: the last one sampled is not."""
        table = self.table
        return np.minimum(table.num_tokens[slots] + num_steps - 1, table.max_total_tokens[slots])

    def _reads_first(self) -> bool:
        """Whether the next step reads prompts, where a step cannot do both: once begun, and when it is worth it."""
        num_missing = self.table.num_tokens[self._running] - self.table.num_computed_tokens[self._running]
        if (num_missing > 1).any():
            return True
        if not self.admits or not self._waiting:
            return False
        return len(self._free_slots) >= max(1, self.config.max_num_seqs // _FREE_SHARE)

    def _schedule_step(self, decodes: Int64Array, num_preempted: int, *, only_decodes: bool = False) -> SchedulerOutput:
        """A step of these decodes, and of prompts for the rest of the budget."""
        budget = self.config.max_num_batched_tokens
        # The last token of a prompt counts as prefill however its prompt was cut: kernels may sum the two differently.
        is_prompt = self.table.num_computed_tokens[decodes] < self.table.num_prompt_tokens[decodes]
        decodes = decodes[np.argsort(is_prompt, kind="stable")]
        num_decodes = len(decodes) - int(is_prompt.sum())
        prefills, counts = self._schedule_prefills(0 if only_decodes else budget - len(decodes))
        output = SchedulerOutput(self.table, decodes, counts, [], num_decodes, num_preempted)
        # When blocks just ran out, admitting now would only preempt again.
        is_closed = only_decodes or num_preempted
        new = [] if is_closed else self._admit(budget - len(decodes) - int(counts.sum()), output)
        new_slots, new_counts = np.array(new, dtype=np.int64).reshape(-1, 2).T
        output.slots = np.concatenate([decodes, prefills, new_slots])
        output.num_scheduled_tokens = np.concatenate([np.ones(len(decodes), dtype=np.int64), counts, new_counts])
        output.sequences = self._sequences(output.slots)
        return output

    def _schedule_decodes(self, num_steps: int) -> tuple[Int64Array, int]:
        """Slots that have one token to compute, all of them: a long prefill never stalls the others (stall-free
        batching, Sarathi-Serve, arXiv 2403.02310). Where blocks run out, sequences are preempted.
        """
        table, blocks = self.table, self.block_manager
        num_missing = table.num_tokens[self._running] - table.num_computed_tokens[self._running]
        if self.config.batching == "static" and (num_missing > 1).any():
            return self._running[:0], 0  # a static batch starts together: nobody decodes until every prompt is read
        decodes = self._running[num_missing == 1]
        num_preempted, wanted = 0, self._tokens_after(decodes, num_steps)
        is_short = wanted > blocks.num_held[decodes] * blocks.block_size
        for slot, num_tokens in zip(decodes[is_short].tolist(), wanted[is_short].tolist(), strict=True):
            # No tokens are left if it was preempted for an earlier one.
            while table.num_tokens[slot] and not blocks.allocate(slot, num_tokens):
                num_preempted += 1
                if self._preempt() == slot:
                    break
        return decodes[table.num_tokens[decodes] > 0] if num_preempted else decodes, num_preempted

    def _schedule_prefills(self, budget: int) -> tuple[Int64Array, Int64Array]:
        """Slots that go on reading their prompt, and how many tokens each, in order of admission."""
        num_missing = self.table.num_tokens[self._running] - self.table.num_computed_tokens[self._running]
        is_reading = num_missing > 1
        slots, wanted = self._running[is_reading], num_missing[is_reading]
        counts = np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted)
        return slots[counts > 0], counts[counts > 0]

    def _admit(self, budget: int, output: SchedulerOutput) -> list[tuple[int, int]]:
        """Fill free slots from the queue. Blocks for all known tokens are taken at once: a prefill never gets stuck.

        Returns:
            (slot, tokens) of each that has some in this step; what it counted is added to `output`.
        """
        static = self.config.batching == "static"
        admitted: list[tuple[int, int]] = []
        if not self.admits or not self._free_slots or not self._waiting or (static and len(self._running)):
            return admitted
        if self._sorted_at != self._predictor.version:
            self._sorted_at = self._predictor.version
            self._waiting.sort_again()
        num_passed_over = 0
        for entry in self._waiting.candidates():
            if not self._free_slots or (budget <= 0 and not static) or num_passed_over > _MOST_PASSED_OVER:
                break
            sequence = entry.sequence
            prefix = self.block_manager.find_prefix(sequence.block_hashes, sequence.num_tokens)
            if prefix.is_growing and not static:  # what it would compute is being computed: wait, and share it
                num_passed_over += 1
                continue
            if not self._has_room(sequence, prefix):
                break  # nobody overtakes it: it would wait for ever
            self._waiting.take(entry)
            slot = self._enter(sequence, prefix, output)
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            if num_tokens:  # a static batch is admitted whole, and its prompts are read as the budget allows
                admitted.append((slot, num_tokens))
                budget -= num_tokens
        return admitted

    def _enter(self, sequence: Sequence, prefix: Prefix, output: SchedulerOutput) -> int:
        """Move a sequence from the queue to a slot; returns it."""
        slot = heapq.heappop(self._free_slots)
        blocks, num_cached = self.block_manager, len(prefix.blocks) * self.block_manager.block_size
        is_admitted = blocks.admit(slot, sequence.num_tokens, sequence.block_hashes, prefix)
        assert is_admitted, "admitted without room"
        blocks.unwant(sequence.block_hashes)
        if sequence.num_preemptions:
            output.num_recomputed_tokens += max(0, sequence.num_lost_tokens - num_cached)
        else:
            sequence.num_cached_tokens = num_cached
            output.num_prompt_tokens += sequence.num_prompt_tokens
            output.num_cached_tokens += num_cached
        self.table.enter(slot, sequence, num_cached, self._predictor.likely_total(sequence))
        self._running = np.append(self._running, slot)
        return slot

    def _has_room(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Whether the sequence, and those that run, likely find the blocks they need until they end."""
        blocks, table, slots = self.block_manager, self.table, self._running
        num_free = blocks.num_free_blocks - blocks.num_taken(prefix, sequence.num_tokens)
        if num_free < 0 or not len(slots):
            return num_free >= 0
        if not self.config.prediction:
            return num_free >= -(-len(slots) // 4)
        num_tokens = np.append(table.num_tokens[slots], sequence.num_tokens)
        most_tokens = np.append(table.max_total_tokens[slots], sequence.max_total_tokens)
        if int((-(-most_tokens // blocks.block_size) + num_tokens // -blocks.block_size).sum()) <= num_free:
            return True  # whatever happens
        self._predict_again()
        num_left = np.append(table.likely_total_tokens[slots], self._predictor.likely_total(sequence)) - num_tokens
        freed = np.append(blocks.num_exclusive(slots), blocks.blocks_for(sequence.num_tokens) - len(prefix.blocks))
        num_free -= blocks.num_blocks // _RESERVE_SHARE
        return _peak_growth(num_tokens, num_left, freed, blocks.block_size) <= num_free

    def _predict_again(self) -> None:
        """For sequences that turned out longer than was likely."""
        table, slots = self.table, self._running
        is_longer = table.num_tokens[slots] >= table.likely_total_tokens[slots]
        for sequence in self._sequences(slots[is_longer & (table.num_tokens[slots] < table.max_total_tokens[slots])]):
            table.likely_total_tokens[sequence.slot] = self._predictor.likely_total(sequence)

    def _preempt(self) -> int:
        """Send a sequence back to the queue; its KV is computed again later. Returns the slot it had."""
        slot = self._cheapest() if self.config.prediction else int(self._running[-1])
        blocks, sequence = self.block_manager, self.table.sequences[slot]
        assert sequence is not None
        assert not self.table.num_pending_tokens[slot], "preempted while its tokens are not known"
        num_computed = sequence.num_computed_tokens
        hashes = blocks.hashes(sequence.tokens_between(0, num_computed))
        if len(hashes) > len(sequence.block_hashes):
            sequence.block_hashes = hashes
            blocks.extend_hashes(slot, hashes)
        blocks.note_computed(slot, num_computed)
        blocks.want(sequence.block_hashes)
        sequence.num_lost_tokens = num_computed
        sequence.num_preemptions += 1
        self._running = self._running[self._running != slot]
        self._release(slot)
        self._waiting.put_back(sequence)
        return slot

    def _cheapest(self) -> int:
        """The running slot with the least to compute again among those that give back blocks; the last of equals."""
        slots, blocks = self._running[::-1], self.block_manager
        num_exclusive = blocks.num_exclusive(slots)
        num_shared_tokens = (blocks.num_held[slots] - num_exclusive) * blocks.block_size
        cost = np.maximum(self.table.num_computed_tokens[slots] - num_shared_tokens, 0)
        cost[num_exclusive == 0] = self.config.max_model_len + 1
        return int(slots[cost.argmin()])

    # -- update -------------------------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, token_ids: Int64Array) -> list[Sequence]:
        """Apply a step's result; returns the sequences it finished, in batch order.

        Args:
            output: what `schedule` returned for this step.
            token_ids: [S] int64, one per scheduled sequence whose tokens are now all computed, in batch order; below 0
                where the logits were not finite.
        """
        table, blocks, slots = self.table, self.block_manager, output.slots
        num_computed = table.num_computed_tokens[slots] + output.num_scheduled_tokens
        table.num_computed_tokens[slots] = num_computed
        for position in np.flatnonzero(blocks.num_unstored[slots]).tolist():
            blocks.note_computed(int(slots[position]), int(num_computed[position]))
        ready = slots[num_computed == table.num_tokens[slots]]  # the others have more of their prompt to read
        finished = []
        for position, reason in table.append(ready, token_ids).items():
            finished.append(self._finish_at(int(ready[position]), reason))
        if finished:
            self._running = self._running[table.num_tokens[self._running] > 0]
        return finished

    def launched(self, output: SchedulerOutput, num_steps: int) -> Launched:
        """Count a step that is being computed, and those that follow it, as done. Sequences that reach their greatest
        length by that leave their slot at once: nothing of theirs is left to compute.

        Args:
            output: what `schedule` returned.
            num_steps: above 1 every sequence of `output` samples.
        """
        table, blocks, slots = self.table, self.block_manager, output.slots
        samples = output.samples
        sampling = slots[samples]
        sequences = [output.sequences[position] for position in np.flatnonzero(samples)]
        num_tokens = np.minimum(table.max_total_tokens[sampling] - table.num_tokens[sampling], num_steps)
        table.num_computed_tokens[slots] += output.num_scheduled_tokens
        num_computed = table.num_computed_tokens[sampling]
        is_full = table.num_tokens[sampling] + num_tokens == table.max_total_tokens[sampling]
        # Others may begin with the prompt of one that stays once its first token tells that nothing is wrong with it.
        for slot in [*slots[~samples].tolist(), *sampling[is_full].tolist()]:
            if blocks.num_unstored[slot]:
                blocks.note_computed(slot, int(table.num_computed_tokens[slot]))
        table.num_tokens[sampling] += num_tokens
        table.num_pending_tokens[sampling] += num_tokens
        table.num_computed_tokens[sampling] = table.num_tokens[sampling] - 1
        self._leaving += [self._release(slot) for slot in sampling[is_full].tolist()]
        if is_full.any():
            self._running = self._running[table.num_tokens[self._running] > 0]
        return Launched(sequences, sampling, num_tokens, num_computed, num_steps)

    def resolve(self, launched: Launched, token_ids: Int64Array) -> tuple[list[Sequence], int]:
        """Fill in what launched steps have sampled.

        Args:
            launched: the earliest that is not resolved yet.
            token_ids: [num_steps, S] int64, as for `update`; what follows the end of a sequence is not looked at.

        Returns:
            The sequences that this finished, and how many of the tokens were added to any.
        """
        table, slots, sequences = self.table, launched.slots, launched.sequences
        here = [table.sequences[slot] is sequence for slot, sequence in zip(slots.tolist(), sequences, strict=True)]
        is_here = np.array(here, dtype=np.bool_)
        is_sound = is_here & (token_ids[0] >= 0)
        for position in np.flatnonzero(is_sound & (self.block_manager.num_unstored[slots] > 0)).tolist():
            self.block_manager.note_computed(int(slots[position]), int(launched.num_computed[position]))
        finished: list[Sequence] = []
        num_added = 0
        for step, row in enumerate(token_ids):
            positions = np.flatnonzero(is_here & (step < launched.num_tokens))
            num_added += len(positions)
            for position, reason in table.append(slots[positions], row[positions]).items():
                is_here[positions[position]] = False
                finished.append(self._finish_at(int(slots[positions[position]]), reason))
        for position in [i for i, s in enumerate(sequences) if s.slot < 0 and s.finish_reason is None]:
            tokens = token_ids[: launched.num_tokens[position], position].tolist()
            num_added += self._resolve_late(sequences[position], tokens)
            if sequences[position].finish_reason is not None:
                finished.append(sequences[position])
        if finished:
            self._running = self._running[table.num_tokens[self._running] > 0]
        return finished, num_added

    def _resolve_late(self, sequence: Sequence, token_ids: list[int]) -> int:
        """The same for one that has left its slot; how many of the tokens it took."""
        for count, token_id in enumerate(token_ids, start=1):
            sequence.finish_reason = sequence.append_late(token_id)
            if sequence.finish_reason is None:
                continue
            self._leaving.remove(sequence)
            if sequence.finish_reason is FinishReason.NAN_LOGITS:
                self.block_manager.forget_idle(sequence.block_hashes)
            else:
                self._predictor.ended(sequence)
            return count
        return len(token_ids)

    def end_row(self, index: int, reason: FinishReason) -> None:
        """End every sample of a row that is still here: one of them failed, and the row with it."""
        for sequence in self.running:
            if sequence.index == index:
                self._finish(sequence.slot, reason)
        self._running = self._running[self.table.num_tokens[self._running] > 0]
        for sequence in [s for s in self._leaving if s.index == index]:
            self._leaving.remove(sequence)
            sequence.finish_reason = reason
        for sequence in self._waiting.remove_row(index):
            self.block_manager.unwant(sequence.block_hashes)
            sequence.finish_reason = reason

    def _finish_at(self, slot: int, reason: FinishReason) -> Sequence:
        """The token that was just added ends it."""
        if reason is FinishReason.NAN_LOGITS:
            self.block_manager.forget(slot)
            return self._finish(slot, reason)
        sequence = self._finish(slot, reason)
        self._predictor.ended(sequence)
        return sequence

    def _finish(self, slot: int, reason: FinishReason) -> Sequence:
        sequence = self._release(slot)
        sequence.finish_reason = reason
        return sequence

    def _release(self, slot: int) -> Sequence:
        self.block_manager.free(slot)
        heapq.heappush(self._free_slots, slot)
        return self.table.leave(slot)

    def check_integrity(self) -> None:
        """Slots, queues and blocks agree. Called after each operation in tests."""
        self.block_manager.check_integrity()
        self._waiting.check_integrity()
        slots = [sequence.slot for sequence in self.running]
        assert slots == self._running.tolist(), "a sequence is not in its slot"
        assert sorted(slots + self._free_slots) == list(range(self.config.max_num_seqs)), "a slot is lost or held twice"
        assert all(sequence.slot == -1 for sequence in self._waiting)
        for sequence in self.running:
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens <= sequence.max_total_tokens
            assert sequence.num_computed_tokens <= self.block_manager.capacity(sequence.slot)


def _peak_growth(num_tokens: Int64Array, num_left: Int64Array, freed: Int64Array, block_size: int) -> float:
    """Blocks beyond today's that are needed at the worst moment, if each sequence ends when it likely does.

    The need rises while sequences grow and falls when one ends, so the worst moment is just before one of the ends (the
    idea of Past-Future scheduling, ASPLOS 2025).

    Args:
        num_tokens: [B] so far; num_left: [B] still to come; freed: [B] blocks that each gives back at once at its end.
    """
    order = np.argsort(num_left, kind="stable")
    num_tokens, num_left, freed = num_tokens[order], num_left[order], freed[order]
    held = -(-num_tokens // block_size)
    own = num_tokens / block_size + 0.5 - held  # [B] growth is own + left / size: on average half a block is unused
    own_of_longer = np.cumsum(own[::-1])[::-1]  # [B] over those that are there at each one's end
    num_there = np.arange(len(order), 0, -1)
    gone = np.cumsum(freed) - freed
    return float((own_of_longer + num_there * num_left / block_size - gone).max())
