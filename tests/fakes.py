"""An engine without a model, for tests and benchmarks of everything around it. No torch.

`FakeEngine` has what `cbgen.job` and `cbgen.pipeline` use of `cbgen.engine.engine.Engine`: prompts are added, and each
step ends some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cbgen.params import SamplingParams
from cbgen.records import EngineStats, Generation

Answer = Callable[[npt.NDArray[np.int32], int], tuple[list[int], str]]
"""(prompt token ids, sample) -> (token ids, finish reason)"""


@dataclass(frozen=True, slots=True)
class FakeLimits:
    max_num_seqs: int
    max_model_len: int
    notices: tuple[str, ...] = ()


class FakeEngine:
    """Ends the half of its rows that came last in each step, so that rows finish out of order.

    Args:
        answer: what the model would say, before stop strings and `max_tokens` cut it.
        vocab_size: token ids are below it.
        slots: rows that may wait.
        context: the longest prompt plus output.
    """

    peak_device_memory = 0
    kv_usage = 0.0
    num_running = 0

    def __init__(self, answer: Answer, *, vocab_size: int, slots: int = 8, context: int = 64) -> None:
        self.limits = FakeLimits(slots, context)
        self.vocab_size = vocab_size
        self.stats = EngineStats()
        self.more_is_coming = False
        self._answer = answer
        self._queue: list[tuple[int, npt.NDArray[np.int32], SamplingParams, int, Any]] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._queue)

    @property
    def wants_more(self) -> bool:
        return len(self._queue) < self.limits.max_num_seqs

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def describe(self) -> dict[str, Any]:
        return {
            "batching": "continuous",
            "dtype": "float32",
            "device": "cpu",
            "attention": "none",
            "max_num_seqs": self.limits.max_num_seqs,
            "max_num_batched_tokens": 512,
            "max_model_len": self.limits.max_model_len,
            "kv_cache_bytes": 0,
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
        assert 0 < len(prompt_token_ids) < self.limits.max_model_len
        assert len(prompt_token_ids) + params.max_tokens <= self.limits.max_model_len
        assert 0 <= prompt_token_ids.min() <= prompt_token_ids.max() < self.vocab_size
        self._queue.append((index, prompt_token_ids, params, random_stream[2], stop_on_text))
        return None

    def stop_admitting(self) -> None:
        """Nothing is in a slot here that could go on."""

    def step(self) -> list[Generation]:
        size = len(self._queue) // 2
        ended, self._queue = self._queue[size:], self._queue[:size]
        self.stats.num_steps += 1
        return [self._generation(*item) for item in reversed(ended)]

    def _generation(
        self,
        index: int,
        prompt_token_ids: npt.NDArray[np.int32],
        params: SamplingParams,
        sample: int,
        stop_on_text: Callable[[int], bool] | None,
    ) -> Generation:
        token_ids, reason = self._answer(prompt_token_ids, sample)
        if len(token_ids) > params.max_tokens:
            token_ids, reason = token_ids[: params.max_tokens], "length"
        if stop_on_text is not None:
            for size, token_id in enumerate(token_ids, 1):
                if stop_on_text(token_id):
                    token_ids, reason = token_ids[:size], "stop"
                    break
        self.stats.num_sampled_tokens += len(token_ids)
        return Generation(index, token_ids, reason, sample)
