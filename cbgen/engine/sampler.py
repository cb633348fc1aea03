"""From logits to token ids: one vectorised call for all rows of a step, each with its own parameters.

Most rows need no more than the two operators `argmax` and `draw`. The few whose logits are edited first (repetition
penalty, biases, `min_tokens`) are copied to float32 and edited one by one. Enters: logits and a `SamplingInput`.
Leaves: one token id per row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbgen.engine.operators.base import DrawParams, Operators
from cbgen.engine.sampling_input import SamplingInput, uniforms
from cbgen.engine.sequence import Sequence

Int64Array = npt.NDArray[np.int64]


class Sampler:
    """Stateless; greedy rows cost an argmax and nothing else."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators

    def sample(self, logits: Tensor, sampling: SamplingInput) -> Int64Array:
        """One token id per row.

        Args:
            logits: [S, vocab_size] of any float dtype; left as they are.
            sampling: parameters of the S rows.

        Returns:
            [S] token ids; -1 where the logits hold NaN or +inf, or nothing but -inf.
        """
        token_ids: Int64Array = self.operators.argmax(logits).numpy(force=True)  # [S], of drawn rows to be replaced
        drawn = sampling.temperature > 0
        if sampling.special:
            rows = np.array([row for row, _ in sampling.special])
            edited = _edit(logits[torch.from_numpy(rows).to(logits.device)].float(), [s for _, s in sampling.special])
            best = np.maximum(self.operators.argmax(edited).numpy(force=True), 0)  # where all is forbidden, the first
            token_ids[rows] = np.where(token_ids[rows] < 0, -1, best)
            where = np.flatnonzero(drawn[rows])
            self._draw(edited, where, sampling, rows[where], token_ids)
            drawn[rows] = False
        plain = np.flatnonzero(drawn)
        self._draw(logits, plain, sampling, plain, token_ids)
        return token_ids

    def _draw(
        self, logits: Tensor, logits_rows: Int64Array, sampling: SamplingInput, rows: Int64Array, token_ids: Int64Array
    ) -> None:
        """Replace `token_ids[rows]` by draws from `logits[logits_rows]`, but for rows of bad logits."""
        if len(rows) == 0:
            return
        params = DrawParams(
            temperature=sampling.temperature[rows],
            top_k=sampling.top_k[rows],
            top_p=sampling.top_p[rows],
            min_p=sampling.min_p[rows],
            uniforms=uniforms(sampling.random_words[rows]),
        )
        drawn = self.operators.draw(logits, logits_rows, params).numpy(force=True)
        token_ids[rows] = np.where(token_ids[rows] < 0, -1, drawn)


def _edit(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Logits [E, vocab_size] float32 of as many sequences, changed in place as these ask."""
    _penalize_repetition(logits, sequences)
    _add_biases(logits, sequences)
    _forbid_early_stops(logits, sequences)
    return logits.clamp_(max=torch.finfo(torch.float32).max)  # a penalty may have pushed one past it


def _penalize_repetition(logits: Tensor, sequences: list[Sequence]) -> None:
    """Divide positive and multiply negative logits of tokens seen in prompt or output (arXiv 1909.05858)."""
    for row, sequence in enumerate(sequences):
        penalty = sequence.params.repetition_penalty
        if penalty != 1:
            seen = torch.from_numpy(np.unique(sequence.tokens_between(0, sequence.num_tokens)).astype(np.int64))
            seen = seen.to(logits.device)
            values = logits[row, seen]
            logits[row, seen] = torch.where(values > 0, values / penalty, values * penalty)


def _add_biases(logits: Tensor, sequences: list[Sequence]) -> None:
    """Add each row's `logit_bias`. -100 forbids: the token gets the lowest finite logit, however likely it was."""
    biases = [(row, *entry) for row, sequence in enumerate(sequences) for entry in sequence.params.logit_bias]
    if biases:
        rows, token_ids, values = (torch.tensor(column, device=logits.device) for column in zip(*biases, strict=True))
        lowest = torch.finfo(torch.float32).min
        logits[rows, token_ids] = torch.where(values <= -100, lowest, logits[rows, token_ids] + values)


def _forbid_early_stops(logits: Tensor, sequences: list[Sequence]) -> None:
    """Until `min_tokens` are out, none of the row's stop ids can be chosen."""
    for row, sequence in enumerate(sequences):
        if len(sequence.output_token_ids) < sequence.params.min_tokens and sequence.stop_token_ids:
            logits[row, torch.tensor(sorted(sequence.stop_token_ids), device=logits.device)] = float("-inf")
