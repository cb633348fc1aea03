"""GPUs that kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

KIBIBYTE = 1024


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU to compile for.

    Attributes:
        capability: its compute capability, by which wrappers choose their tables.
        max_shared: bytes of shared memory that one program may have (CUDA C++ programming guide, compute capabilities).
        shares_kernels: only kernels with a table differ from those of another machine here.
    """

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    max_shared: int
    shares_kernels: bool = False


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("a100", (8, 0), 108, 163 * KIBIBYTE),
        Machine("l4", (8, 9), 58, 99 * KIBIBYTE, shares_kernels=True),  # has the table for what is not known
        Machine("h200", (9, 0), 132, 227 * KIBIBYTE),
    )
}
