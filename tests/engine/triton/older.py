"""Where the older Triton is, and how a process gets it."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OLDER_TRITON = Path(sys.prefix) / "triton-3.6"  # `make setup` puts it there
needs_older_triton = pytest.mark.skipif(not OLDER_TRITON.is_dir(), reason=f"there is no Triton 3.6 in {OLDER_TRITON}")


def python_path(triton: Path | None) -> str:
    """For PYTHONPATH: this repository, and in front of the installed Triton another one."""
    return os.pathsep.join([*([str(triton)] if triton else []), str(ROOT)])
