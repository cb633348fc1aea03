"""The engine: prompts in, token ids out, one step at a time. Joins scheduler and model runner, and does nothing else.

    add() ... step() -> finished generations, while has_unfinished

A step is: schedule -> build input -> run -> update. On a device that keeps the state of its slots, these overlap: a
round of steps is launched while the one before it runs, and its tokens are looked at when they have come (`Rounds`).
What a device cannot do by itself is run as a step. A step that fails is run again in parts, so that one row's failure
stays its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cbgen.config import EngineConfig
from cbgen.engine.block_manager import BlockManager
from cbgen.engine.containment import Failure, RowsInSuccession, TokenLimit, judge, short_memory_named
from cbgen.engine.cuda_graph import Capture, CudaCapture
from cbgen.engine.limits import Limits, choose_limits
from cbgen.engine.loader import LoadedModel
from cbgen.engine.machine_probe import free_device_memory, release_cached_memory
from cbgen.engine.model_input import build_model_input
from cbgen.engine.model_runner import ModelRunner
from cbgen.engine.rounds import Flight, RoundRunner, graph_bytes
from cbgen.engine.scheduler import Launched, Scheduler, SchedulerConfig, SchedulerOutput
from cbgen.engine.sequence import FinishReason, Sequence
from cbgen.engine.waiting import ROWS_PER_SLOT, Order
from cbgen.errors import CbgenError
from cbgen.params import SamplingParams
from cbgen.records import EngineStats, Generation

_DECODE_STEPS = {"cuda": 4}  # on CPU there is no host to wait for
_MOST_WAITING_TOKENS = 1 << 21  # prompt tokens in the queue: with what belongs to them, some tens of megabytes


class Engine:
    """Continuous batching over one loaded model.

    Args:
        loaded: from `prepare`.
        config: limits and policies.
        capture: records steps in place of CUDA graphs; for tests.

    Attributes:
        limits: resolved sizes.
        stats: counters since construction.
        more_is_coming: set by the caller while its queue of prompts is not empty; only statistics look at it.
        rounds: launches steps ahead of their results; None where each step is waited for.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, *, capture: Capture | None = None) -> None:
        decode_steps = _DECODE_STEPS.get(loaded.device.type, 0) if config.decode_steps is None else config.decode_steps
        if capture is None and decode_steps and _can_record(loaded, config):
            capture = CudaCapture()
        self.limits: Limits = choose_limits(loaded, config, graph_bytes=_graph_bytes(loaded, capture))
        self.stats = EngineStats()
        self.more_is_coming = False
        self._loaded = loaded
        self._config = config
        # The baseline is what static batching is elsewhere: batches in the order of the file.
        self._order: Order = "file" if config.batching == "static" and config.order == "auto" else config.order
        limits = self.limits
        self._blocks = BlockManager(
            limits.num_blocks,
            limits.block_size,
            limits.max_num_seqs,
            limits.max_model_len,
            prefix_cache="prefix-cache" not in config.disabled,
        )
        scheduler_config = SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            batching=config.batching,
            order=self._order,
            mixed="mixed" not in config.disabled,
            prediction="prediction" not in config.disabled,
        )
        self._scheduler = Scheduler(scheduler_config, self._blocks)
        with short_memory_named("no memory for the KV cache: lower --kv-cache-memory or --max-num-seqs, or free some"):
            self._runner = ModelRunner(loaded, limits.num_blocks, limits.block_size)
        self._token_limit = TokenLimit(limits.max_num_batched_tokens)
        self._rows_in_succession = RowsInSuccession()
        # Two rounds may be on their way, so that a row that stops costs at most decode_steps - 1 steps of its slot.
        self._steps_per_round = max(decode_steps // 2, 1)
        self._most_in_flight = 1 if decode_steps > 1 else 0
        self._in_flight: deque[tuple[Flight, Launched]] = deque()
        self.rounds: RoundRunner | None = None
        is_plain = loaded.device.type == "cuda" and not loaded.operators.is_capturable
        self._graphs_off = "operators in plain torch wait for the device" if is_plain else ""
        if decode_steps:
            budget = limits.max_num_batched_tokens
            self.rounds = RoundRunner(self._runner, self._blocks, budget, self._steps_per_round, capture)

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished or bool(self._in_flight)

    @property
    def wants_more(self) -> bool:
        """Whether the queue is shorter than the window in which rows may change places, or than the slots at least."""
        num_waiting, num_slots = self._scheduler.num_waiting, self.limits.max_num_seqs
        if num_waiting < num_slots:
            return True
        return num_waiting < ROWS_PER_SLOT * num_slots and self._scheduler.num_waiting_tokens < _MOST_WAITING_TOKENS

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running + self._scheduler.num_leaving

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""
        return 1 - self._blocks.num_free_blocks / self.limits.num_blocks

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._loaded.vocab_size

    @property
    def peak_device_memory(self) -> int:
        """Bytes of device memory that were in use at most; 0 on CPU, where it is the process's own."""
        device = self._loaded.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0

    def describe(self) -> dict[str, Any]:
        """Settings in force, for people and for the summary."""
        limits = self.limits
        return {
            "batching": self._config.batching,
            "order": self._order,
            "prefix_cache": self._blocks.has_prefix_cache,
            "dtype": str(self._loaded.dtype).removeprefix("torch."),
            "device": str(self._loaded.device),
            "operators": self._loaded.operators.name,
            "packing": self._loaded.packing,
            "decode_steps": self._steps_per_round * (1 + self._most_in_flight) if self.rounds is not None else 0,
            "graphs": self.rounds is not None and self.rounds.graphs is not None,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len,
            "block_size": limits.block_size,
            "num_blocks": limits.num_blocks,
            "kv_cache_bytes": limits.kv_cache_bytes,
        }

    def add(
        self,
        index: int,
        prompt_token_ids: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        random_stream: tuple[int, int, int] = (0, 0, 0),
        stop_token_ids: frozenset[int] = frozenset(),
        stop_on_text: Callable[[int], bool] | None = None,
    ) -> Generation | None:
        """Queue one sample of a prompt; a row with `n` above 1 is added so many times, each with its own stream.

        Args:
            index: row index; comes back in the `Generation`.
            prompt_token_ids: [prompt length] int32, at least one.
            params: checked parameters.
            random_stream: (seed, stream, sample) of its random numbers; `sample` comes back, too.
            stop_token_ids: ids that end this row, beside those in `params` and the model's EOS ids.
            stop_on_text: see `Sequence.stop_on_text`.

        Returns:
            None, or at once the generation of a row that could never run (`kv_never_fits`).
        """
        stops = stop_token_ids | frozenset(params.stop_token_ids)
        sequence = Sequence(
            index=index,
            prompt_token_ids=prompt_token_ids,
            params=params,
            max_total_tokens=min(len(prompt_token_ids) + params.max_tokens, self.limits.max_model_len),
            stop_token_ids=stops if params.ignore_eos else stops | self._loaded.eos_token_ids,
            stop_on_text=stop_on_text,
            random_stream=random_stream,
        )
        return None if self._scheduler.add(sequence) else _generation(sequence)

    def stop_admitting(self) -> None:
        """Only rows in a slot go on; what waits stays where it is."""
        self._scheduler.admits = False

    def check_integrity(self) -> None:
        """Scheduler and blocks agree; for tests."""
        self._scheduler.check_integrity()

    def step(self) -> list[Generation]:
        """Every running sequence one token or chunk further, or several tokens. Returns the generations that ended.

        Raises:
            CbgenError: the device is broken, or the model fails on every row.
        """
        stats, num_steps = self.stats, self._steps_per_round
        ended = self._settle(0) if self._in_flight and self._scheduler.lacks_blocks(num_steps) else []
        if not self._scheduler.has_unfinished:
            return ended + self._settle(0)
        started = time.perf_counter()
        if num_steps > 1 and self._scheduler.lacks_blocks(num_steps):
            num_steps = 1
        output = self._scheduler.schedule(num_steps)
        stats.schedule_seconds += time.perf_counter() - started
        if not output.sequences:  # what runs has to end first: its tokens are on their way
            return ended + self._settle(0)
        if not self._runs_as_round(output):
            ended += self._settle(0)
            self._count(output, 1)
            return ended + self._run(output.unfinished())
        has_prompts = output.num_decodes < len(output.sequences)
        return ended + self._run_round(output, 1 if has_prompts else min(num_steps, output.most_steps))

    def _count(self, output: SchedulerOutput, num_steps: int) -> None:
        """Statistics of what is about to run."""
        stats, num_active = self.stats, self._scheduler.num_running
        stats.num_steps += num_steps
        stats.num_active += num_active * num_steps
        if self.num_waiting or self.more_is_coming:
            stats.num_queued_steps += num_steps
            stats.num_queued_active += num_active * num_steps
        stats.num_preemptions += output.num_preempted
        stats.num_prompt_tokens += output.num_prompt_tokens
        stats.num_cached_tokens += output.num_cached_tokens
        stats.num_recomputed_tokens += output.num_recomputed_tokens

    # -- rounds: launched without knowing what came of those before ----------------------------------------------------

    def _runs_as_round(self, output: SchedulerOutput) -> bool:
        """Whether the device can do all of it by itself, and has the memory."""
        if self.rounds is None or output.num_tokens > self._token_limit.value:
            return False
        return not self._scheduler.table.is_host_sampled[output.slots].any()

    def _run_round(self, output: SchedulerOutput, num_steps: int) -> list[Generation]:
        """Launch it; returns what ended in earlier ones."""
        assert self.rounds is not None
        self._count(output, num_steps)
        started, failure = time.perf_counter(), None
        try:
            flight = self.rounds.launch(output, num_steps)
        except CbgenError:
            raise
        except Exception as error:
            failure = judge(error)
        self.stats.build_seconds += time.perf_counter() - started
        if failure is not None:  # as a step it is contained
            ended = self._settle(0)
            if failure.reason is FinishReason.OUT_OF_MEMORY:
                self.stats.num_out_of_memory += 1
                self._runner.release_memory()
            return ended + self._run(output.unfinished())
        if self.rounds.graphs is not None:
            self._graphs_off = self.rounds.graphs.reason
        self.stats.graphs_off = self._graphs_off
        num_tokens = output.num_tokens + (num_steps - 1) * len(output.sequences)
        self.stats.num_scheduled_tokens += num_tokens
        self._in_flight.append((flight, self._scheduler.launched(output, num_steps)))
        self._token_limit.step_done()
        return self._settle(self._most_in_flight)

    def _settle(self, num_left: int) -> list[Generation]:
        """Look at what came of all rounds but the last `num_left`."""
        ended: list[Generation] = []
        clock, stats = time.perf_counter, self.stats
        while self.rounds is not None and len(self._in_flight) > num_left:
            flight, launched = self._in_flight.popleft()
            started = clock()
            try:
                token_ids = self.rounds.collect(flight)
            except Exception as error:
                raise CbgenError(f"a step failed on the device: {judge(error).detail}") from error
            stats.run_seconds += clock() - started
            started = clock()
            finished, num_sampled = self._scheduler.resolve(launched, token_ids)
            ended += [self._ended(sequence) for sequence in finished]
            stats.num_sampled_tokens += num_sampled
            stats.num_discarded_tokens += token_ids.size - num_sampled
            self._rows_in_succession.step_done({}, anything_ran=True)
            stats.update_seconds += clock() - started
        return ended

    def _ended(self, sequence: Sequence) -> Generation:
        """The answer of a sequence, and the end of the row's other samples where it is no good."""
        if sequence.params.n > 1 and sequence.finish_reason is FinishReason.NAN_LOGITS:
            self._scheduler.end_row(sequence.index, FinishReason.NAN_LOGITS)
        return _generation(sequence)

    # -- steps: one after the other ------------------------------------------------------------------------------------

    def _run(self, output: SchedulerOutput) -> list[Generation]:
        """Run a step in as few parts as memory allows. What fails is cut until a single row fails, and that row ends.

        A part that failed is as if it had not begun: only `update` moves sequences on, and the KV of a token that is
        computed again is written to the same place.
        """
        if self.rounds is not None:
            self.rounds.forget()  # the tokens of this step are not on the device
        limit = self._token_limit
        pending = deque([output])
        ended: list[Generation] = []
        failed: dict[int, str] = {}
        anything_ran = False
        while pending:
            part = pending.popleft().unfinished() if ended else pending.popleft()
            if part.num_tokens > limit.value:
                pending.extendleft(reversed(part.cut(limit.value)))
                continue
            if not part.sequences:
                continue
            failure = self._run_part(part, ended)
            if failure is None:
                anything_ran = True
            elif smaller := self._smaller(part, failure):
                pending.extendleft(reversed(smaller))
            else:
                ended.append(self._end_row(part.sequences[0], failure))
                if failure.reason is FinishReason.ENGINE_ERROR:
                    failed[part.sequences[0].index] = failure.detail
        self._rows_in_succession.step_done(failed, anything_ran=anything_ran)
        limit.step_done()
        return ended

    def _run_part(self, part: SchedulerOutput, ended: list[Generation]) -> Failure | None:
        """One forward pass; what it ended is added to `ended`. Nothing has changed when it failed."""
        clock, stats, failure = time.perf_counter, self.stats, None
        started = built = clock()
        sampled = self._runner.sample_seconds
        try:
            model_input = build_model_input(part, self._blocks)
            built = clock()
            token_ids = self._runner.run(model_input)
        except CbgenError:
            raise
        except Exception as error:
            failure = judge(error)
        ran = clock()
        stats.sample_seconds += self._runner.sample_seconds - sampled
        stats.build_seconds += built - started
        stats.run_seconds += ran - built
        if failure is not None:
            if failure.reason is FinishReason.OUT_OF_MEMORY:
                stats.num_out_of_memory += 1
                self._runner.release_memory()  # here, where the exception and the tensors in its frames are gone
            return failure
        for sequence in self._scheduler.update(part, token_ids):
            ended.append(self._ended(sequence))
        stats.update_seconds += clock() - ran
        stats.num_scheduled_tokens += model_input.num_tokens
        stats.num_sampled_tokens += len(token_ids)
        return None

    def _smaller(self, part: SchedulerOutput, failure: Failure) -> list[SchedulerOutput]:
        """What to try instead of a part that failed, cut to the limit then; empty when it cannot be cut any further."""
        if failure.reason is not FinishReason.OUT_OF_MEMORY:
            return part.halves() if len(part.sequences) > 1 else []
        if part.num_tokens > 1:
            self._token_limit.halve(part.num_tokens)
            return [part]
        self._token_limit.restore()
        return []

    def _end_row(self, sequence: Sequence, failure: Failure) -> Generation:
        self._scheduler.end_row(sequence.index, failure.reason)
        return replace(_generation(sequence), detail=failure.detail)


def _can_record(loaded: LoadedModel, config: EngineConfig) -> bool:
    return loaded.device.type == "cuda" and loaded.operators.is_capturable and "graphs" not in config.disabled


def _graph_bytes(loaded: LoadedModel, capture: Capture | None) -> Callable[[int, int], int]:
    """What tells how much memory graphs will take, given the tokens and rows of the largest step."""
    device = loaded.device
    if capture is None or device.type != "cuda":
        return lambda num_tokens, num_seqs: 0

    def measured(num_tokens: int, num_seqs: int) -> int:
        # Recorded by another: its memory shall be free again before the cache takes the rest.
        taken = graph_bytes(loaded, CudaCapture(), num_tokens, num_seqs, lambda: free_device_memory(device))
        release_cached_memory(device)
        return taken

    return measured


def _generation(sequence: Sequence) -> Generation:
    assert sequence.finish_reason is not None
    return Generation(
        sequence.index,
        sequence.output_token_ids,
        sequence.finish_reason.value,
        sequence.sample,
        cached_tokens=sequence.num_cached_tokens,
    )
