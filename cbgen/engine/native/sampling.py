"""Choosing tokens on CPU: logits in, `kernels/sampling.cpp` does the work, token ids out.

Meaning as in `cbgen.engine.operators.base`. Logits are float32, bfloat16 or float16, on the CPU, rows contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbgen.engine.native.library import DTYPE_CODES, Int, Int64, NativeLibrary, Pointer


class NativeSampling:
    """The kernels, for one loaded library."""

    def __init__(self, library: NativeLibrary) -> None:
        self._argmax = library.function("cbgen_argmax", [Pointer, Int64, Int64, Int64, Pointer, Int, Int])
        self._draw = library.function("cbgen_draw", [Pointer, Int64, Int64, Pointer, Int64, *[Pointer] * 6, Int, Int])

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Operators.argmax`."""
        num_rows, vocab_size = logits.shape
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        self._argmax(
            logits.data_ptr(), logits.stride(0), num_rows, vocab_size, token_ids.data_ptr(),
            DTYPE_CODES[logits.dtype], torch.get_num_threads(),
        )  # fmt: skip
        return token_ids

    def draw(
        self,
        logits: Tensor,
        rows: npt.NDArray[np.int64],
        temperature: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int32],
        top_p: npt.NDArray[np.float32],
        log_min_p: npt.NDArray[np.float32],
        uniforms: npt.NDArray[np.float64],
    ) -> Tensor:
        """See `Operators.draw`."""
        token_ids = torch.empty(len(rows), dtype=torch.int64)
        columns: list[npt.NDArray[Any]] = [
            np.ascontiguousarray(column, dtype=dtype)
            for column, dtype in (
                (rows, np.int64), (temperature, np.float32), (top_k, np.int32), (top_p, np.float32),
                (log_min_p, np.float32), (uniforms, np.float64),
            )
        ]  # fmt: skip
        first, *others = (column.ctypes.data for column in columns)
        self._draw(
            logits.data_ptr(), logits.stride(0), logits.shape[1], first, len(rows), *others, token_ids.data_ptr(),
            DTYPE_CODES[logits.dtype], torch.get_num_threads(),
        )  # fmt: skip
        return token_ids
