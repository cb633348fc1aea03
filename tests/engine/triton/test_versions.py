"""The kernels' results on an older Triton: each of the interpreter's tests so often, in a process of its own."""

import os
import re
import subprocess
import sys

from tests.engine.triton.conftest import EVERY
from tests.engine.triton.older import OLDER_TRITON, ROOT, needs_older_triton, python_path

FILES = ("test_attention.py", "test_elementwise.py", "test_sampling.py", "test_slots.py")
STRIDE = 6  # of the tests there are


@needs_older_triton
def test_the_older_triton_gives_the_same_results(capsys):
    environment = dict(os.environ) | {"PYTHONPATH": python_path(OLDER_TRITON), EVERY: str(STRIDE)}
    directory = ROOT / "tests/engine/triton"
    files = [str(directory / name) for name in FILES if (directory / name).exists()]
    known = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"  # its interpreter's, of NumPy
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", known, *files]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    counts = re.search(r"(\d+) passed(?:, (\d+) deselected)?", done.stdout)
    assert counts, done.stdout[-500:]
    assert int(counts[1]) >= 20
    assert "Triton 3.6." in done.stdout
    with capsys.disabled():
        sys.stdout.write(f"\n{counts[1]} tests on Triton 3.6 ")
