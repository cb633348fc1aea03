"""Kernels that break, spill or want too much, for `test_compile.py`: what is not found in these is found in none."""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
import triton
import triton.language as tl

from tests.engine.triton.aot import compile_all, record
from tests.engine.triton.machines import MACHINES


@triton.jit
def broken_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + tl.arange(0, 3))  # no power of two


@triton.jit
def spilling_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at[:, None] * SIZE + at[None, :])
    product = tl.dot(x, x, input_precision="ieee")  # of float32 in tiles that one warp cannot hold
    tl.store(out_ptr + at[:, None] * SIZE + at[None, :], product)


@triton.jit
def wide_kernel(x_ptr, out_ptr, steps, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for step in range(steps):  # what is loaded in advance, for all stages, lies in shared memory
        x = tl.load(x_ptr + step * SIZE * SIZE + at[:, None] * SIZE + at[None, :])
        total += tl.dot(x, x)
    tl.store(out_ptr + at[:, None] * SIZE + at[None, :], total)


@triton.jit
def specialized_kernel(x_ptr, count):
    tl.store(x_ptr, count)


def main() -> None:
    """Print what becomes of them."""
    x = torch.zeros(1 << 16)
    half = x.half()

    def calls(_):
        broken_kernel[(1,)](x)
        spilling_kernel[(1,)](x, x, SIZE=32, num_warps=1)
        wide_kernel[(1,)](half, x, 9, SIZE=128, num_stages=5)

    def specialized(_):
        for count in (1, 32, 7, 9):
            specialized_kernel[(1,)](x, count)

    outcomes = compile_all(record(MACHINES["l4"], {"faulty": calls}).launches, 2)
    launches = record(MACHINES["l4"], {"specialized": specialized}).launches
    rows = [dataclasses.asdict(outcome) for outcome in outcomes]
    sys.stdout.write(json.dumps([*rows, {"kernel": "count", "specialized_kernel": len(launches)}]))


if __name__ == "__main__":
    main()
