"""Linear layers in the form that computes fastest: weights joined where they share their input, and packed.

Enters: transformers' own `nn.Linear` modules. Leaves: modules that compute the same, of one of three kinds: our kernel
on a packed weight (CPUs with AVX512-BF16), oneDNN on a packed weight (CPUs with AMX), plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cbgen.engine.native.gemm import Epilogue, NativeGemm, interleave
from cbgen.engine.operators.base import Activation, Operators

Packing = Literal["native", "onednn", "none"]


class Linear(nn.Module):
    """x W^T + bias, with a way to add it to something."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        raise NotImplementedError

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        """`residual` [M, N] grows by what [M, K] becomes."""
        residual.add_(self.forward(x))


class PlainLinear(Linear):
    """torch's own product, of weights that may have been joined."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight  # [N, K]
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear.forward`."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        """See `Linear.add_to`; without a bias the product itself adds, and its sum is rounded once."""
        if self.bias is None:
            residual.addmm_(x, self.weight.t())
        else:
            super().add_to(x, residual)


_TILE_ROWS = 16  # of AMX: rows up to the next multiple cost nothing


class OneDnnLinear(Linear):
    """oneDNN's product of a weight in oneDNN's own layout; on CPUs with AMX nothing we have is faster.

    Rows are filled up to whole tiles: oneDNN compiles a kernel for every number of rows it meets.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear.forward`."""
        rows = x.flatten(0, -2)
        num_rows = rows.shape[0]
        if num_rows % _TILE_ROWS:
            rows = F.pad(rows, (0, 0, 0, -num_rows % _TILE_ROWS))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return out[:num_rows].view(*x.shape[:-1], out.shape[-1])


class NativeLinear(Linear):
    """Our kernel. A row's result is bitwise the same whatever other rows there are."""

    def __init__(self, gemm: NativeGemm, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.gemm = gemm
        self.packed = gemm.pack(weight)
        self.bias = None if bias is None else bias.float()

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear.forward`."""
        rows = x.flatten(0, -2)
        out = torch.empty(rows.shape[0], self.packed.num_columns, dtype=x.dtype)
        return self.gemm.linear(rows, self.packed, self.bias, out).view(*x.shape[:-1], self.packed.num_columns)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        """See `Linear.add_to`; one pass, rounded once."""
        self.gemm.linear(x, self.packed, self.bias, residual, "add")


class GatedLinear(nn.Module):
    """act(x G^T) * (x U^T): one product for both, then the activation."""

    def __init__(self, joined: Linear, operators: Operators, activation: Activation) -> None:
        super().__init__()
        self.joined = joined
        self.operators = operators
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, I]."""
        return self.operators.activation_mul(self.joined(x), self.activation)


class NativeGatedLinear(nn.Module):
    """The same with the activation inside the kernel: the gate is never written to memory."""

    def __init__(self, gemm: NativeGemm, weight: Tensor, bias: Tensor | None, activation: Activation) -> None:
        super().__init__()
        self.gemm = gemm
        self.packed = gemm.pack(weight)
        self.bias = None if bias is None else bias.float()
        self.epilogue: Epilogue = "silu_mul" if activation == "silu" else "gelu_tanh_mul"

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, I]."""
        out = torch.empty(x.shape[0], self.packed.num_columns // 2, dtype=x.dtype)
        return self.gemm.linear(x, self.packed, self.bias, out, self.epilogue)


@dataclass(frozen=True, slots=True)
class LinearFactory:
    """Makes linear layers of one kind."""

    operators: Operators
    gemm: NativeGemm | None
    packing: Packing

    def join(self, modules: list[nn.Linear]) -> Linear:
        """One layer for several that read the same input; their outputs lie side by side."""
        return self.make(*_joined(modules))

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A layer for [N, K] and [N] or None."""
        if self.packing == "native" and self.gemm is not None and self.gemm.accepts(weight):
            return NativeLinear(self.gemm, weight, bias)
        if self.packing == "onednn" and weight.dtype is torch.bfloat16:
            return OneDnnLinear(weight, bias)
        return PlainLinear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> nn.Module:
        """A gated layer of [2I, K]: the gate's rows first."""
        half = weight.shape[0] // 2
        if self.packing == "native" and self.gemm is not None and self.gemm.accepts(weight):
            mixed = interleave(weight[:half], weight[half:])
            if mixed is not None:
                bias = None if bias is None else interleave(bias[:half], bias[half:])
                return NativeGatedLinear(self.gemm, mixed, bias, activation)
        return GatedLinear(self.make(weight, bias), self.operators, activation)


def joined_weights(modules: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of several layers, one below the other; None for no bias at all."""
    return _joined(modules)


def _joined(modules: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    if len(modules) == 1:
        return modules[0].weight.detach(), None if modules[0].bias is None else modules[0].bias.detach()
    weight = torch.cat([module.weight.detach() for module in modules])
    if all(module.bias is None for module in modules):
        return weight, None
    biases = [weight.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in modules]
    return weight, torch.cat(biases)


def choose_packing(dtype: torch.dtype, device: torch.device, gemm: NativeGemm | None) -> Packing:
    """Which kind of linear layer is fastest on this machine."""
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return "none"
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if has_onednn and _cpu_has_amx():
        return "onednn"
    return "native" if gemm is not None and gemm.is_available else "none"


def _cpu_has_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def is_plain_linear(module: Any) -> bool:
    """Whether it is torch's own class: a subclass may compute something else."""
    return type(module) is nn.Linear
