"""One generation, `Sequence`, and the arrays that hold the state of those in a slot, `SequenceTable`.

A `Sequence` enters through `Scheduler.add` with prompt token ids and leaves when `finish_reason` is set. While it is in
a slot its tokens and counters are one row of the table, so that a step over hundreds of them is a few numpy calls;
before and after they are its own. Either way it is read through its properties. Changed by the `Scheduler` alone.
Knows nothing of text, files or devices.

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
Int64Array = npt.NDArray[np.int64]

_LARGEST_INT32 = 2**31 - 1
_FEW_STOPS = 16  # rows with more stop ids than this look theirs up in a set


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
        index: row index.
        prompt_token_ids: [prompt length] int32.
        max_total_tokens: prompt plus output may not exceed this (context or max_tokens, whichever ends first).
        stop_token_ids: ids that end the sequence (EOS ids included unless `ignore_eos`).
        stop_on_text: called with each new token id; True ends the sequence. The engine never sees the text; whoever
            adds the sequence knows how to decode it, and looks after `min_tokens`.
        random_stream: (seed, stream, sample): with the token position, all that a random draw depends on, see
            `cbgen.engine.sampling_input.uniforms`.
        arrival: how many sequences were added before it.
        block_hashes: of each full block of its prompt, and once it was preempted of its output; see `BlockManager`.
        slot: place in the running set, 0 <= slot < max_num_seqs, or -1 while waiting.
        num_cached_tokens: prompt tokens whose KV was there when it was first admitted.
        num_lost_tokens: computed before it was preempted last.
    """

    index: int
    prompt_token_ids: TokenIds
    params: SamplingParams
    max_total_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    stop_on_text: Callable[[int], bool] | None = None
    random_stream: tuple[int, int, int] = (0, 0, 0)

    arrival: int = -1
    block_hashes: list[bytes] = field(default_factory=list)
    slot: int = -1
    num_cached_tokens: int = 0
    num_lost_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    _table: SequenceTable | None = None  # while in a slot
    _output: list[int] = field(default_factory=list)  # otherwise

    @property
    def sample(self) -> int:
        """Which of the row's samples this is."""
        return self.random_stream[2]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        if self._table is not None:
            return int(self._table.num_tokens[self.slot])
        return len(self.prompt_token_ids) + len(self._output)

    @property
    def num_computed_tokens(self) -> int:
        """Positions whose KV is in the cache; none while it is in no slot."""
        return int(self._table.num_computed_tokens[self.slot]) if self._table is not None else 0

    @property
    def output_token_ids(self) -> list[int]:
        if self._table is not None:
            num_known = self._table.num_known_tokens(self.slot)
            output: list[int] = self._table.token_ids[self.slot, len(self.prompt_token_ids) : num_known].tolist()
            return output
        return self._output

    @output_token_ids.setter
    def output_token_ids(self, token_ids: list[int]) -> None:
        assert self._table is None
        self._output = token_ids

    @property
    def has_known_length(self) -> bool:
        """Whether nothing but `max_total_tokens` can end it."""
        return not self.stop_token_ids and self.stop_on_text is None

    def append_late(self, token_id: int) -> FinishReason | None:
        """Add a token that was computed while the sequence had a slot, which it has left; the reason if that ends it.

        The rules are those of `SequenceTable.append`.
        """
        assert self._table is None
        if token_id < 0:
            return FinishReason.NAN_LOGITS
        self._output.append(token_id)
        is_stop = self.stop_on_text is not None and self.stop_on_text(token_id)
        if is_stop or (token_id in self.stop_token_ids and len(self._output) > self.params.min_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.max_total_tokens else None

    def tokens_between(self, start: int, stop: int) -> TokenIds:
        """Token ids at positions start..stop-1, prompt and output seen as one. [stop - start] int32"""
        if self._table is not None:
            return self._table.token_ids[self.slot, start:stop].copy()
        num_prompt = len(self.prompt_token_ids)
        output = np.array(self._output[max(start - num_prompt, 0) : max(stop - num_prompt, 0)], dtype=np.int32)
        return np.concatenate([self.prompt_token_ids[start:stop], output])


class SequenceTable:
    """State of the sequences in a slot: one row of each array per slot, N = max_num_seqs.

    Attributes:
        sequences: the sequence in each slot, or None.
        token_ids: [N, max_model_len] int32, prompt and output; what lies past `num_tokens` is stale.
        num_tokens, num_computed_tokens: [N] int64, 0 in an empty slot.
        num_pending_tokens: [N] int64, the last so many of `num_tokens` are being sampled: their ids are not known yet.
        num_prompt_tokens, max_total_tokens: [N] int64.
        likely_total_tokens: [N] int64, the length that memory is reserved for.
        min_total_tokens: [N] int64, stop ids count only in sequences longer than this.
        stop_token_ids: [N, most of any sequence] int64, padded with -1.
        temperature, top_k, top_p, min_p, random_words: [N], [N, 4] as in `SamplingInput`, the position apart.
        repetition_penalty: [N] float32, 1 for none.
        is_edited: [N] bool, the logits of each new token are edited (repetition penalty, biases).
        is_host_sampled: [N] bool, a device cannot choose its tokens by itself (biases, very many stop ids).
        is_watched: [N] bool, each new token needs a look of its own (text stops, very many stop ids).
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self.token_ids: TokenIds = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)  # pages come when touched
        self.num_tokens, self.num_computed_tokens, self.num_prompt_tokens = _columns(max_num_seqs, 3)
        self.max_total_tokens, self.likely_total_tokens, self.min_total_tokens = _columns(max_num_seqs, 3)
        (self.num_pending_tokens,) = _columns(max_num_seqs, 1)
        self.stop_token_ids: Int64Array = np.full((max_num_seqs, 1), -1, dtype=np.int64)
        self.temperature, self.top_p, self.min_p, self.repetition_penalty = (
            np.zeros(max_num_seqs, dtype=np.float32) for _ in range(4)
        )
        self.top_k: npt.NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self.random_words: npt.NDArray[np.uint64] = np.zeros((max_num_seqs, 4), dtype=np.uint64)
        self.is_edited, self.is_host_sampled, self.is_watched = (
            np.zeros(max_num_seqs, dtype=np.bool_) for _ in range(3)
        )

    def num_known_tokens(self, slot: int) -> int:
        """Tokens of a slot whose ids are known."""
        return int(self.num_tokens[slot] - self.num_pending_tokens[slot])

    def enter(self, slot: int, sequence: Sequence, num_computed_tokens: int, likely_total_tokens: int) -> None:
        """Move a sequence into an empty slot."""
        num_prompt, num_tokens = sequence.num_prompt_tokens, sequence.num_tokens
        self.token_ids[slot, :num_prompt] = sequence.prompt_token_ids
        self.token_ids[slot, num_prompt:num_tokens] = sequence.output_token_ids
        self.num_tokens[slot] = num_tokens
        self.num_computed_tokens[slot] = num_computed_tokens
        self.num_prompt_tokens[slot] = num_prompt
        self.max_total_tokens[slot] = sequence.max_total_tokens
        self.likely_total_tokens[slot] = likely_total_tokens
        self.min_total_tokens[slot] = num_prompt + sequence.params.min_tokens
        stops = sorted(sequence.stop_token_ids) if len(sequence.stop_token_ids) <= _FEW_STOPS else []
        if len(stops) > self.stop_token_ids.shape[1]:
            wider = np.full((len(self.sequences), len(stops)), -1, dtype=np.int64)
            wider[:, : self.stop_token_ids.shape[1]] = self.stop_token_ids
            self.stop_token_ids = wider
        self.stop_token_ids[slot] = -1
        self.stop_token_ids[slot, : len(stops)] = stops
        self.is_watched[slot] = sequence.stop_on_text is not None or len(sequence.stop_token_ids) > _FEW_STOPS
        self._enter_sampling(slot, sequence)
        self.sequences[slot] = sequence
        sequence.slot, sequence._table = slot, self

    def _enter_sampling(self, slot: int, sequence: Sequence) -> None:
        params = sequence.params
        self.temperature[slot] = 0 if params.is_greedy else params.temperature
        self.top_k[slot] = min(params.top_k, _LARGEST_INT32)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.random_words[slot, :3] = sequence.random_stream
        self.repetition_penalty[slot] = params.repetition_penalty
        self.is_edited[slot] = params.repetition_penalty != 1 or bool(params.logit_bias)
        has_many_stops = len(sequence.stop_token_ids) > _FEW_STOPS
        self.is_host_sampled[slot] = bool(params.logit_bias) or (has_many_stops and params.min_tokens > 0)

    def leave(self, slot: int) -> Sequence:
        """Empty a slot; the sequence takes its output along."""
        sequence = self.sequences[slot]
        assert sequence is not None
        output = sequence.output_token_ids
        sequence.slot, sequence._table = -1, None
        sequence.output_token_ids = output
        self.sequences[slot] = None
        self.num_tokens[slot] = self.num_computed_tokens[slot] = self.num_pending_tokens[slot] = 0
        return sequence

    def append(self, slots: Int64Array, token_ids: Int64Array) -> dict[int, FinishReason]:
        """Add one sampled token to each of the slots; where tokens are pending, it is the first of these.

        Args:
            slots: [S] int64.
            token_ids: [S] int64; below 0 where there was none to sample, which ends the sequence.

        Returns:
            Position in `slots` and reason of each sequence that has ended, in order.
        """
        is_sound = token_ids >= 0
        num_pending = self.num_pending_tokens[slots]
        num_tokens = self.num_tokens[slots] - num_pending  # [S] of known ids
        self.token_ids[slots[is_sound], num_tokens[is_sound]] = token_ids[is_sound]
        num_tokens += is_sound
        num_pending = np.maximum(num_pending - 1, 0)
        self.num_tokens[slots] = num_tokens + num_pending
        self.num_pending_tokens[slots] = num_pending
        stops = (self.stop_token_ids[slots] == token_ids[:, None]).any(axis=1) & (token_ids >= 0)
        stops &= num_tokens > self.min_total_tokens[slots]
        for position in np.flatnonzero(self.is_watched[slots] & is_sound).tolist():
            stops[position] |= self._stops(int(slots[position]), int(token_ids[position]))
        is_full = num_tokens >= self.max_total_tokens[slots]
        ended = {}
        for position in np.flatnonzero(stops | is_full | ~is_sound).tolist():
            reason = FinishReason.STOP if stops[position] else FinishReason.LENGTH
            ended[position] = reason if is_sound[position] else FinishReason.NAN_LOGITS
        return ended

    def _stops(self, slot: int, token_id: int) -> bool:
        """Whether the token just added ends a sequence that is watched."""
        sequence = self.sequences[slot]
        assert sequence is not None
        if sequence.stop_on_text is not None and sequence.stop_on_text(token_id):
            return True
        return token_id in sequence.stop_token_ids and self.num_known_tokens(slot) > int(self.min_total_tokens[slot])


def _columns(size: int, count: int) -> list[Int64Array]:
    return [np.zeros(size, dtype=np.int64) for _ in range(count)]
