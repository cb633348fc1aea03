"""The plain data that crosses layers: rows in, prompts to the engine, completions out. No behaviour, no torch.

readers -> Row -> PromptBuilder -> Prompt -> Engine -> Generation -> Detokenizer -> Completion -> writer
             \\____________ RowError ____________________________________________________/
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cbgen.errors import RowError
from cbgen.params import SamplingParams

Form = Literal["native", "openai_chat", "openai_completion"]
"""How a row is answered: flat record, or one of the two OpenAI Batch output bodies."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a row starts in the input, so that a later run can go there.

    Attributes:
        file: index among the input files.
        offset: byte offset (JSONL; in the decompressed stream for .gz and .zst) or row number (Parquet).
        line: physical lines before it in this file (rows, for Parquet).
    """

    file: int = 0
    offset: int = 0
    line: int = 0


@dataclass(slots=True)
class Row:
    """One input row as read.

    Attributes:
        index: position among all rows of all inputs, from 0; the key that everything is matched by.
        place: how messages name it, such as `prompts.jsonl line 6`.
        columns: the row's fields; empty when `error` is set.
        checksum: CRC-32 of the row's bytes, to notice an input that changed between runs.
        next_position: where the following row starts.
    """

    index: int
    place: str
    columns: dict[str, Any]
    checksum: int
    next_position: Position
    error: RowError | None = None
    form: Form = "native"


@dataclass(slots=True)
class Prompt:
    """A row ready for the engine.

    Attributes:
        token_ids: [prompt length] int32, at most the context minus one.
        params: the run's parameters with the row's own on top; `max_tokens` clamped to the context.
    """

    row: Row
    token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    own_seed: bool = False


@dataclass(slots=True)
class Generation:
    """What the engine made of a prompt: token ids (the stop token included), and why it ended.

    Attributes:
        sample: which of the row's `n` samples this is, from 0. Of a row that failed there is only one generation.
        detail: with some reasons, what went wrong in one line.
        cached_tokens: tokens of the prompt that were not computed for it, since an earlier row began alike.
    """

    index: int
    token_ids: list[int]
    finish_reason: str
    sample: int = 0
    detail: str = ""
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to a row, as text."""

    text: str
    finish_reason: str
    token_ids: list[int]


@dataclass(slots=True)
class Completion:
    """A finished row, with text: that of its first sample, and more with `n` above 1.

    Attributes:
        num_completion_tokens: of all samples; the token that stopped each is counted, too.
        further: samples 1 to n - 1.
        num_cached_tokens: of the prompt, served from the prefix cache to the first sample.
    """

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int
    token_ids: list[int]
    further: list[Sample] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def samples(self) -> list[Sample]:
        return [Sample(self.text, self.finish_reason, self.token_ids), *self.further]


@dataclass(slots=True)
class EngineStats:
    """Counters of one engine's life. `*_seconds` are wall-clock seconds of the step's phases.

    Attributes:
        num_active: sum over steps of the sequences in a slot.
        num_queued_steps, num_queued_active: the same, only over steps while rows were still queued.
        num_recomputed_tokens: computed once more after a preemption.
        num_prompt_tokens, num_cached_tokens: of rows that got a slot, each sample counted; and how many of these were
            in the prefix cache.
        num_out_of_memory: forward passes that were given up and cut into smaller ones.
        num_discarded_tokens: computed for a row that had ended already, while the host did not know.
        graphs_off: why decode steps are not replayed as graphs, where they were meant to be.
        run_seconds: the forward pass, sampling included; `sample_seconds` is that part of it.
        admit_seconds, write_seconds: spent by the caller between steps, on taking rows in (waiting for them included,
            when nothing else is left to do) and on making texts and records of finished ones.
    """

    num_steps: int = 0
    num_active: int = 0
    num_queued_steps: int = 0
    num_queued_active: int = 0
    num_scheduled_tokens: int = 0
    num_sampled_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_out_of_memory: int = 0
    num_discarded_tokens: int = 0
    graphs_off: str = ""
    schedule_seconds: float = 0.0
    build_seconds: float = 0.0
    run_seconds: float = 0.0
    sample_seconds: float = 0.0
    update_seconds: float = 0.0
    admit_seconds: float = 0.0
    write_seconds: float = 0.0


@dataclass(slots=True)
class Tally:
    """Totals over rows, kept across resumes."""

    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())

    def add(self, error_code: str | None, prompt_tokens: int, completion_tokens: int) -> None:
        self.rows += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        if error_code is not None:
            self.errors[error_code] = self.errors.get(error_code, 0) + 1
