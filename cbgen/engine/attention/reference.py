"""Attention as the reference does it: gather the blocks, then plain torch. Any device, any option; the oracle.

Decodes are padded to the longest of the step and attended in one call; prefill chunks go one sequence at a time. Also
home of `ProbeBackend`, which needs no cache: it runs when a model is loaded, to learn what its layers look like.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.kv_cache import LayerSpec


def paged_attention(
    call: AttentionCall, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """Attend from every token of a step, [T, Hq, D], to what its sequence holds; [T, Hq, Dv].

    The caches are [num_blocks, Hkv, block_size, D or Dv] and hold this step's tokens already.
    """
    outputs = []
    if metadata.num_decodes:
        outputs.append(_decode(call, query[: metadata.num_decodes], key_cache, value_cache, metadata))
    for index in range(metadata.num_decodes, len(metadata.host_context_lens)):
        start, stop = metadata.query_starts[index], metadata.query_starts[index + 1]
        outputs.append(_prefill(call, index, query[start:stop], key_cache, value_cache, metadata))
    if not outputs:
        return query.new_empty(0, query.shape[1], value_cache.shape[-1])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [T, Hq, Dv]


def _decode(
    call: AttentionCall, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """One query token per sequence, [B, Hq, D], against everything that sequence holds."""
    num_seqs = metadata.num_decodes
    context_lens = metadata.context_lens[:num_seqs]
    max_blocks = -(-metadata.max_context_len // key_cache.shape[2])
    block_tables = metadata.block_tables[:num_seqs, :max_blocks]
    key, value = _gather(key_cache, block_tables), _gather(value_cache, block_tables)
    positions = torch.arange(key.shape[2], device=query.device)
    visible = positions < context_lens[:, None]  # [B, L]
    if call.window is not None:
        visible &= positions >= context_lens[:, None] - call.window
    # What was never written may hold anything, NaN included, and 0 x NaN is NaN: clear it, masking is not enough.
    hidden = ~visible[:, None, :, None]
    key, value = key.masked_fill_(hidden, 0), value.masked_fill_(hidden, 0)
    output = attend(call, query[:, :, None], key, value, visible[:, None, None, :])  # [B, Hq, 1, Dv]
    return output.squeeze(2)


def _prefill(
    call: AttentionCall,
    index: int,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
) -> Tensor:
    """A chunk of one sequence's prompt, [Tq, Hq, D], against what it holds up to and including the chunk."""
    length = metadata.host_context_lens[index]
    num_blocks = -(-length // key_cache.shape[2])
    block_tables = metadata.block_tables[index : index + 1, :num_blocks]
    key, value = _gather(key_cache, block_tables), _gather(value_cache, block_tables)
    visible = causal_mask(query.shape[0], length, call.window, query.device)
    output = attend(call, query.transpose(0, 1)[None], key[:, :, :length], value[:, :, :length], visible)
    return output[0].transpose(0, 1)


def _gather(cache: Tensor, block_tables: Tensor) -> Tensor:
    """The blocks in [B, num_blocks] of a cache, laid out [B, Hkv, num_blocks * block_size, D]."""
    blocks = cache[block_tables].transpose(1, 2)  # [B, Hkv, num_blocks, block_size, D]
    return blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1])


class ProbeBackend:
    """Attention inside the packed step alone, without a cache; remembers what each layer asked for.

    Attributes:
        layers: layer_idx -> what its cache needs.
        query_starts: offsets of the sequences in the packed row.
    """

    def __init__(self, query_starts: list[int]) -> None:
        self.layers: dict[int, LayerSpec] = {}
        self.query_starts = query_starts

    def forward(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionBackend.forward`; stores nothing."""
        self.layers[call.layer_idx] = LayerSpec(
            layer_idx=call.layer_idx,
            num_kv_heads=key.shape[1],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            window=call.window,
            num_heads=query.shape[1],
            softcap=call.softcap,
            has_sinks=call.sinks is not None,
        )
        outputs = []
        for start, stop in zip(self.query_starts, self.query_starts[1:], strict=False):
            q, k, v = (t[start:stop].transpose(0, 1)[None] for t in (query, key, value))
            visible = causal_mask(stop - start, stop - start, call.window, query.device)
            outputs.append(attend(call, q, k, v, visible)[0].transpose(0, 1))
        return torch.cat(outputs)


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """[num_queries, num_keys] bool: the queries are the last positions; True where a query sees a key."""
    last = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    keys = torch.arange(num_keys, device=device)
    visible = keys <= last
    return visible if window is None else visible & (keys > last - window)


def attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention with grouped-query heads.

    Args:
        call: scale, soft-cap and sinks; the window is in `visible` already.
        query: [B, Hq, Tq, D]; key: [B, Hkv, L, D]; value: [B, Hkv, L, Dv].
        visible: bool, broadcastable to [B, Hq, Tq, L].

    Returns:
        [B, Hq, Tq, Dv] in the dtype of `query`.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    if call.softcap is None and call.sinks is None:
        # One query: the heads that share a KV head become its queries, so that each K and V is read once.
        packed = query.reshape(batch, key.shape[1], -1, head_dim) if num_queries == 1 else query
        with _plain_kernels(query.device):
            output = F.scaled_dot_product_attention(packed, key, value, visible, scale=call.scale, enable_gqa=True)
        return output.reshape(batch, num_heads, num_queries, -1)
    group = num_heads // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    logits = (query.float() @ key.float().transpose(-1, -2)) * call.scale
    if call.softcap is not None:  # Gemma 2 (arXiv 2408.00118), section 2
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = logits.masked_fill(~visible, float("-inf"))
    if call.sinks is not None:  # gpt-oss: a learned logit per head that takes weight and gives no value
        sinks = call.sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : key.shape[2]]
    return (weights @ value.float()).to(query.dtype)


def _plain_kernels(device: torch.device) -> AbstractContextManager[None]:
    """On CUDA without cuDNN, which torch prefers on Hopper: it has no plan for some shapes, and was wrong for others
    (https://github.com/pytorch/pytorch/issues/169849)."""
    if device.type != "cuda":
        return nullcontext()
    chosen: AbstractContextManager[None] = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    return chosen
