"""From logits to token ids: one vectorised call for all rows of a step, each with its own parameters.

Randomness is counter-based: the uniform behind a token is a pure function of (seed, stream, sample, position), so a row
draws the same numbers whatever shares its batch, and after preemption or resume. A token is drawn by inverting the
cumulative distribution in vocabulary order over the tokens that top-k, top-p and min-p keep.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbgen.engine.sequence import Sequence

_PREFILTER = 1024  # top-p looks at so many tokens first; only rows whose nucleus is wider pay for a full sort


class Sampler:
    """Stateless; greedy rows cost an argmax and nothing else."""

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[int | None]:
        """One token id per row.

        Args:
            logits: [S, vocab_size] of any float dtype.
            sequences: the S sequences the rows belong to.

        Returns:
            Token ids; None where the logits hold NaN or +inf, or nothing but -inf.
        """
        logits = logits.float()
        finite = torch.isfinite(logits.amax(dim=-1))  # amax lets NaN through
        logits = _penalize_repetition(logits, sequences)
        logits = _add_biases(logits, sequences)
        logits = _forbid_early_stops(logits, sequences)
        token_ids = logits.argmax(dim=-1)  # [S]
        drawn = [row for row, sequence in enumerate(sequences) if not sequence.params.is_greedy]
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            token_ids[rows] = _draw(logits[rows], [sequences[row] for row in drawn])
        return [token_id if ok else None for token_id, ok in zip(token_ids.tolist(), finite.tolist(), strict=True)]


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """[S] token ids drawn from temperature-scaled, truncated distributions."""
    params = [sequence.params for sequence in sequences]
    vocab_size = logits.shape[-1]

    def column(values: list[float]) -> Tensor:  # [S, 1]
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    # Subtracting the maximum first keeps tiny temperatures finite.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / column([p.temperature for p in params])
    if any(0 < p.top_k < vocab_size for p in params):
        logits = _keep_top_k(logits, [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params])
    if any(p.min_p > 0 for p in params):  # arXiv 2407.01082: at least min_p times the best
        logits = logits.masked_fill(logits < torch.log(column([p.min_p for p in params])), float("-inf"))
    if any(p.top_p < 1 for p in params):
        logits = _keep_top_p(logits, column([p.top_p for p in params]))
    cumulative = torch.exp(logits).cumsum(dim=-1, dtype=torch.float64)  # [S, vocab_size]
    total = cumulative[:, -1:]
    target = torch.from_numpy(uniforms(sequences)).to(logits.device)[:, None] * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))  # rounding must not pass the end
    return (cumulative > target).int().argmax(dim=-1)  # the first token past the target; one of weight 0 never is


def _keep_top_k(logits: Tensor, top_k: list[int]) -> Tensor:
    """All but each row's k likeliest tokens become -inf; k = vocab_size keeps the row as it is."""
    limited = [k for k in top_k if k < logits.shape[-1]]
    values = torch.topk(logits, max(limited), dim=-1).values  # [S, K], descending
    counts = torch.tensor(top_k, device=logits.device)[:, None]
    return _keep_likeliest(logits, values, counts)


def _keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """All but each row's nucleus (arXiv 1904.09751) become -inf: the likeliest tokens that together reach top_p."""
    total = torch.exp(logits).sum(dim=-1, keepdim=True)
    values = torch.topk(logits, min(_PREFILTER, logits.shape[-1]), dim=-1).values
    limited = top_p < 1
    if bool((limited & (torch.exp(values).sum(dim=-1, keepdim=True) < top_p * total)).any()):
        values = logits.sort(dim=-1, descending=True).values
    before = torch.exp(values).cumsum(dim=-1) - torch.exp(values)  # [S, K] mass of the likelier tokens
    counts = (before < top_p * total).sum(dim=-1, keepdim=True).clamp_(min=1)
    return _keep_likeliest(logits, values, torch.where(limited, counts, logits.shape[-1]))


def _keep_likeliest(logits: Tensor, values: Tensor, counts: Tensor) -> Tensor:
    """Keep `counts` tokens per row; of equally likely ones those of the lowest ids, so that no chance is involved.

    Args:
        logits: [S, vocab_size].
        values: [S, K] the K largest of each row, descending.
        counts: [S, 1] how many to keep; more than K keeps all.
    """
    unlimited = counts > values.shape[-1]
    threshold = values.gather(1, (counts - 1).clamp(max=values.shape[-1] - 1))
    above, equal = logits > threshold, logits == threshold
    room = counts - above.sum(dim=-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=-1) <= room)) | unlimited
    return logits.masked_fill(~kept, float("-inf"))


def _penalize_repetition(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Divide positive and multiply negative logits of tokens seen in prompt or output (arXiv 1909.05858)."""
    for row, sequence in enumerate(sequences):
        penalty = sequence.params.repetition_penalty
        if penalty != 1:
            seen = torch.from_numpy(np.unique(sequence.tokens_between(0, sequence.num_tokens)).astype(np.int64))
            seen = seen.to(logits.device)
            values = logits[row, seen]
            logits[row, seen] = torch.where(values > 0, values / penalty, values * penalty)
    return logits


def _add_biases(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Add each row's `logit_bias`. -100 forbids: the token gets the lowest finite logit, however likely it was."""
    biases = [(row, *entry) for row, sequence in enumerate(sequences) for entry in sequence.params.logit_bias]
    if biases:
        rows, token_ids, values = (torch.tensor(column, device=logits.device) for column in zip(*biases, strict=True))
        lowest = torch.finfo(torch.float32).min
        logits[rows, token_ids] = torch.where(values <= -100, lowest, logits[rows, token_ids] + values)
    return logits


def _forbid_early_stops(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Until `min_tokens` are out, none of the row's stop ids can be chosen."""
    for row, sequence in enumerate(sequences):
        if len(sequence.output_token_ids) < sequence.params.min_tokens and sequence.stop_token_ids:
            logits[row, torch.tensor(sorted(sequence.stop_token_ids), device=logits.device)] = float("-inf")
    return logits


def uniforms(sequences: list[Sequence]) -> npt.NDArray[np.float64]:
    """[S] one number in [0, 1) per sequence, a pure function of its random stream and next position.

    The mixer is SplitMix64 (Steele et al., OOPSLA 2014) applied to the words in turn; 53 bits become the fraction.
    """
    words = np.array([(*s.random_stream, len(s.output_token_ids)) for s in sequences], dtype=np.uint64).T  # [4, S]
    state = np.zeros(len(sequences), dtype=np.uint64)
    for word in words:
        state = _mix(state + np.uint64(0x9E3779B97F4A7C15) + word)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
