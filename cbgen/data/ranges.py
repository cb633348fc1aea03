"""A file that is read by ranges, whatever it lies on.

Enters: a position, from whoever reads or seeks. Leaves: bytes, each range of them by one call of `read_range`.
"""

from __future__ import annotations

import io
import os
from typing import Any


class RangedFile(io.RawIOBase):
    """Keeps a position. Who inherits from it says how many bytes there are, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self._position = 0

    def size(self) -> int:
        """Bytes in all.

        Raises:
            OSError: the file is not there, or cannot be asked for.
        """
        raise NotImplementedError

    def read_range(self, position: int, count: int) -> bytes:
        """Bytes of the file, which has so many there.

        Raises:
            OSError: they cannot be read.
        """
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: 0}[whence]
        self._position = max(0, offset + (self.size() if whence == os.SEEK_END else base))
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.size() - self._position)
        count = left if size is None or size < 0 else min(size, left)
        if not count:
            return b""
        data = self.read_range(self._position, count)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
