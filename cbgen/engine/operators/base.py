"""The operators a step is made of, beside its matrix products: one interface, filled once per kind of device.

Shapes: T tokens packed in one row, H hidden size, Hq query heads, Hkv KV heads, D head size, S rows that sample. What
is stored has the dtype of its tensor; what happens in between is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.slot_state import SlotState, StepInput

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each head of queries and keys: weights [D] float32, and the epsilon of both."""

    query_weight: Tensor
    key_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a joined projection [T, (Hq + 2 Hkv) * D] is made up: queries, then keys, then values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norms: HeadNorms | None = None


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Parameters of R rows that draw, all [R].

    Attributes:
        temperature: above 0; float32.
        top_k: int32; 0 and numbers from the vocabulary's size up keep all.
        top_p, min_p: float32; 1 and 0 keep all.
        uniforms: float64 in [0, 1).
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    uniforms: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampleTensors:
    """Parameters of S rows on the device, all [S]: what a step needs that never asks the host.

    Attributes:
        temperature: float32; 0 for the likeliest token.
        top_k: int32; 0 and less, and numbers from the vocabulary's size up, keep all.
        top_p, min_p: float32; 1 and 0 keep all.
        random_state: int64, the bits of `cbgen.engine.sampling_input.random_states`.
        position: int64, of the token to choose among the row's output tokens; the last word of its random number.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    random_state: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition penalties of S rows (arXiv 1909.05858), on the device: logits of seen tokens are divided by the factor
    where positive, multiplied by it where not.

    Attributes:
        factor: [S] float32; 1 for none.
        seen_tokens: [M, V / 32, rounded up] int32, a bit for each token id, the lowest first.
        seen_rows: [S] int64, which row of `seen_tokens` is each one's.
    """

    factor: Tensor
    seen_tokens: Tensor
    seen_rows: Tensor


class SampleArguments(NamedTuple):
    """What `Operators.sample` takes beside the logits, see there."""

    params: SampleTensors
    stop_token_ids: Tensor
    forbids_stops: Tensor
    penalties: Penalties


class Operators(Protocol):
    """A row's or sequence's results do not depend on what else is in the call, nor on the number of threads.

    Last dimensions are contiguous; the others may be strided unless it says otherwise.

    Attributes:
        name: how settings and reports call them.
        is_capturable: whether no call waits for the device, or takes its shapes from what is on it: so that steps can
            be recorded as graphs. Such operators do not look at `AttentionMetadata`'s lists.
    """

    name: str
    is_capturable: bool

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, [T, H].

        Args:
            x: [T, H].
            weight: [H] float32.
            eps: added to the mean of squares.
            residual: [T, H]; if given it becomes residual + x in place, and the norm is that of the sum.
        """
        ...

    def activation_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """act(gate) * up: [T, 2 I], the gate first, to [T, I]."""
        ...

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
        """Norm (if the layout has norms) and rotate queries and keys; store keys and values.

        Args:
            qkv: [T, (Hq + 2 Hkv) * D]; its queries are changed in place.
            layout: what is where in it.
            cos, sin: [T, R] as transformers' rotary modules give them: R <= D values whose halves repeat each other.
            key_cache, value_cache: [num_blocks, Hkv, block_size, D], contiguous.
            slot_mapping: [T] int64, block * block_size + offset.

        Returns:
            [T, Hq, D], a view of the queries in `qkv`.
        """
        ...

    def store(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write keys [T, Hkv, D] and values [T, Hkv, Dv] into caches [num_blocks, Hkv, block_size, D or Dv]."""
        ...

    def attention(
        self, call: AttentionCall, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend from [T, Hq, D] to what the caches hold, this step's tokens included; [T, Hq, Dv], contiguous."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """[S] int64: the lowest id of each row's maximum; -1 where [S, V] holds NaN or +inf, or nothing but -inf."""
        ...

    def draw(self, logits: Tensor, rows: npt.NDArray[np.int64], params: DrawParams) -> Tensor:
        """Draw from some rows of [S, V]; [R] int64, any id where the logits are not sound.

        A row's tokens weigh exp(logit / temperature). Top-k keeps the k likeliest; of these, min-p (arXiv 2407.01082)
        those of at least min_p times the best; of these, top-p (arXiv 1904.09751) the likeliest that together reach
        top_p. Of equally likely ones those of the lowest ids are kept. The uniform number inverts the cumulative
        distribution of the kept in vocabulary order, in float64.
        """
        ...

    def sample(
        self,
        logits: Tensor,
        params: SampleTensors,
        stop_token_ids: Tensor | None = None,
        forbids_stops: Tensor | None = None,
        penalties: Penalties | None = None,
    ) -> Tensor:
        """Choose a token for each row; [S] int64 on the device of [S, V], without a look at it from the host.

        -1 where `argmax` of the logits says so; else the likeliest token where the temperature is 0, or a `draw` by
        the same uniform number as `cbgen.engine.sampling_input.uniforms` has for the row.

        Args:
            logits: [S, V], left as they are.
            params: of the S rows.
            stop_token_ids: [S, W] int64, -1 in unused places; with `forbids_stops`.
            forbids_stops: [S] bool, rows that must not end yet: their stop ids count as -inf. Where that forbids
                all that is left, the token is 0.
            penalties: applied to the logits before anything else, but not for the question whether they are sound.
        """
        ...

    def gather_step(self, state: SlotState, slots: Tensor, num_columns: int, block_size: int) -> StepInput:
        """See `cbgen.engine.slot_state.gather_step`; slots contiguous."""
        ...

    def gather_sampling(self, state: SlotState, slots: Tensor) -> SampleArguments:
        """What the samples of slots [B] int64, contiguous, depend on."""
        ...

    def advance(self, state: SlotState, slots: Tensor, token_ids: Tensor, ring: Tensor, cursor: Tensor) -> None:
        """See `cbgen.engine.slot_state.advance`; slots and token ids contiguous."""
        ...
