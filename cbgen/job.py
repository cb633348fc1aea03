"""The rows in flight, between the feed, the engine and the writer: `Job`.

Enters: prompts (or rows with errors) from the feed. Leaves: one record per row, to the writer, when the last of its
samples has ended. Knows how a generation becomes text; nothing here decides when to stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbgen.data.detokenizer import Detokenizer, StopStringMatcher, is_tokenizer_error
from cbgen.data.feed import PromptFeed, memory_of
from cbgen.engine.waiting import ROWS_PER_SLOT
from cbgen.errors import RowError, RowFailure
from cbgen.output.formats import RecordFormat
from cbgen.output.retry import RetryWriter
from cbgen.output.writers import OrderedWriter
from cbgen.params import SamplingParams
from cbgen.records import Completion, Generation, Prompt, Row, Sample
from cbgen.report.progress import Snapshot

if TYPE_CHECKING:
    from cbgen.engine.engine import Engine

_GATHERING_SECONDS = 0.05
_MOST_BYTES = 64 << 20  # of rows in flight, beyond those that the slots need
_MOST_STRAIGHT = 256  # rows without work for the engine that are taken in one go
_ENGINE_ERRORS = {
    "nan_logits": "the model's logits for this row are NaN or infinite; try --dtype float32, or look at the prompt",
    "kv_never_fits": "the row needs more KV cache than there is; raise --kv-cache-memory or lower max_tokens",
    "out_of_memory": "memory ran out with no other row in the step; lower --kv-cache-memory, or shorten the row",
    "engine_error": "the model failed on this row, while others went well",
}


@dataclass(frozen=True, slots=True)
class Serving:
    """A loaded model: what turns text into ids and back, and what generates token ids."""

    tokenizer: Any
    engine: Engine


@dataclass(slots=True)
class _InFlight:
    """A row in the engine. `samples` fill as they end, in any order."""

    prompt: Prompt
    matchers: list[StopStringMatcher | None]
    samples: list[Sample | None]
    num_bytes: int
    num_tokens: int = 0
    num_cached_tokens: int = 0


class Job:
    """The rows in flight, between the feed, the engine and the writer.

    Args:
        serving: the loaded model.
        record_format: what a record looks like.
        on_error: told of each row that failed.
        stops_at_errors: whether a failed row may end the run.

    Attributes:
        writer: takes the records; set before the first row.
    """

    def __init__(
        self,
        serving: Serving,
        record_format: RecordFormat,
        on_error: Callable[[Row, RowError], None],
        *,
        stops_at_errors: bool = False,
    ) -> None:
        self.engine = serving.engine
        self.writer: OrderedWriter | RetryWriter
        self.on_error = on_error
        self.stops_at_errors = stops_at_errors
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.num_errors = 0
        self._detokenizer = Detokenizer(serving.tokenizer)
        self._special_token_ids = _special_token_ids(serving.tokenizer)
        self._format = record_format
        self._window = ROWS_PER_SLOT * serving.engine.limits.max_num_seqs
        self._in_flight: dict[int, _InFlight] = {}
        self._num_bytes = 0  # of the rows in it
        self._gathers_until: float | None = None  # from the first row on

    def admit(self, feed: PromptFeed) -> None:
        """Move prompts from the feed into the engine's queue while both have room; failed rows go straight out.

        Of rows that need no engine only a few are taken at a time, and after one that failed none when the run may be
        ended by it: a million of them in succession must neither pile up in memory nor keep the run from its rules.
        """
        num_straight = 0
        while self._wants_more() and num_straight < _MOST_STRAIGHT:
            item = feed.peek(wait=not self.engine.has_unfinished or self._is_gathering())
            if item is None:
                return
            row = item.row if isinstance(item, Prompt) else item
            if row.index - self.writer.head >= self._window:
                return
            feed.take()
            if self.writer.recovered(row):
                num_straight += 1
            elif isinstance(item, Prompt):
                self._add(item)
            else:
                assert row.error is not None
                self._put(row, row.error)
                num_straight += _MOST_STRAIGHT if self.stops_at_errors else 1

    def _wants_more(self) -> bool:
        """Whether the engine does; large rows are held only as far as its slots need them."""
        engine = self.engine
        return engine.wants_more and (self._num_bytes < _MOST_BYTES or engine.num_waiting < engine.limits.max_num_seqs)

    def _is_gathering(self) -> bool:
        """Whether the first rows are still young: with a few more there is something to choose from for the slots."""
        now = time.monotonic()
        if self._gathers_until is None:
            self._gathers_until = now + _GATHERING_SECONDS
        return now < self._gathers_until

    def _add(self, prompt: Prompt) -> None:
        row, params, special_ids = prompt.row, prompt.params, self._special_token_ids
        matchers = [self._matcher(prompt) for _ in range(params.n)]
        size = memory_of(row.columns)
        self._num_bytes += size
        self._in_flight[row.index] = _InFlight(prompt, matchers, [None] * params.n, size)
        self.num_prompt_tokens += len(prompt.token_ids)
        stops = (special_ids[stop] for stop in params.stop if stop in special_ids)
        # A tokenizer may know more tokens than the model can ever choose.
        stop_token_ids = frozenset(token_id for token_id in stops if token_id < self.engine.vocab_size)
        # A row with a seed of its own answers alike wherever it stands; the run's seed gives each row a stream.
        stream = 0 if prompt.own_seed else row.index + 1
        for sample, matcher in enumerate(matchers):
            refused = self.engine.add(
                row.index,
                prompt.token_ids,
                params,
                random_stream=(params.seed, stream, sample),
                stop_token_ids=stop_token_ids,
                stop_on_text=matcher,
            )
            if refused is not None:
                self.finish(refused)
                return

    def _matcher(self, prompt: Prompt) -> StopStringMatcher | None:
        params = prompt.params
        stops = tuple(stop for stop in params.stop if stop not in self._special_token_ids)
        if not stops:
            return None
        return StopStringMatcher(
            self._detokenizer,
            prompt.token_ids,
            stops,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
        )

    def finish(self, generation: Generation) -> None:
        """Turn a generation into text; make the row safe when this was its last sample, or failed."""
        self.num_completion_tokens += len(generation.token_ids)
        state = self._in_flight.get(generation.index)
        if state is None:
            return  # another sample of the row failed before
        outcome: Completion | RowError | None
        try:
            state.samples[generation.sample] = self._sample(state, generation)
            state.num_tokens += len(generation.token_ids)
            if generation.sample == 0:
                state.num_cached_tokens = generation.cached_tokens
            outcome = _completion(state)
        except RowFailure as failure:
            outcome = failure.error
        if outcome is not None:
            del self._in_flight[generation.index]
            self._num_bytes -= state.num_bytes
            self._put(state.prompt.row, outcome)

    def _sample(self, state: _InFlight, generation: Generation) -> Sample:
        reason, place, matcher = generation.finish_reason, state.prompt.row.place, state.matchers[generation.sample]
        if reason in _ENGINE_ERRORS:
            detail = f" ({generation.detail})" if generation.detail else ""
            raise RowFailure(reason, f"{place}: {_ENGINE_ERRORS[reason]}{detail}")
        try:
            if matcher is not None and matcher.failure is not None:
                raise matcher.failure
            text = self._text(state.prompt, matcher, generation)
        except BaseException as error:
            if not is_tokenizer_error(error):
                raise
            raise RowFailure("tokenizer_error", f"{place}: the tokenizer cannot decode the answer ({error})") from error
        # Held until the row's last sample has ended, so no more than the record shows.
        kept = generation.token_ids if self._format.config.token_ids else []
        state.matchers[generation.sample] = None
        return Sample(text, reason, kept)

    def _text(self, prompt: Prompt, matcher: StopStringMatcher | None, generation: Generation) -> str:
        params, token_ids = prompt.params, generation.token_ids
        end = matcher.end if matcher else None
        stop = ""
        if generation.finish_reason == "stop" and end is None:  # the token that ended the text is no part of it
            stop = self._stop_string(params, token_ids[-1]) if params.include_stop else ""
            token_ids = token_ids[:-1]
        text = self._detokenizer.text(prompt.token_ids, token_ids, skip_special_tokens=params.skip_special_tokens)
        return text[:end] + stop

    def _stop_string(self, params: SamplingParams, token_id: int) -> str:
        """The stop string that is this special token; empty when none is."""
        return next((stop for stop in params.stop if self._special_token_ids.get(stop) == token_id), "")

    def _put(self, row: Row, outcome: Completion | RowError) -> None:
        if isinstance(outcome, RowError):
            self.num_errors += 1
            self.on_error(row, outcome)
        self.writer.put(row, self._format.record(row, outcome))

    def snapshot(self, fraction: float | None) -> Snapshot:
        """The run at this moment; `fraction` of the input is in the output."""
        engine, writer = self.engine, self.writer
        return Snapshot(
            rows=writer.num_finished,
            errors=self.num_errors,
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=engine.stats.num_sampled_tokens,
            running=engine.num_running,
            waiting=engine.num_waiting,
            kv_usage=engine.kv_usage,
            head=writer.head,
            fraction=fraction,
        )


def _completion(state: _InFlight) -> Completion | None:
    """The finished row; None while samples are missing."""
    samples = [sample for sample in state.samples if sample is not None]
    if len(samples) < len(state.samples):
        return None
    first, *further = samples
    num_prompt = len(state.prompt.token_ids)
    return Completion(
        first.text,
        first.finish_reason,
        num_prompt,
        state.num_tokens,
        first.token_ids,
        further,
        num_cached_tokens=state.num_cached_tokens,
    )


def _special_token_ids(tokenizer: Any) -> dict[str, int]:
    """Special tokens by their text: as stop strings they are matched by id, since text has them removed."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: token_id for token_id, token in added.items() if token.special}
