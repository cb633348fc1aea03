"""How long a row will run, learned from the rows that have ended.

Enters: each sequence that ended by itself. Leaves: an expected length, to admit long rows first, and a likely bound, to
reserve memory by. `max_tokens` is only a cap; but rows with the same cap and about the same prompt length tend to be of
one kind, so lengths are counted by such kinds, and over all rows where a kind has too few. Counts only: no clock, no
chance, so two runs over the same rows decide alike.
"""

from __future__ import annotations

import numpy as np

from cbgen.engine.sequence import Sequence

_PER_OCTAVE = 4  # bins of a length histogram between n and 2n
_NUM_BINS = 32 * _PER_OCTAVE
_ENOUGH = 16  # ended rows of a kind before it is trusted over all rows together
_ENOUGH_OF_ALL = 8  # ended rows before anything but the cap is trusted
_LIKELY = 0.6  # share of rows that stay within the likely bound; at 0.8 slots idle for memory that is never used
_FIRST_GUESS = 256  # output tokens, while nothing is known


class LengthPredictor:
    """Histograms of output lengths, by kind of row and over all.

    Attributes:
        version: grows when enough rows have ended for predictions to have changed.
    """

    def __init__(self) -> None:
        self.version = 0
        self._all = _Lengths()
        self._kinds: dict[tuple[int, int], _Lengths] = {}

    def ended(self, sequence: Sequence) -> None:
        """Learn from a sequence that came to its own end. What cannot end early has nothing to teach."""
        if sequence.has_known_length:
            return
        num_output = len(sequence.output_token_ids)
        self._all.add(num_output)
        self._kinds.setdefault(_kind(sequence), _Lengths()).add(num_output)
        if self._all.count >= _ENOUGH_OF_ALL and self._all.count.bit_count() == 1:
            self.version += 1

    def expected_output(self, sequence: Sequence) -> int:
        """Mean output length of rows like this; the cap while nothing is known."""
        cap = sequence.max_total_tokens - sequence.num_prompt_tokens
        lengths = None if sequence.has_known_length else self._like(sequence)
        return cap if lengths is None else min(cap, lengths.mean())

    def likely_total(self, sequence: Sequence) -> int:
        """Prompt and output of a sequence, which it more likely stays within than not.

        One that is longer already is compared with those that were so, too.
        """
        if sequence.has_known_length:
            return sequence.max_total_tokens
        num_output = sequence.num_tokens - sequence.num_prompt_tokens
        lengths = self._like(sequence)
        likely = lengths.quantile(_LIKELY, num_output) if lengths else max(_FIRST_GUESS, 2 * num_output)
        return min(sequence.max_total_tokens, sequence.num_prompt_tokens + likely)

    def _like(self, sequence: Sequence) -> _Lengths | None:
        lengths = self._kinds.get(_kind(sequence))
        if lengths is not None and lengths.count >= _ENOUGH:
            return lengths
        return self._all if self._all.count >= _ENOUGH_OF_ALL else None


class _Lengths:
    """A histogram over bins that grow with the length: a factor of 2 ** (1/4) each."""

    def __init__(self) -> None:
        self.count = 0
        self._total = 0
        self._bins = np.zeros(_NUM_BINS, dtype=np.int64)

    def add(self, length: int) -> None:
        self.count += 1
        self._total += length
        self._bins[_bin(length)] += 1

    def mean(self) -> int:
        return max(1, round(self._total / self.count))

    def quantile(self, share: float, beyond: int) -> int:
        """The length that this share of the rows longer than `beyond` stayed within; twice `beyond` if none were."""
        first = _bin(beyond) + 1 if beyond else 0
        cumulative = np.cumsum(self._bins[first:])
        if not cumulative[-1]:
            return 2 * beyond
        place = int(np.searchsorted(cumulative, share * int(cumulative[-1])))
        return max(beyond + 1, int(2 ** ((first + place) / _PER_OCTAVE)))


def _kind(sequence: Sequence) -> tuple[int, int]:
    return sequence.params.max_tokens, sequence.num_prompt_tokens.bit_length()


def _bin(length: int) -> int:
    """Bin b holds lengths above 2 ** ((b - 1) / 4), up to 2 ** (b / 4)."""
    return int(np.ceil(np.log2(max(length, 1)) * _PER_OCTAVE))
