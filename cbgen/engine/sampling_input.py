"""What a step's sampler has to know, as arrays over the rows that sample. numpy only.

`from_sequences` builds them one sequence at a time: short, and the twin that faster builders are tested against. Also
home of `uniforms`, the random numbers: counter-based, so that the one behind a token is a pure function of (seed,
stream, sample, position), and a row draws the same whatever shares its batch, and after preemption or resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cbgen.engine.sequence import Sequence, SequenceTable

_LARGEST_INT32 = 2**31 - 1

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """Parameters of S rows, in the order of the step's logits.

    Attributes:
        temperature: [S], 0 for greedy rows.
        top_k: [S] int32, 0 keeps all tokens.
        top_p, min_p: [S], 1 and 0 keep all tokens.
        random_words: [S, 4] uint64: seed, stream, sample, position of the token to draw.
        special: (row, its sequence) for rows whose logits are edited first: a repetition penalty, biases, or
            `min_tokens` that are not yet out.
    """

    temperature: Float32Array
    top_k: npt.NDArray[np.int32]
    top_p: Float32Array
    min_p: Float32Array
    random_words: npt.NDArray[np.uint64]
    special: list[tuple[int, Sequence]]

    @classmethod
    def from_sequences(cls, sequences: list[Sequence]) -> SamplingInput:
        params = [sequence.params for sequence in sequences]
        words = [(*s.random_stream, len(s.output_token_ids)) for s in sequences]
        return cls(
            temperature=np.array([0 if p.is_greedy else p.temperature for p in params], dtype=np.float32),
            top_k=np.array([min(p.top_k, _LARGEST_INT32) for p in params], dtype=np.int32),
            top_p=np.array([p.top_p for p in params], dtype=np.float32),
            min_p=np.array([p.min_p for p in params], dtype=np.float32),
            random_words=np.array(words, dtype=np.uint64).reshape(len(sequences), 4),
            special=[(row, sequence) for row, sequence in enumerate(sequences) if is_special(sequence)],
        )

    @classmethod
    def from_table(cls, table: SequenceTable, slots: npt.NDArray[np.int64]) -> SamplingInput:
        """The same of sequences that are in a slot, without a loop over them."""
        num_tokens = table.num_tokens[slots]
        random_words = table.random_words[slots]
        random_words[:, 3] = num_tokens - table.num_prompt_tokens[slots]
        may_be_special = table.is_edited[slots] | (num_tokens < table.min_total_tokens[slots])
        special = [(row, table.sequences[slots[row]]) for row in np.flatnonzero(may_be_special).tolist()]
        return cls(
            temperature=table.temperature[slots],
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            min_p=table.min_p[slots],
            random_words=random_words,
            special=[(row, s) for row, s in special if s is not None and is_special(s)],
        )

    def __len__(self) -> int:
        return len(self.temperature)


def is_special(sequence: Sequence) -> bool:
    """Whether the next token's logits are edited before one is chosen."""
    params = sequence.params
    return (
        params.repetition_penalty != 1
        or bool(params.logit_bias)
        or (len(sequence.output_token_ids) < params.min_tokens and bool(sequence.stop_token_ids))
    )


def uniforms(random_words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """[S] one number in [0, 1) for each row of words, [S, 4].

    The mixer is SplitMix64 (Steele et al., OOPSLA 2014) applied to the words in turn; 53 bits become the fraction.
    """
    return (random_states(random_words) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_states(random_words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """[S] the mixer's state after words [S, W].

    The state after seed, stream and sample is the same for all tokens of a row: a device keeps it and mixes in the
    position itself (`SampleTensors` in `cbgen.engine.operators.base`).
    """
    state = np.zeros(len(random_words), dtype=np.uint64)
    for word in random_words.T:
        state = _mix(state + np.uint64(0x9E3779B97F4A7C15) + word)
    return state


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
