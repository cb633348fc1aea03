"""Packed bfloat16 linear layers: tensors in, `kernels/gemm.cpp` does the work. CPUs with AVX512-BF16 only.

Enters: a weight once, to be packed; then activations [M, K]. Leaves: [M, N], or the result of an epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cbgen.engine.native.library import Int, Int64, NativeLibrary, Pointer

Epilogue = Literal["store", "add", "silu_mul", "gelu_tanh_mul"]
_EPILOGUES: dict[str, int] = {"store": 0, "add": 1, "silu_mul": 2, "gelu_tanh_mul": 3}
_HALF_PANEL = 16  # columns of the gate, then as many of what it multiplies


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A packed weight [num_columns, num_features], as `cbgen_pack_weight` lays it out."""

    data: Tensor
    num_columns: int
    num_features: int


class NativeGemm:
    """The kernel, for one loaded library."""

    def __init__(self, library: NativeLibrary) -> None:
        self.is_available = bool(library.function("cbgen_has_linear", [], Int)())
        self._packed_bytes = library.function("cbgen_packed_bytes", [Int64, Int64], Int64)
        self._pack = library.function("cbgen_pack_weight", [Pointer, Int64, Int64, Int64, Pointer, Int])
        self._linear = library.function(
            "cbgen_linear",
            [Pointer, Int64, Pointer, Pointer, Int64, Int64, Int64, Pointer, Int64, Int, Int],
        )

    def accepts(self, weight: Tensor) -> bool:
        """Whether [N, K] can be packed: bfloat16 and an even K."""
        return self.is_available and weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0

    def pack(self, weight: Tensor) -> NativeWeight:
        """Lay out [N, K] for the kernel; the original is not needed any more."""
        num_columns, num_features = weight.shape
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        data = torch.empty(self._packed_bytes(num_columns, num_features), dtype=torch.uint8)
        self._pack(
            weight.data_ptr(), weight.stride(0), num_columns, num_features, data.data_ptr(), torch.get_num_threads()
        )
        return NativeWeight(data, num_columns, num_features)

    def linear(
        self, x: Tensor, weight: NativeWeight, bias: Tensor | None, out: Tensor, epilogue: Epilogue = "store"
    ) -> Tensor:
        """`out` becomes x W^T + bias after the epilogue; returns it.

        Args:
            x: [M, K] bfloat16; rows may be strided.
            weight: packed [N, K]; for the `_mul` epilogues, rows alternate as `interleave` lays them.
            bias: [N] float32 or None.
            out: [M, N] bfloat16, [M, N / 2] for `_mul`; rows may be strided. `add` adds to what it holds.
            epilogue: what becomes of the sums.
        """
        self._linear(
            x.data_ptr(),
            x.stride(0),
            weight.data.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            x.shape[0],
            weight.num_columns,
            weight.num_features,
            out.data_ptr(),
            out.stride(0),
            _EPILOGUES[epilogue],
            torch.get_num_threads(),
        )
        return out


def interleave(gate: Tensor, other: Tensor) -> Tensor | None:
    """Rows of both in turn, 16 of the gate and 16 of the other.

    Args:
        gate, other: [I, ...].

    Returns:
        [2I, ...]; None where 16 does not divide I.
    """
    num_rows = gate.shape[0]
    if num_rows % _HALF_PANEL:
        return None
    groups = (num_rows // _HALF_PANEL, _HALF_PANEL, *gate.shape[1:])
    return torch.stack([gate.view(groups), other.view(groups)], dim=1).flatten(0, 2)
