"""What a stage's code is given: the device, sizes, the time that is left, and where findings go."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

import torch

Item = TypeVar("Item")
_MARGIN_SECONDS = 5.0  # a stage stops so long before it would be killed


@dataclass(frozen=True, slots=True)
class Context:
    """One process of a stage.

    Attributes:
        options: of the stage.
        machine: facts of the stage `machine`; empty where it failed or was not asked for.
        breaks: an operator that answers wrongly on purpose, or None.
        deadline: by the monotonic clock.
    """

    device: torch.device
    dry: bool
    options: tuple[str, ...]
    machine: dict[str, Any]
    breaks: str | None
    part: int
    parts: int
    deadline: float
    stream: TextIO

    def say(self, message: dict[str, Any]) -> None:
        self.stream.write(json.dumps(message, default=str) + "\n")
        self.stream.flush()

    def case(self, **values: Any) -> None:
        """One finding."""
        self.say({"case": values})

    def facts(self, **values: Any) -> None:
        """What holds for the whole stage."""
        self.say({"facts": values})

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        """Those of this process."""
        return items[self.part :: self.parts]

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def bandwidth(self) -> float | None:
        """Measured bytes a second of a copy, those read and those written."""
        value: float | None = self.machine.get("copy_bytes_per_s")
        return value

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


def make_context(task: dict[str, Any], stream: TextIO, started: float) -> Context:
    """From what the driver said.

    Raises:
        SystemExit: no GPU, and this is not a dry run.
    """
    if not task["dry"] and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no CUDA device; rehearse with --dry")
    if not task["dry"]:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // task["parts"]))
    return Context(
        device=torch.device("cpu" if task["dry"] else "cuda"),
        dry=task["dry"],
        options=tuple(task["options"]),
        machine=task["machine"],
        breaks=task["breaks"],
        part=task["part"],
        parts=task["parts"],
        deadline=started + task["seconds"] - _MARGIN_SECONDS,
        stream=stream,
    )
