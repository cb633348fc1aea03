"""How large the attention kernels' tiles are: plain data by GPU, head size and dtype, and the look-up.

Enters: what the GPU is called and what a call's tensors look like. Leaves: a configuration, a value.

A tile of keys and values is read with asynchronous copies while earlier ones are worked on. Which block it lies in is
read before it, ahead by as much again: of `num_stages`, half are spent on that, and (num_stages - 1) / 2 tiles are on
their way. They must fit in shared memory: 227 KB for a program on Hopper, 163 KB on A100, 99 KB on the other Ampere
and Ada GPUs, which the default is made for. Decoding reads much and computes little: enough bytes must be on their way
to keep the memory busy, which two or three programs per multiprocessor do best. Prefill computes much: its tiles are
nearly square. float32 has no tensor cores at full precision; its tiles are small because every product goes through
registers. None of these has been timed yet: they are what compiles without spilled registers, with the bytes on their
way that the memory's speed times its latency asks for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Of the decode kernel: how a program reads the context of one row and one KV head.

    Attributes:
        tile: positions read at a time; a power of two from 16.
        rows: query heads a program takes at most; a power of two from 16, the least that tensor cores multiply.
        num_warps, num_stages: as Triton means them.
    """

    tile: int
    rows: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """Of the extend kernel.

    Attributes:
        tile: positions read at a time; a power of two from 16.
        rows: query tokens times heads of a program; a power of two from 16.
        num_warps, num_stages: as Triton means them.
    """

    tile: int
    rows: int
    num_warps: int
    num_stages: int


_DECODE_FLOAT32 = {64: DecodeConfig(64, 16, 8, 3), 128: DecodeConfig(16, 16, 4, 3), 256: DecodeConfig(16, 16, 8, 1)}
_EXTEND_FLOAT32 = {64: ExtendConfig(16, 32, 8, 2), 128: ExtendConfig(16, 16, 4, 2), 256: ExtendConfig(16, 16, 8, 2)}

# architecture -> bytes of an element -> widest head size -> configuration
DECODE: dict[str, dict[int, dict[int, DecodeConfig]]] = {
    "hopper": {
        2: {64: DecodeConfig(128, 16, 4, 5), 128: DecodeConfig(64, 16, 4, 5), 256: DecodeConfig(32, 16, 4, 5)},
        4: _DECODE_FLOAT32,
    },
    "a100": {
        2: {64: DecodeConfig(128, 16, 4, 3), 128: DecodeConfig(64, 16, 4, 3), 256: DecodeConfig(32, 16, 4, 3)},
        4: _DECODE_FLOAT32,
    },
    "default": {
        2: {64: DecodeConfig(64, 16, 4, 5), 128: DecodeConfig(32, 16, 4, 5), 256: DecodeConfig(32, 16, 4, 3)},
        4: _DECODE_FLOAT32,
    },
}

EXTEND: dict[str, dict[int, dict[int, ExtendConfig]]] = {
    "hopper": {
        2: {64: ExtendConfig(64, 128, 8, 3), 128: ExtendConfig(64, 128, 8, 3), 256: ExtendConfig(32, 128, 8, 3)},
        4: _EXTEND_FLOAT32,
    },
    "a100": {
        2: {64: ExtendConfig(64, 128, 8, 3), 128: ExtendConfig(32, 128, 8, 3), 256: ExtendConfig(16, 64, 8, 3)},
        4: _EXTEND_FLOAT32,
    },
    "default": {
        2: {64: ExtendConfig(64, 128, 8, 3), 128: ExtendConfig(32, 128, 8, 3), 256: ExtendConfig(16, 64, 8, 3)},
        4: _EXTEND_FLOAT32,
    },
}


def architecture(capability: tuple[int, int]) -> str:
    """The table's name for a CUDA compute capability; what nobody has tuned for gets the smallest tiles."""
    return {(8, 0): "a100", (9, 0): "hopper"}.get(capability, "default")


def decode_config(capability: tuple[int, int], head_dim: int, itemsize: int) -> DecodeConfig:
    """For heads of at most `head_dim` values of `itemsize` bytes."""
    return DECODE[architecture(capability)][itemsize][_width(head_dim)]


def extend_config(capability: tuple[int, int], head_dim: int, itemsize: int) -> ExtendConfig:
    """For heads of at most `head_dim` values of `itemsize` bytes."""
    return EXTEND[architecture(capability)][itemsize][_width(head_dim)]


def _width(head_dim: int) -> int:
    """The table's step for a head size."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
