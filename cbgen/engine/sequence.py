"""One generation: its tokens and how far the KV cache has followed them.

A `Sequence` enters through `Scheduler.add` with prompt token ids and leaves when `finish_reason` is set. Its token
ids and counters are changed by the `Scheduler` alone; everyone else reads them. Knows nothing of text, files or
devices.

    prompt_token_ids          | output_token_ids
    [ num_computed_tokens ......... ][ to compute: prefill chunk, or the one newest token ]
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cbgen.params import SamplingParams

TokenIds = npt.NDArray[np.int32]


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # EOS, a stop token id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    NAN_LOGITS = "nan_logits"
    KV_NEVER_FITS = "kv_never_fits"
    OUT_OF_MEMORY = "out_of_memory"
    ENGINE_ERROR = "engine_error"  # the model or the sampler raised an exception


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation in flight. Identity is the object; `index` is the row it answers, with `n` samples one of several.

    Attributes:
        index: row index, also the arrival order that decides priority.
        prompt_token_ids: [prompt length] int32.
        max_total_tokens: prompt plus output may not exceed this (context or max_tokens, whichever ends first).
        stop_token_ids: ids that end the sequence (EOS ids included unless `ignore_eos`).
        stop_on_text: called with each new token id; True ends the sequence. The engine never sees the text; whoever
            adds the sequence knows how to decode it, and looks after `min_tokens`.
        random_stream: (seed, stream, sample): with the token position, all that a random draw depends on, see
            `cbgen.engine.sampling_input.uniforms`.
        slot: place in the running set, 0 <= slot < max_num_seqs, or -1 while waiting.
    """

    index: int
    prompt_token_ids: TokenIds
    params: SamplingParams
    max_total_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    stop_on_text: Callable[[int], bool] | None = None
    random_stream: tuple[int, int, int] = (0, 0, 0)

    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    slot: int = -1
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def sample(self) -> int:
        """Which of the row's samples this is."""
        return self.random_stream[2]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def expected_output_tokens(self) -> int:
        """How long this is likely to run; what the `longest` order sorts by."""
        return self.max_total_tokens - len(self.prompt_token_ids)

    def tokens_between(self, start: int, stop: int) -> TokenIds:
        """Token ids at positions start..stop-1, prompt and output seen as one. [stop - start] int32"""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        output = np.array(self.output_token_ids[max(start - num_prompt, 0) : stop - num_prompt], dtype=np.int32)
        return np.concatenate([self.prompt_token_ids[start:], output]) if start < num_prompt else output
