"""Attention over the KV cache by `Operators`: for modules that were left as they are, and for joined ones."""

from __future__ import annotations

from torch import Tensor

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.kv_cache import KVCache
from cbgen.engine.operators.base import HeadLayout, Operators


class PagedBackend:
    """An `AttentionBackend` over the KV cache. One instance serves one step."""

    def __init__(self, operators: Operators, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        self.operators = operators
        self.kv_cache = kv_cache
        self.metadata = metadata

    def forward(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionBackend.forward`."""
        key_cache, value_cache = self.kv_cache.layer(call.layer_idx)
        self.operators.store(key, value, key_cache, value_cache, self.metadata.slot_mapping)
        return self.operators.attention(call, query, key_cache, value_cache, self.metadata)

    def forward_projected(
        self, call: AttentionCall, layout: HeadLayout, qkv: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """The same from a joined projection [T, (Hq + 2 Hkv) * D] that is still to be rotated by cos, sin [T, R].

        Returns:
            [T, Hq * D].
        """
        key_cache, value_cache = self.kv_cache.layer(call.layer_idx)
        slots = self.metadata.slot_mapping
        query = self.operators.rope_and_store(qkv, layout, cos, sin, key_cache, value_cache, slots)
        return self.operators.attention(call, query, key_cache, value_cache, self.metadata).flatten(1)
