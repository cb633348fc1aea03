"""The operators in plain torch: for any device, and what all others are tested against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from cbgen.engine import slot_state
from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.attention.reference import paged_attention
from cbgen.engine.operators.base import Activation, DrawParams, HeadLayout, Penalties, SampleArguments, SampleTensors
from cbgen.engine.slot_state import SlotState, StepInput

_PREFILTER = 1024  # top-p looks at so many tokens first; only rows whose nucleus is wider pay for a full sort

# SplitMix64 as in `cbgen.engine.sampling_input`, in the signed integers that torch has.
_INCREMENT, _FIRST_FACTOR, _SECOND_FACTOR = (
    number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class ReferenceOperators:
    """See `Operators`."""

    name = "reference"
    is_capturable = False  # its attention loops over sequences, and sampling looks at the parameters

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """See `Operators.rms_norm`."""
        if residual is not None:
            x = residual.add_(x)
        return _rms_norm(x.float(), weight, eps).to(x.dtype)

    def activation_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See `Operators.activation_mul`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return (gate * up).to(gate_up.dtype)

    def rope_and_store(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """See `Operators.rope_and_store`."""
        heads = qkv.view(len(qkv), qkv.shape[1] // layout.head_dim, layout.head_dim)  # [T, Hq + 2 Hkv, D]
        query, key, value = heads.tensor_split([layout.num_heads, layout.num_heads + layout.num_kv_heads], dim=1)
        rotated_query, rotated_key = query.float(), key.float()
        if layout.norms is not None:
            rotated_query = _rms_norm(rotated_query, layout.norms.query_weight, layout.norms.eps)
            rotated_key = _rms_norm(rotated_key, layout.norms.key_weight, layout.norms.eps)
        query.copy_(_rotate(rotated_query, cos, sin))
        self.store(_rotate(rotated_key, cos, sin), value, key_cache, value_cache, slot_mapping)
        return query

    def store(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `Operators.store`."""
        block_size = key_cache.shape[2]
        block, offset = slot_mapping // block_size, slot_mapping % block_size
        for cache, new in ((key_cache, key), (value_cache, value)):
            cache.transpose(1, 2)[block, offset] = new.to(cache.dtype)  # view [num_blocks, block_size, Hkv, D]

    def attention(
        self, call: AttentionCall, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `Operators.attention`."""
        return paged_attention(call, query, key_cache, value_cache, metadata)

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Operators.argmax`."""
        sound = torch.isfinite(logits.amax(dim=-1))  # amax lets NaN through
        return logits.argmax(dim=-1).masked_fill_(~sound, -1)

    def draw(self, logits: Tensor, rows: npt.NDArray[np.int64], params: DrawParams) -> Tensor:
        """See `Operators.draw`."""
        vocab_size, device = logits.shape[-1], logits.device
        temperature, top_p, min_p, uniform = (  # [R, 1]
            torch.from_numpy(values).to(device)[:, None]
            for values in (params.temperature, params.top_p, params.min_p, params.uniforms)
        )
        logits = logits[torch.from_numpy(rows).to(device)].float()
        # Subtracting the maximum first keeps tiny temperatures finite.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
        top_k = np.where(params.top_k <= 0, vocab_size, np.minimum(params.top_k, vocab_size)).astype(np.int64)
        if (top_k < vocab_size).any():
            logits = _keep_top_k(logits, top_k)
        if (params.min_p > 0).any():
            logits = logits.masked_fill(logits < torch.log(min_p), float("-inf"))
        if (params.top_p < 1).any():
            logits = _keep_top_p(logits, top_p)
        cumulative = torch.exp(logits).cumsum(dim=-1, dtype=torch.float64)  # [R, V]
        total = cumulative[:, -1:]
        target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))  # never past the end
        return (cumulative > target).int().argmax(dim=-1)  # the first token past it; one of weight 0 never is

    def sample(
        self,
        logits: Tensor,
        params: SampleTensors,
        stop_token_ids: Tensor | None = None,
        forbids_stops: Tensor | None = None,
        penalties: Penalties | None = None,
    ) -> Tensor:
        """See `Operators.sample`; this one does look at the parameters from the host."""
        token_ids = self.argmax(logits)
        is_sound = token_ids >= 0
        if penalties is not None:
            logits = _penalize(logits, penalties)
            token_ids = self.argmax(logits).clamp_(min=0)
        if stop_token_ids is not None and forbids_stops is not None:
            logits = _forbid(logits, stop_token_ids, forbids_stops)
            token_ids = self.argmax(logits).clamp_(min=0)
        rows = np.flatnonzero(params.temperature.numpy(force=True) > 0)
        if len(rows):
            columns = (params.temperature, params.top_k, params.top_p, params.min_p)
            temperature, top_k, top_p, min_p = (column.numpy(force=True)[rows] for column in columns)
            uniforms = uniforms_of(params.random_state, params.position).numpy(force=True)[rows]
            drawn = self.draw(logits, rows, DrawParams(temperature, top_k, top_p, min_p, uniforms))
            token_ids[torch.from_numpy(rows).to(logits.device)] = drawn
        return token_ids.masked_fill_(~is_sound, -1)

    def gather_step(self, state: SlotState, slots: Tensor, num_columns: int, block_size: int) -> StepInput:
        """See `Operators.gather_step`."""
        return slot_state.gather_step(state, slots, num_columns, block_size)

    def gather_sampling(self, state: SlotState, slots: Tensor) -> SampleArguments:
        """See `Operators.gather_sampling`."""
        num_tokens = state.num_tokens[slots]
        params = SampleTensors(
            temperature=state.temperature[slots],
            top_k=state.top_k[slots],
            top_p=state.top_p[slots],
            min_p=state.min_p[slots],
            random_state=state.random_state[slots],
            position=num_tokens - state.num_prompt_tokens[slots],
        )
        forbids_stops = num_tokens < state.min_total_tokens[slots]
        penalties = Penalties(state.repetition_penalty[slots], state.seen_tokens, slots)
        return SampleArguments(params, state.stop_token_ids[slots], forbids_stops, penalties)

    def advance(self, state: SlotState, slots: Tensor, token_ids: Tensor, ring: Tensor, cursor: Tensor) -> None:
        """See `Operators.advance`."""
        slot_state.advance(state, slots, token_ids, ring, cursor)


def uniforms_of(random_state: Tensor, position: Tensor) -> Tensor:
    """[S] float64 in [0, 1): the numbers of `cbgen.engine.sampling_input.uniforms`, from the bits of its first states
    [S] int64 and the last word [S] int64."""
    state = random_state + position + _INCREMENT
    state = (state ^ _shifted(state, 30)) * _FIRST_FACTOR
    state = (state ^ _shifted(state, 27)) * _SECOND_FACTOR
    return _shifted(state ^ _shifted(state, 31), 11).double().mul(1 / (1 << 53))


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift int64 to the right as if it had no sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _penalize(logits: Tensor, penalties: Penalties) -> Tensor:
    """A float32 copy of [S, V] with the penalties; no number passes the largest by one."""
    logits, factor = logits.float(), penalties.factor[:, None]
    words = penalties.seen_tokens[penalties.seen_rows]  # [S, V / 32]
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    is_seen = (bits.flatten(1)[:, : logits.shape[1]] != 0) & (factor != 1)
    changed = torch.where(logits > 0, logits / factor, logits * factor).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(is_seen, changed, logits)


def _forbid(logits: Tensor, token_ids: Tensor, where: Tensor) -> Tensor:
    """A copy in which the rows `where` [S] have -inf at their `token_ids` [S, W]; -1 is none."""
    num_tokens = logits.shape[-1]
    columns = torch.where((token_ids >= 0) & where[:, None], token_ids, num_tokens)  # one column more, to be dropped
    is_forbidden = torch.zeros(len(logits), num_tokens + 1, dtype=torch.bool, device=logits.device)
    return logits.masked_fill(is_forbidden.scatter_(1, columns, True)[:, :num_tokens], float("-inf"))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension of a float32 tensor."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R values of each head of [T, heads, D] float32; the first half of them with the second
    (arXiv 2104.09864 in the layout of transformers)."""
    num_rotated = cos.shape[-1]
    turned, kept = heads[..., :num_rotated], heads[..., num_rotated:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos.float()[:, None] + torch.cat([-second, first], dim=-1) * sin.float()[:, None]
    return torch.cat([turned, kept], dim=-1)


def _keep_top_k(logits: Tensor, top_k: npt.NDArray[np.int64]) -> Tensor:
    """All but each row's k likeliest tokens become -inf; k = vocab_size keeps the row as it is."""
    largest = int(top_k[top_k < logits.shape[-1]].max())
    values = torch.topk(logits, largest, dim=-1).values  # [R, K], descending
    return _keep_likeliest(logits, values, torch.from_numpy(top_k).to(logits.device)[:, None])


def _keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """All but each row's nucleus become -inf."""
    total = torch.exp(logits).sum(dim=-1, keepdim=True, dtype=torch.float64)
    values = torch.topk(logits, min(_PREFILTER, logits.shape[-1]), dim=-1).values
    limited = top_p < 1
    if bool((limited & (torch.exp(values).sum(dim=-1, keepdim=True, dtype=torch.float64) < top_p * total)).any()):
        values = logits.sort(dim=-1, descending=True).values
    weights = torch.exp(values).double()
    before = weights.cumsum(dim=-1) - weights  # [R, K] mass of the likelier tokens
    counts = (before < top_p * total).sum(dim=-1, keepdim=True).clamp_(min=1)
    return _keep_likeliest(logits, values, torch.where(limited, counts, logits.shape[-1]))


def _keep_likeliest(logits: Tensor, values: Tensor, counts: Tensor) -> Tensor:
    """Keep `counts` tokens per row; of equally likely ones those of the lowest ids, so that no chance is involved.

    Args:
        logits: [R, V].
        values: [R, K] the K largest of each row, descending.
        counts: [R, 1] how many to keep; more than K keeps all.
    """
    unlimited = counts > values.shape[-1]
    threshold = values.gather(1, (counts - 1).clamp(max=values.shape[-1] - 1))
    above, equal = logits > threshold, logits == threshold
    room = counts - above.sum(dim=-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=-1) <= room)) | unlimited
    return logits.masked_fill(~kept, float("-inf"))
