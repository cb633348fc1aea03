"""Triton's interpreter, on CPU: `tests/conftest.py` asks for it before anything can have imported Triton."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]  # torch on other systems has none


@pytest.fixture(autouse=True, scope="session")
def _interpreter():
    """A kernel that is compiled here would ask for a GPU, far from the reason."""
    import triton.language
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(triton.language.cdiv, InterpretedFunction), "TRITON_INTERPRET=1 came after `import triton`"
