"""The rows in flight, between the feed, the engine and the writer: `Job`.

Enters: prompts (or rows with errors) from the feed. Leaves: one record per row, to the writer. Knows how a generation
becomes text; nothing here decides when to stop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbgen.config import OutputConfig
from cbgen.data.detokenizer import Detokenizer, StopStringMatcher
from cbgen.data.feed import PromptFeed
from cbgen.data.formats import format_record
from cbgen.data.prompts import PromptBuilder
from cbgen.data.writers import OrderedWriter
from cbgen.errors import RowError
from cbgen.records import Completion, Generation, Prompt, Row
from cbgen.report.progress import Snapshot

if TYPE_CHECKING:
    from cbgen.engine.engine import Engine

_WINDOW_SLOTS = (
    32  # rows per slot that may be read ahead of the first unfinished one; fewer, and one long row starves the rest
)
_ENGINE_ERRORS = {
    "nan_logits": "the model's logits for this row are NaN or infinite; try --dtype float32, or look at the prompt",
    "kv_never_fits": "the row needs more KV cache than there is; raise --kv-cache-memory or lower max_tokens",
}


@dataclass(frozen=True, slots=True)
class Serving:
    """A loaded model: what turns text into ids and back, and what generates token ids."""

    tokenizer: Any
    engine: Engine


class Job:
    """The rows in flight, between the feed, the engine and the writer."""

    def __init__(
        self, serving: Serving, prompt_builder: PromptBuilder, writer: OrderedWriter, config: OutputConfig, model: str
    ) -> None:
        self.engine = serving.engine
        self.prompt_builder = prompt_builder
        self.writer = writer
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.num_errors = 0
        self._detokenizer = Detokenizer(serving.tokenizer)
        self._special_token_ids = _special_token_ids(serving.tokenizer)
        self._config = config
        self._model = model
        self._window = _WINDOW_SLOTS * serving.engine.limits.max_num_seqs
        self._in_flight: dict[int, tuple[Prompt, StopStringMatcher | None]] = {}

    def admit(self, feed: PromptFeed) -> None:
        """Move prompts from the feed into the engine's queue while both have room; failed rows go straight out."""
        while self.engine.wants_more:
            item = feed.peek(wait=not self.engine.has_unfinished)
            if item is None:
                return
            row = item.row if isinstance(item, Prompt) else item
            if row.index - self.writer.head >= self._window:
                return
            feed.take()
            if self.writer.recovered(row):
                continue
            if isinstance(item, Prompt):
                self._add(item)
            else:
                assert row.error is not None
                self._put(row, row.error)

    def _add(self, prompt: Prompt) -> None:
        row, params = prompt.row, prompt.params
        matcher, special_ids = None, self._special_token_ids
        stops = tuple(stop for stop in params.stop if stop not in special_ids)
        if stops:
            matcher = StopStringMatcher(
                self._detokenizer,
                prompt.token_ids,
                stops,
                min_tokens=params.min_tokens,
                include_stop=params.include_stop,
                skip_special_tokens=params.skip_special_tokens,
            )
        self._in_flight[row.index] = prompt, matcher
        self.num_prompt_tokens += len(prompt.token_ids)
        refused = self.engine.add(
            row.index,
            prompt.token_ids,
            params,
            # A row with a seed of its own answers alike wherever it stands; the run's seed gives each row a stream.
            random_stream=(params.seed, 0 if prompt.own_seed else row.index + 1, 0),
            stop_token_ids=frozenset(special_ids[stop] for stop in params.stop if stop in special_ids),
            stop_on_text=matcher,
        )
        if refused is not None:
            self.finish(refused)

    def finish(self, generation: Generation) -> None:
        """Turn a generation into text and make it safe."""
        prompt, matcher = self._in_flight.pop(generation.index)
        self.num_completion_tokens += len(generation.token_ids)
        if generation.finish_reason in _ENGINE_ERRORS:
            message = f"{prompt.row.place}: {_ENGINE_ERRORS[generation.finish_reason]}"
            self._put(prompt.row, RowError(generation.finish_reason, message))
        else:
            self._put(prompt.row, self._completion(prompt, matcher, generation))

    def _completion(self, prompt: Prompt, matcher: StopStringMatcher | None, generation: Generation) -> Completion:
        end = matcher.end if matcher else None
        token_ids = generation.token_ids
        # The token that ended the text is no part of it, unless a stop string did: then the text is cut instead.
        shown = token_ids[:-1] if generation.finish_reason == "stop" and end is None else token_ids
        text = self._detokenizer.text(prompt.token_ids, shown, skip_special_tokens=prompt.params.skip_special_tokens)
        return Completion(text[:end], generation.finish_reason, len(prompt.token_ids), len(token_ids), token_ids)

    def _put(self, row: Row, outcome: Completion | RowError) -> None:
        self.num_errors += isinstance(outcome, RowError)
        self.writer.put(row, format_record(row, outcome, self._config, self._model))

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


def _special_token_ids(tokenizer: Any) -> dict[str, int]:
    """Special tokens by their text: as stop strings they are matched by id, since text has them removed."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: token_id for token_id, token in added.items() if token.special}
