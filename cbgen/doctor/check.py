"""One finding of `cbgen doctor`, and how sizes are written in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: a sentence that says what is, and the way out where something is wrong."""

    name: str
    status: Status
    message: str


def as_gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / GIB:,.1f} GiB"
