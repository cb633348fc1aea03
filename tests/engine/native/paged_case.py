"""Random paged attention problems, and a naive float64 answer to them."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedCase:
    """The arguments of `PagedAttention`, as they are named there."""

    query: Tensor  # [T, Hq, D]
    key_cache: Tensor  # [num_blocks, Hkv, block_size, D]
    value_cache: Tensor
    block_tables: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    num_decodes: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def run(self, attention, num_threads=2):
        return attention(**vars(self), num_threads=num_threads)

    def alone(self, index):
        """(The same problem with one sequence only, and which of the tokens are its own.)"""
        start, stop = self.cu_seqlens_q[index : index + 2].tolist()
        case = replace(
            self,
            query=self.query[start:stop],
            block_tables=self.block_tables[index : index + 1],
            cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32),
            context_lens=self.context_lens[index : index + 1],
            num_decodes=int(index < self.num_decodes),
        )
        return case, slice(start, stop)


def make_case(
    generator,
    lengths,  # positions each sequence holds, the decodes first
    chunks,  # of the others, the last how many are in this step
    *,
    heads=(9, 3),
    dims=(64, 64),
    block_size=16,
    dtype=torch.float32,
    window=None,
    softcap=None,
    sinks=False,
    scale=None,
):
    """A problem whose cache holds NaN wherever no sequence has written, or where its window has passed for good."""
    num_heads, num_kv_heads = heads
    num_decodes = len(lengths) - len(chunks)
    counts = [1] * num_decodes + list(chunks)
    blocks = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(blocks) + 3, generator=generator).to(torch.int32)
    # columns that do not belong to a sequence name a block that does not exist
    tables = torch.full((len(lengths), max(blocks, default=0) + 2), 2**30, dtype=torch.int32)
    caches = [torch.full((len(order), num_kv_heads, block_size, dim), math.nan, dtype=dtype) for dim in dims]
    taken = 0
    for index, (length, count, num_blocks) in enumerate(zip(lengths, counts, blocks, strict=True)):
        tables[index, :num_blocks] = order[taken : taken + num_blocks]
        taken += num_blocks
        first = max(0, length - count - window + 1) if window else 0
        positions = torch.arange(first, length)
        block, offset = tables[index, positions // block_size].long(), positions % block_size
        for cache in caches:
            new = torch.randn(len(positions), num_kv_heads, cache.shape[-1], generator=generator)
            cache.transpose(1, 2)[block, offset] = new.to(dtype)
    # queries are a view into a wider buffer, as when one product makes queries, keys and values
    buffer = torch.randn(sum(counts), num_heads + 2 * num_kv_heads, dims[0], generator=generator).to(dtype)
    return PagedCase(
        query=buffer[:, :num_heads],
        key_cache=caches[0],
        value_cache=caches[1],
        block_tables=tables,
        cu_seqlens_q=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        num_decodes=num_decodes,
        scale=dims[0] ** -0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
        sinks=torch.randn(num_heads, generator=generator) * 2 if sinks else None,
    )


def naive_attention(case):
    """[T, Hq, Dv] float64, one query at a time, over the positions that it sees and nothing else."""
    num_heads, num_kv_heads = case.query.shape[1], case.key_cache.shape[1]
    block_size = case.key_cache.shape[2]
    output = torch.empty(*case.query.shape[:2], case.value_cache.shape[3], dtype=torch.float64)
    for index, held in enumerate(case.context_lens.tolist()):
        start, stop = case.cu_seqlens_q[index : index + 2].tolist()
        for token in range(start, stop):
            last = held - (stop - token)
            positions = torch.arange(max(0, last - case.window + 1) if case.window else 0, last + 1)
            block = case.block_tables[index, positions // block_size].long()
            key = case.key_cache[block, :, positions % block_size].double()  # [L, Hkv, D]
            value = case.value_cache[block, :, positions % block_size].double()
            query = case.query[token].double().view(num_kv_heads, -1, case.query.shape[2])  # [Hkv, G, D]
            logits = torch.einsum("hgd,lhd->hgl", query, key) * case.scale
            if case.softcap:
                logits = case.softcap * torch.tanh(logits / case.softcap)
            if case.sinks is not None:
                logits = torch.cat([logits, case.sinks.double().view(num_kv_heads, -1, 1)], dim=-1)
            weights = torch.softmax(logits, dim=-1)[..., : len(positions)]
            output[token] = torch.einsum("hgl,lhd->hgd", weights, value).view(num_heads, -1)
    return output
