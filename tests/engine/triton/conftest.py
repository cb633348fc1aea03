"""Triton's interpreter, on CPU: `tests/conftest.py` asks for it before anything can have imported Triton."""

import importlib.util
import os

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]  # torch on other systems has none
EVERY = "TRITON_TESTS_EVERY"  # set to 5, one test in five runs


@pytest.fixture(autouse=True, scope="session")
def _interpreter():
    """A kernel that is compiled here would ask for a GPU, far from the reason."""
    import triton.language
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(triton.language.cdiv, InterpretedFunction), "TRITON_INTERPRET=1 came after `import triton`"


@pytest.fixture(autouse=True, scope="session")
def _patched_once(_interpreter):
    """The interpreter replaces Triton's language anew for each call of a function inside a kernel, which takes longer
    than the function: leave out what is replaced already."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang

    def replace_once(function):
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return replace(function)
        return None

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang", replace_once)
        yield


def pytest_collection_modifyitems(config, items):
    stride = int(os.environ.get(EVERY, "1"))
    if stride > 1:
        config.hook.pytest_deselected(items=[item for index, item in enumerate(items) if index % stride])
        items[:] = items[::stride]


def pytest_report_header():
    if importlib.util.find_spec("triton"):
        import triton

        return f"Triton {triton.__version__}"
    return []
