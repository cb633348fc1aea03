"""The operators on CPU, by the library that `cbgen.engine.native` compiles."""

from __future__ import annotations

from cbgen.engine.native.gemm import NativeGemm
from cbgen.engine.native.library import NativeLibrary
from cbgen.engine.operators.reference import ReferenceOperators


class NativeOperators(ReferenceOperators):
    """See `Operators`; what has no kernel yet is done as in the reference.

    Attributes:
        library: for those who have kernels of their own in it.
        gemm: its linear layers.
    """

    name = "native"

    def __init__(self, library: NativeLibrary) -> None:
        self.library = library
        self.gemm = NativeGemm(library)
