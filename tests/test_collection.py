"""The search for reference cycles waits for a start, and is as before afterwards."""

import gc
import subprocess
import sys
import weakref

import pytest

from cbgen.collection import no_collection, set_apart


class Node:
    def __init__(self):
        self.itself = self


def test_what_is_made_without_collection_is_set_apart_until_the_end():
    frozen = gc.get_freeze_count()
    with set_apart():
        with no_collection():
            assert not gc.isenabled()
            node = Node()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
        gone = weakref.ref(node)
        del node
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None


def test_collection_comes_back_after_an_error():
    with pytest.raises(KeyError), set_apart(), no_collection():
        raise KeyError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collection_that_another_switched_off_stays_off():
    gc.disable()
    try:
        with set_apart(), no_collection():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_a_process_ends_without_a_last_collection():
    """Cycles are left as they are: a finalizer in one does not run."""
    code = (
        "import gc, sys, cbgen.cli\n"
        "class Node:\n"
        "    def __del__(self): print('collected')\n"
        "gc.disable()\n"
        "node = Node(); node.itself = node; del node\n"
        "sys.argv = ['cbgen', '--version']\n"
    )
    ends = ("cbgen.cli.main()", "cbgen.cli.main(['--version'])")  # the second in a process that is not its own
    outputs = [
        subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True).stdout for end in ends
    ]
    assert ["collected" in output for output in outputs] == [False, True]


def test_triton_has_nothing_to_say_when_a_process_ends():
    pytest.importorskip("triton")
    code = "import sys, triton, cbgen.cli; sys.argv = ['cbgen', '--version']; cbgen.cli.main()"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
