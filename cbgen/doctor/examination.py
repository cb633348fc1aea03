"""`cbgen doctor`: is this machine fit to run, and what to do where it is not.

Enters: nothing but the machine, and a path where an output would go. Leaves: a list of `Check`, as text or as one JSON
document. What is looked up (`find_*`, `probe_torch`) is apart from what is made of it (`check_*`, which are pure but
for the disk).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from cbgen.doctor.check import GIB, Check
from cbgen.doctor.disks import check_cache, check_free_space, check_hub, check_writing, hub_cache, output_directory
from cbgen.doctor.hardware import (
    check_bfloat16,
    check_cores,
    check_devices,
    check_memory,
    find_cores,
    find_cpu_flags,
    find_cpu_quota,
    find_memory,
)
from cbgen.doctor.software import check_packages, check_python, check_torch, find_driver, find_triton, probe_torch
from cbgen.errors import ModelError

DOCUMENT_VERSION = 1
EXIT_FAIL = ModelError.exit_code  # the one that says: it is the environment


def examine(output: str | None = None) -> list[Check]:
    """Look at the whole machine; takes seconds and leaves nothing behind.

    Args:
        output: where an output would go; the working directory if not given.
    """
    torch = probe_torch()
    directory = output_directory(output)
    cache = Path(hub_cache())
    checks = [
        check_python(),
        *check_packages(),
        check_torch(torch, find_driver()),
        *check_devices(torch),
        *([find_triton()] if torch.devices else []),
        check_bfloat16(find_cpu_flags(), has_gpu=bool(torch.devices)),
        check_cores(find_cores(), find_cpu_quota()),
        check_memory(*find_memory()),
        check_cache(cache),
        check_free_space("cache disk", cache, enough=20 * GIB),
        check_hub(),
    ]
    if directory is None:
        return [*checks, Check("output", "warn", f"{output} is on an object store, which was not tried")]
    return [*checks, check_free_space("output disk", directory, enough=GIB), check_writing(directory)]


def format_checks(checks: list[Check]) -> str:
    """One line each, for people."""
    width = max(len(check.name) for check in checks)
    lines = [f"{check.status:<4}  {check.name:<{width}}  {check.message}" for check in checks]
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail")}
    return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items())])


def as_document(checks: list[Check]) -> dict[str, Any]:
    """The same for programs."""
    return {"version": DOCUMENT_VERSION, "ok": not failed(checks), "checks": [asdict(check) for check in checks]}


def failed(checks: list[Check]) -> bool:
    """Whether anything stands in the way of a run."""
    return any(check.status == "fail" for check in checks)
