"""The software that a run stands on: Python, packages, torch and the GPU's driver.

Enters: what is installed. Leaves: a `Check` for each part. Torch is asked in a process of its own (`probe_torch`): so a
missing, broken or endlessly loading build is a finding like any other.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cbgen import __version__
from cbgen.doctor.check import Check

_PROBE_SECONDS = 30
_PROBE = """
import json, sys
try:
    import torch
except BaseException as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    sys.exit()
facts = {"version": torch.__version__, "cuda": torch.version.cuda or getattr(torch.version, "hip", None), "devices": []}
try:
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        facts["devices"].append({"name": torch.cuda.get_device_name(number), "free": free, "total": total})
except Exception as error:
    facts["device_error"] = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
print(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What torch says about itself. `cuda` is the version it was built for, or None for a CPU build."""

    version: str = ""
    cuda: str | None = None
    devices: list[dict[str, Any]] = field(default_factory=list)
    device_error: str = ""
    error: str = ""


def check_python() -> Check:
    """The interpreter."""
    system = f"{platform.system()} {platform.machine()}"
    return Check("python", "ok", f"Python {platform.python_version()} on {system}, cbgen {__version__}")


def check_packages() -> Iterator[Check]:
    """What cbgen depends on: one line for all that is well, and one for each that is not."""
    try:
        requirements = importlib.metadata.requires("cbgen") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check("packages", "warn", "cbgen is not installed as a package, so its dependencies are not known")
        return
    good = []
    for requirement in requirements:
        match = re.match(r"([\w.-]+)\s*>=\s*([\d.]+)\s*$", requirement)
        if match is None:  # an extra
            continue
        name, least = match.groups()
        version = _version_of(name)
        if name == "torch" and version is None:  # has a check of its own
            continue
        if version is None:
            yield Check("packages", "fail", f"{name} is not installed; run `pip install '{name}>={least}'`")
        elif _numbers(version) < _numbers(least):
            yield Check("packages", "fail", f"{name} {version} is older than {least}; run `pip install -U {name}`")
        else:
            good.append(f"{name} {version}")
    yield Check("packages", "ok", ", ".join(good))


def check_torch(torch: TorchFacts, driver: str | None) -> Check:
    """Whether torch loads, and was built for what this machine has."""
    if torch.error.startswith("ModuleNotFoundError: No module named 'torch'"):
        return Check("torch", "fail", "torch is not installed; run `pip install torch`")
    if torch.error:
        return Check("torch", "fail", f"torch cannot be used ({torch.error}); reinstall it")
    if torch.cuda is None and driver is not None:
        return Check(
            "torch",
            "warn",
            f"torch {torch.version} is a CPU build, but NVIDIA driver {driver} is present; reinstall it with "
            "`uv pip install --reinstall torch --torch-backend=auto` to use the GPU",
        )
    if torch.cuda is None:
        return Check("torch", "ok", f"torch {torch.version}, a CPU build")
    if not torch.devices:
        reason = f"; torch says: {torch.device_error}" if torch.device_error else ""
        way_out = (
            f"the driver {driver} may be too old, or CUDA_VISIBLE_DEVICES may hide the GPU"
            if driver
            else "no NVIDIA driver was found, and in a container the GPU must be passed in"
        )
        return Check(
            "torch",
            "warn",
            f"torch {torch.version} is built for CUDA {torch.cuda} but sees no GPU, so runs use the CPU: "
            f"{way_out}{reason}",
        )
    built = f"torch {torch.version} for CUDA {torch.cuda}"
    return Check("torch", "ok", f"{built}, NVIDIA driver {driver}" if driver else built)


def check_triton(version: str | None, compiler: str | None, *, has_headers: bool) -> Check:
    """Whether the kernels for a GPU can be built.

    Args:
        version: of Triton.
        compiler: a C compiler, with which some versions of Triton build what launches a kernel.
        has_headers: whether Python's headers are there, which that needs as well.
    """
    slower = "without, a run on the GPU uses plain torch and is much slower"
    if version is None:
        return Check("triton", "warn", f"Triton is not installed; {slower}; run `pip install triton`")
    if compiler is None:
        return Check("triton", "warn", f"Triton {version} may need a C compiler; {slower}; install gcc, or set CC")
    if not has_headers:
        return Check("triton", "warn", f"Triton {version} may need Python.h; {slower}; install python3-dev")
    return Check("triton", "ok", f"Triton {version}")


def probe_torch() -> TorchFacts:
    """Ask torch in a process of its own, and wait no longer than half a minute."""
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
        return TorchFacts(**json.loads(result.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"loading it took more than {_PROBE_SECONDS} seconds")
    except OSError as error:
        return TorchFacts(error=f"Python cannot be started: {error.strerror}")
    except (ValueError, IndexError, TypeError):
        return TorchFacts(error=f"loading it ended Python with exit code {result.returncode}")


def find_driver(proc: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Version of the NVIDIA driver, or None where there is none."""
    with contextlib.suppress(OSError):
        match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", proc.read_text(errors="replace"))
        if match is not None:
            return match[1]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return result.stdout.split("\n")[0].strip() or None
    return None


def find_triton() -> Check:
    """`check_triton` of this machine."""
    compiler = os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return check_triton(_version_of("triton"), compiler, has_headers=headers.exists())


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers; what follows them (rc1, +cpu) does not decide here."""
    return tuple(int(number) for number in re.match(r"[\d.]*", version).group().strip(".").split(".") if number)  # type: ignore[union-attr]
