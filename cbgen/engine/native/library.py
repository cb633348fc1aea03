"""The compiled operators as Python functions.

`open_library` builds and loads; each kernel's Python module then asks for its functions by name and argument types.
ctypes releases the interpreter lock during a call. Pointers are passed as plain ints (`Tensor.data_ptr()`, 0 for none);
whoever calls keeps the tensors alive and vouches for their shapes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cbgen.engine.native.build import NativeBuildError, Notice, build_library

Pointer = ctypes.c_void_p
Int = ctypes.c_int
Int64 = ctypes.c_int64
Float = ctypes.c_float

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as `dispatch` in kernels/vec.h reads them


class NativeLibrary:
    """One loaded library. Functions are typed when they are asked for first, once per caller."""

    def __init__(self, path: Path) -> None:
        """Load it.

        Raises:
            NativeBuildError: the system's loader refuses the file.
        """
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeBuildError(f"the compiled operators cannot be loaded ({error})") from error
        self.path = path

    def function(self, name: str, argument_types: list[Any], result_type: Any = None) -> Callable[..., Any]:
        """The C function `name`; a call checks the number of arguments, and converts them to these types.

        Raises:
            AttributeError: there is no such function.
        """
        # A function object of its own per caller, so that nobody's types can be changed by somebody else.
        prototype = ctypes.CFUNCTYPE(result_type, *argument_types)
        address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
        assert address is not None
        return prototype(address)


def open_library(notice: Notice, *, plain: bool = False) -> NativeLibrary:
    """Build, or take from the cache, and load. Arguments and errors as those of `build_library`."""
    return NativeLibrary(build_library(notice, plain=plain))
