"""The stages as data: order, time limits, and how many processes share the work of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        module: of `tests.gpu_check`; it has a function `run(context)`.
        seconds: time limit on a GPU, start of the process included; `dry_seconds` is that of a dry run.
        parts: processes at once, each with every `parts`-th case: Triton compiles on one core a process.
        options: for the module.
    """

    name: str
    module: str
    seconds: float
    dry_seconds: float = 180.0
    parts: int = 1
    options: tuple[str, ...] = ()


STAGES = (
    Stage("machine", "machine", 45),
    Stage("kernels", "kernels", 110, parts=8),
    Stage("engine", "engine", 130, parts=8),
    Stage("decode-kernel", "decode_kernel", 70),
    Stage("w1-8b", "workload", 150, options=("W1", "8b")),
    Stage("w5-0.6b", "workload", 100, options=("W5", "0.6b")),
    Stage("hf-cb", "hf_cb", 120, options=("W1", "8b")),
    Stage("memory", "memory", 40),
)
"""By value: what a cut-off leaves out is what matters least."""
