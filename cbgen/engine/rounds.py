"""Rounds: steps that are launched before what came of the ones before them is known to the host.

    launch(output, num_steps) -> Flight ... collect(flight) -> token ids

A round is one step with prompts in it, or several decode steps back to back. What a decode step needs is on the device
(`SlotState`); the host sends which slots take part, the tokens of prompts, sequences that are new in their slot, and
block tables that have grown. Sampled tokens go to a ring on the device, which is copied to memory of the host while the
device goes on. Nothing here waits for the device but `collect`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbgen.engine.attention.base import AttentionContext, AttentionMetadata
from cbgen.engine.block_manager import BlockManager
from cbgen.engine.cuda_graph import MOST_GRAPHS, Capture, GraphCache, StepShape, padded
from cbgen.engine.loader import LoadedModel, forward
from cbgen.engine.model_runner import ModelRunner
from cbgen.engine.operators.backend import PagedBackend
from cbgen.engine.sampling_input import random_states
from cbgen.engine.scheduler import SchedulerOutput
from cbgen.engine.sequence import Sequence, SequenceTable
from cbgen.engine.slot_state import STOP_WIDTH, SlotState, bits_of
from cbgen.engine.step_fields import StepFields, StepParts, blank_fields

Int64Array = npt.NDArray[np.int64]

_BLOCK_SIZE = 16
_GRAPHS_SHARE = 20  # one byte in so many, at most, is kept for the graphs after the first
_ROUNDS_IN_RING = 3  # one that runs, one that follows it, one that is being read


@dataclass(frozen=True, slots=True)
class Flight:
    """A round on its way.

    Attributes:
        num_steps: steps of it.
        first_row: of the ring.
        columns: [S] int64, of the ring, for each sequence that samples in the order of the step.
        landed: waits until its tokens are there.
    """

    num_steps: int
    first_row: int
    columns: Int64Array
    landed: Callable[[], None]


class RoundRunner:
    """Launches the rounds of one engine.

    Args:
        runner: its model and KV cache are used.
        block_manager: read at each launch.
        max_num_tokens: budget of a step.
        max_steps: of a round.
        capture: records steps, to replay them; None to run them as they come.

    Attributes:
        state: what the device knows of the slots.
        graphs: the recorded steps; None where each operator is launched by itself.
        forbids_sync: whether to fail where a launch waits for the device, recording apart; for tests on a GPU.
    """

    def __init__(
        self,
        runner: ModelRunner,
        block_manager: BlockManager,
        max_num_tokens: int,
        max_steps: int,
        capture: Capture | None = None,
    ) -> None:
        self._runner = runner
        self._blocks = block_manager
        self._max_steps = max_steps
        self._device = runner.loaded.device
        self._is_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        num_slots, max_blocks = block_manager.block_tables.shape
        self._max_context = max_context = max_blocks * block_manager.block_size
        trash_block, vocab_size = runner.kv_cache.trash_block, runner.loaded.vocab_size
        self.state = SlotState.empty(num_slots, max_blocks, trash_block, vocab_size, self._device)
        self.graphs = None
        if capture is not None:
            own = weakref.proxy(self)  # no cycle: graphs and their memory are gone as soon as their owner is
            self.graphs = GraphCache(
                capture,
                lambda shape: own._send_blank(shape),
                lambda shape: own._run(shape),
                num_slots,
                max_context,
            )
        self.forbids_sync = False
        largest = padded(StepShape(num_slots, num_slots, max_num_tokens, 1), max_context)
        self._ints = torch.zeros(StepFields.size(largest), dtype=torch.int64, device=self._device)
        self._arange = torch.arange(largest.num_decodes + 1, dtype=torch.int64, device=self._device)
        rows = _ROUNDS_IN_RING * max_steps
        self._ring = torch.zeros(rows, largest.num_rows, dtype=torch.int64, device=self._device)
        self._landing = torch.zeros(rows, largest.num_rows, dtype=torch.int64, pin_memory=self._is_cuda)
        self._num_rounds = 0
        self._prompt_lens: tuple[list[int], list[int]] = ([], [])  # of a step that is not recorded: ends, context
        self._on_device: list[tuple[Sequence, int] | None] = [None] * num_slots
        self._num_held: Int64Array = np.zeros(num_slots, dtype=np.int64)

    def forget(self) -> None:
        """The slots may have changed without the device: before the next round it is told all of them again."""
        self._on_device = [None] * len(self._on_device)

    def record(self, shape: StepShape) -> None:
        """Record a step that does nothing, whether it is wanted or not."""
        if self.graphs is not None:
            with self._on_stream():
                self.graphs.record(shape)

    # -- the host's side ----------------------------------------------------------------------------------------------

    def launch(self, output: SchedulerOutput, num_steps: int) -> Flight:
        """Start a round. Whether it works or not, nothing that the scheduler owns has changed afterwards.

        Args:
            output: of the scheduler: with prompts in it for one step, else for `num_steps`.
            num_steps: at most `max_steps`.
        """
        parts = StepParts.of(output, self._blocks)
        with self._on_stream():
            shape, replay = parts.shape(num_steps, self._max_context), None
            if self.graphs is not None:
                shape, replay = self.graphs.find(shape)
            first_row = self._num_rounds % _ROUNDS_IN_RING * self._max_steps
            with self._without_sync():
                self._send_slots(output)
                self._send_fields(parts.fields(shape, self.state.trash_slot, first_row, self._trash_position))
                self._prompt_lens = parts.tokens.cu_seqlens_q[1:].tolist(), parts.tokens.context_lens.tolist()
                for _ in range(num_steps):
                    if replay is None:
                        self._run(shape)
                    else:
                        replay()
                landed = self._fetch(slice(first_row, first_row + num_steps))
        self._num_rounds += 1
        return Flight(num_steps, first_row, parts.columns(shape), landed)

    def collect(self, flight: Flight) -> Int64Array:
        """Wait for a round.

        Returns:
            [num_steps, S] token ids; -1 where the logits were not sound, `NO_TOKEN` after the end of a sequence.
        """
        flight.landed()
        rows = slice(flight.first_row, flight.first_row + flight.num_steps)
        token_ids: Int64Array = self._landing[rows].numpy()[:, flight.columns]
        return token_ids

    def _send_slots(self, output: SchedulerOutput) -> None:
        """Tell the device of sequences that are new in their slot, and of block tables that have grown."""
        table, slots, held = output.table, output.slots, self._blocks.num_held
        now = [(sequence, sequence.num_preemptions) for sequence in output.sequences]
        new = [slot for slot, mark in zip(slots.tolist(), now, strict=True) if self._on_device[slot] != mark]
        changed = np.union1d(slots[held[slots] != self._num_held[slots]], np.array(new, dtype=np.int64))
        if len(changed):
            columns = int(held[changed].max())
            rows = self._send(changed)
            self.state.block_tables[rows, :columns] = self._send(self._blocks.block_tables[changed, :columns])
            self._num_held[changed] = held[changed]
        if new:
            self._send_new(table, np.array(new, dtype=np.int64))
            for slot, mark in zip(slots.tolist(), now, strict=True):
                self._on_device[slot] = mark

    def _send_new(self, table: SequenceTable, slots: Int64Array) -> None:
        """All but the block tables of some slots; each kind of number in one transfer."""
        assert not table.num_pending_tokens[slots].any(), "the last token is not known"
        num_tokens, stops = table.num_tokens[slots], table.stop_token_ids[slots, :STOP_WIDTH]
        columns: list[npt.NDArray[Any]] = [slots, table.token_ids[slots, num_tokens - 1], num_tokens]
        columns += [table.num_prompt_tokens[slots]]
        columns += [table.max_total_tokens[slots], table.min_total_tokens[slots], table.top_k[slots]]
        columns += [random_states(table.random_words[slots, :3]).view(np.int64)]
        ints = self._send(np.stack([*columns, *stops.T], axis=1).astype(np.int64))  # [n, 8 + stops]
        parameters = [table.temperature, table.top_p, table.min_p, table.repetition_penalty]
        floats = self._send(np.stack([column[slots] for column in parameters], axis=1))  # [n, 4]
        state, rows = self.state, ints[:, 0]
        targets = [state.last_token, state.num_tokens, state.num_prompt_tokens]
        targets += [state.max_total_tokens, state.min_total_tokens, state.top_k, state.random_state]
        for column, target in enumerate(targets, start=1):
            target.index_copy_(0, rows, ints[:, column].to(target.dtype))
        for column, target in enumerate([state.temperature, state.top_p, state.min_p, state.repetition_penalty]):
            target.index_copy_(0, rows, floats[:, column])
        state.is_done.index_fill_(0, rows, False)
        state.stop_token_ids.index_fill_(0, rows, -1)
        state.stop_token_ids[rows, : stops.shape[1]] = ints[:, 8:]
        penalized = slots[table.repetition_penalty[slots] != 1]
        if len(penalized):
            tokens = [table.token_ids[slot, : table.num_tokens[slot]] for slot in penalized.tolist()]
            bits = np.stack([bits_of(token_ids, self._runner.loaded.vocab_size) for token_ids in tokens])
            state.seen_tokens.index_copy_(0, self._send(penalized), self._send(bits))

    def _send_blank(self, shape: StepShape) -> None:
        self._prompt_lens = [], []
        self._send_fields(blank_fields(shape, self.state.trash_slot, self._trash_position))

    def _send_fields(self, fields: Int64Array) -> None:
        self._ints[: len(fields)].copy_(self._pinned(fields), non_blocking=True)

    def _send(self, array: npt.NDArray[Any]) -> Tensor:
        """A copy on the device."""
        return self._pinned(array).to(self._device, non_blocking=True)

    def _pinned(self, array: npt.NDArray[Any]) -> Tensor:
        """Where a transfer can begin at once; torch's cache of pinned memory keeps it until the transfer is over."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory() if self._is_cuda else tensor

    def _fetch(self, rows: slice) -> Callable[[], None]:
        """Begin to copy rows of the ring to the host, whole ones: torch waits for a copy that is not contiguous.

        Returns:
            What waits for it.
        """
        self._landing[rows].copy_(self._ring[rows], non_blocking=True)
        if not self._is_cuda:
            return _nothing
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize

    @property
    def _trash_position(self) -> int:
        """Where the trash slot's KV goes, flat."""
        return self._runner.kv_cache.trash_block * self._blocks.block_size

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """After all that the default stream was given."""
        if self._stream is None:
            yield
            return
        plain_stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(plain_stream)
        try:
            with torch.cuda.stream(self._stream):
                yield
        except BaseException:  # what was launched before it failed still runs, and the same step is done there next
            plain_stream.wait_stream(self._stream)
            raise

    @contextlib.contextmanager
    def _without_sync(self) -> Iterator[None]:
        if not self.forbids_sync or not self._is_cuda:
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    # -- the device's side --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self, shape: StepShape) -> None:
        """One step on what the static buffers hold: from the slots' state to the slots' state. Captured in graphs."""
        state, loaded, operators = self.state, self._runner.loaded, self._runner.operators
        block_size, num_decodes = self._blocks.block_size, shape.num_decodes
        fields = StepFields.of(self._ints, shape)
        num_columns = -(-shape.max_context_len // block_size)
        step = operators.gather_step(state, fields.slots, num_columns, block_size)
        input_ids, positions, slot_mapping = step.input_ids, step.positions, step.slot_mapping
        context_lens, block_tables, sampled_slots = step.context_lens, step.block_tables, step.slots
        query_starts = self._arange[: num_decodes + 1]
        logits_indices = self._arange[:num_decodes]
        if shape.num_prefills:
            input_ids = torch.cat([input_ids, fields.input_ids])
            positions = torch.cat([positions, fields.positions])
            slot_mapping = torch.cat([slot_mapping, fields.slot_mapping])
            context_lens = torch.cat([context_lens, fields.context_lens.int()])
            block_tables = torch.cat([block_tables, state.block_tables[fields.prefill_slots, :num_columns]])
            sampled_slots = torch.cat([sampled_slots, fields.sampled_slots])
            query_starts = torch.cat([query_starts, fields.query_ends + num_decodes])
            logits_indices = torch.cat([logits_indices, fields.logits_indices])
        metadata = AttentionMetadata(
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            context_lens=context_lens,
            cu_seqlens_q=query_starts.int(),
            num_decodes=num_decodes,
            max_context_len=shape.max_context_len,
            query_starts=[*range(num_decodes + 1), *(num_decodes + end for end in self._prompt_lens[0])],
            host_context_lens=[0] * num_decodes + self._prompt_lens[1],  # those of decodes are not known here
        )
        context = AttentionContext(PagedBackend(operators, self._runner.kv_cache, metadata), loaded.windows)
        logits = forward(loaded.model, input_ids, positions, logits_indices, context)
        token_ids = self._sample(logits, sampled_slots)
        operators.advance(state, sampled_slots, token_ids, self._ring, fields.cursor)

    def _sample(self, logits: Tensor, slots: Tensor) -> Tensor:
        """[S] int64 from [S, vocab_size] for as many slots."""
        operators = self._runner.operators
        return operators.sample(logits, *operators.gather_sampling(self.state, slots))


def graph_bytes(
    loaded: LoadedModel, capture: Capture, num_tokens: int, num_seqs: int, free_bytes: Callable[[], int]
) -> int:
    """Memory that the graphs of a run may take, from recording three of its steps on a KV cache of one block.

    Args:
        loaded: the model.
        capture: records steps.
        num_tokens, num_seqs: of the run's largest step.
        free_bytes: free memory of the device, now.
    """
    blocks = BlockManager(1, _BLOCK_SIZE, num_seqs, _BLOCK_SIZE)
    sizes = [free_bytes()]
    rounds = RoundRunner(ModelRunner(loaded, 1, _BLOCK_SIZE), blocks, num_tokens, 1, capture)
    with_prompts = StepShape(
        num_seqs, 1, max(num_tokens - num_seqs, 1), _BLOCK_SIZE
    )  # first: the others find room in it
    for shape in (with_prompts, StepShape(num_seqs), StepShape(max(num_seqs // 2, 1))):
        rounds.record(dataclasses.replace(shape, max_context_len=_BLOCK_SIZE))
        sizes.append(free_bytes())
    first, *further = (max(before - after, 0) for before, after in itertools.pairwise(sizes))
    # Recording stops when memory is short, so not every graph that may be wanted has to have a place.
    return first + min((MOST_GRAPHS - 1) * max(further), sizes[0] // _GRAPHS_SHARE)


def _nothing() -> None:
    """There is nothing to wait for."""
