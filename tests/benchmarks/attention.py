"""Milliseconds per layer of the CPU's paged attention, and of the reference beside it.

Decode: B sequences of L positions each; GB/s counts keys and values once. Prefill: one prompt of T tokens; GFLOP/s
counts the causal half only. Keys and values lie in caches of several layers, so that they come from where they come
from in a run: mostly from memory. Each figure is the fastest tenth of the calls.
"""

import argparse
import sys
import time
from functools import partial

import torch

from cbgen.engine.attention.base import AttentionCall, AttentionMetadata
from cbgen.engine.attention.reference import paged_attention
from cbgen.engine.kv_cache import KVCache, LayerSpec
from cbgen.engine.native.attention import PagedAttention
from cbgen.engine.native.library import open_library

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Qwen3-0.6B": (16, 8, 128)}  # query heads, KV heads, head size
BLOCK_SIZE = 16
CACHE_BYTES = 200e6  # several layers, more than the last-level cache holds, when one layer is small
MIN_SECONDS = 0.4


class Problem:
    """Equal sequences over as many layers as fit; calling it runs all layers with one implementation."""

    def __init__(self, shape, num_seqs, length, num_queries, dtype):
        num_heads, num_kv_heads, dim = shape
        blocks = -(-length // BLOCK_SIZE)
        self.bytes_per_layer = 2 * num_seqs * length * num_kv_heads * dim * dtype.itemsize
        self.num_layers = max(1, min(30, int(CACHE_BYTES / self.bytes_per_layer)))
        layers = [LayerSpec(index, num_kv_heads, dim, dim, None, num_heads) for index in range(self.num_layers)]
        self.cache = KVCache(layers, num_seqs * blocks, BLOCK_SIZE, dtype, torch.device("cpu"))
        for index in range(self.num_layers):
            for tensor in self.cache.layer(index):
                tensor.normal_()
        self.block_tables = torch.randperm(num_seqs * blocks).to(torch.int32).view(num_seqs, blocks)
        self.context_lens = torch.full((num_seqs,), length, dtype=torch.int32)
        self.cu_seqlens_q = torch.arange(0, num_seqs * num_queries + 1, num_queries, dtype=torch.int32)
        self.num_decodes = num_seqs if num_queries == 1 else 0
        self.query = torch.randn(num_seqs * num_queries, num_heads, dim).to(dtype)
        self.scale = dim**-0.5
        self.flops_per_layer = 4 * num_heads * dim * num_seqs * num_queries * (length - num_queries / 2)

    def native(self, attention, num_threads, index):
        attention(
            self.query,
            *self.cache.layer(index),
            self.block_tables,
            self.cu_seqlens_q,
            self.context_lens,
            num_decodes=self.num_decodes,
            scale=self.scale,
            num_threads=num_threads,
        )

    def reference(self, index):
        metadata = AttentionMetadata(
            slot_mapping=torch.empty(0, dtype=torch.int64),
            block_tables=self.block_tables,
            context_lens=self.context_lens,
            cu_seqlens_q=self.cu_seqlens_q,
            num_decodes=self.num_decodes,
            max_context_len=int(self.context_lens.max()),
            query_starts=self.cu_seqlens_q.tolist(),
            host_context_lens=self.context_lens.tolist(),
        )
        paged_attention(AttentionCall(index, self.scale), self.query, *self.cache.layer(index), metadata)


def fast_ms(function, num_layers):
    """Milliseconds of a call that one in ten undercuts, over MIN_SECONDS and at least two rounds of the layers."""
    for index in range(num_layers):
        function(index)
    times, stop, index = [], time.perf_counter() + MIN_SECONDS, 0
    while time.perf_counter() < stop or index < 2 * num_layers:
        start = time.perf_counter()
        function(index % num_layers)
        times.append(time.perf_counter() - start)
        index += 1
    return sorted(times)[len(times) // 10] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--shape", choices=[*SHAPES], action="append")
    parser.add_argument("--plain", action="store_true", help="the build without vector intrinsics")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 300, 1000, 4000])
    parser.add_argument("--prompts", type=int, nargs="*", default=[64, 256, 1024])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    attention = PagedAttention(open_library(lambda text: None, plain=options.plain))
    dtype = getattr(torch, options.dtype)
    cases = [(num_seqs, length, 1) for num_seqs in options.batches for length in options.lengths]
    cases += [(1, length, length) for length in options.prompts]
    for name in options.shape or SHAPES:
        sys.stdout.write(f"{name}, {options.dtype}, {options.threads} threads: ms per layer\n")
        for num_seqs, length, num_queries in cases:
            problem = Problem(SHAPES[name], num_seqs, length, num_queries, dtype)
            ms = fast_ms(partial(problem.native, attention, options.threads), problem.num_layers)
            kind = f"decode  B={num_seqs:<3} L={length:<4}" if num_queries == 1 else f"prefill T={length:<10}"
            if num_queries == 1:
                rate = f"{problem.bytes_per_layer / ms / 1e6:6.1f} GB/s"
            else:
                rate = f"{problem.flops_per_layer / ms / 1e6:6.0f} GFLOP/s"
            line = f"  {kind}  {ms:8.3f}  {rate}"
            if not options.no_reference:
                line += f"  reference {fast_ms(problem.reference, problem.num_layers):8.3f}"
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
