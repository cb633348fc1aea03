"""Attention for modules that were left as they are: their keys and values stored, then attended to, by `Operators`."""

from __future__ import annotations

from torch import Tensor

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.kv_cache import KVCache
from cbgen.engine.operators.base import Operators


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
