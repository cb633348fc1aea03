"""Python's search for reference cycles, kept out of the way of a start.

Importing torch and transformers makes over a million objects that live until the end. Python would search them for
cycles again and again while they come in (a third of the time that the imports take), in every full search of a long
run, and once more before it exits. Here they are set apart, and the search goes on among what a run makes itself.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Nothing is searched inside, and what exists at its end is set apart from later searches: see `set_apart`.

    Does nothing where another has switched the search off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # first: the search would begin with all that was made inside
        gc.enable()


@contextlib.contextmanager
def set_apart() -> Iterator[None]:
    """Around all use of what `no_collection` set apart; afterwards it is searched like anything else, so that a model
    can be freed.
    """
    try:
        yield
    finally:
        gc.unfreeze()


def skip_last_collection() -> None:
    """For a process that is about to exit: no last search. Its memory goes back to the system all the same.

    Not with Triton, whose bindings list on stderr all that is left at the end.
    """
    if "triton" not in sys.modules:
        gc.disable()
        gc.freeze()
