"""The KV cache tensors, and how much memory they take.

Per layer one K and one V tensor of shape [num_blocks, num_kv_heads, block_size, head_dim]: contiguous per head, so
that an attention kernel reads one block of one head as a dense 2D tile. Layer shapes come from the model itself
(`LayerSpec`, recorded by a probe forward), not from config names that differ between architectures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer asks of the cache, and how it attends.

    Attributes:
        window: how many positions it sees, None for all.
        num_heads: of queries.
        softcap, has_sinks: see `AttentionCall`.
    """

    layer_idx: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    num_heads: int
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def values_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def bytes_per_block(layers: list[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, K and V together."""
    return block_size * sum(layer.values_per_token for layer in layers) * dtype.itemsize


class KVCache:
    """K and V of every layer. Written by operators at `slot_mapping`, read through block tables.

    One block more than asked for: `trash_block`, the last, belongs to nobody. Padding is written there.
    """

    def __init__(
        self, layers: list[LayerSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.trash_block = num_blocks
        # Not zeroed: on CPU, pages that no row ever touches then cost no memory. Readers mask what was never written.
        self._keys = {
            s.layer_idx: torch.empty(num_blocks + 1, s.num_kv_heads, block_size, s.key_dim, dtype=dtype, device=device)
            for s in layers
        }
        self._values = {
            s.layer_idx: torch.empty(
                num_blocks + 1, s.num_kv_heads, block_size, s.value_dim, dtype=dtype, device=device
            )
            for s in layers
        }

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """(K, V), each [num_blocks + 1, num_kv_heads, block_size, head_dim]."""
        return self._keys[layer_idx], self._values[layer_idx]
