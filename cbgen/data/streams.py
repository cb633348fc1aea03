"""Inputs that can be read only once: stdin and pipes. Opened once, looked at, then read on from the first byte.

Enters: `sys.stdin` or the path of a pipe. Leaves: the first bytes, and a stream that begins with them; or, for what has
to be read from its end (Parquet), all of it in a temporary file that has no name and goes with the process.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import weakref
import zlib
from collections.abc import Callable
from typing import IO, Any

from cbgen.data.ranges import RangedFile
from cbgen.errors import BrokenInputError, InputError

_BLOCK_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 16


class OnceOnly:
    """A stream that is read once, from its first byte, after a look at its head.

    Args:
        stream: open for reading.
        name: what messages call it.
    """

    def __init__(self, stream: io.BufferedReader, name: str) -> None:
        self._stream = stream
        self._name = name
        self._head = b""
        self._taken = False

    @classmethod
    def stdin(cls) -> OnceOnly:
        """Standard input.

        Raises:
            InputError: it is closed.
        """
        if sys.stdin is None:
            raise InputError("stdin is closed; name a file, or pipe the rows in")
        stream: Any = sys.stdin.buffer
        return cls(stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream), "stdin")

    @classmethod
    def pipe(cls, path: str) -> OnceOnly:
        """A named pipe, or another path that cannot be read twice.

        Raises:
            OSError: it cannot be opened.
        """
        stream = open(path, "rb")  # noqa: SIM115
        pipe = cls(stream, path)
        weakref.finalize(pipe, stream.close)
        return pipe

    def head(self, is_enough: Callable[[bytes], bool]) -> bytes:
        """The first bytes: as many as it takes, or all there are.

        Raises:
            OSError: it cannot be read.
        """
        while not is_enough(self._head):
            block = self._stream.read1(_BLOCK_BYTES)
            if not block:
                break
            self._head += block
        return self._head

    def open(self) -> IO[bytes]:
        """The stream from its first byte.

        Raises:
            BrokenInputError: it was opened before.
        """
        if self._taken:
            raise BrokenInputError(f"{self._name} can be read only once; write it to a file and give that")
        self._taken = True
        return io.BufferedReader(_Continued(self._head, self._stream), _BLOCK_BYTES)


class Spooled:
    """All of a stream in a temporary file, which can be read as often as it takes.

    Attributes:
        size: bytes.
        checksum: CRC-32 of all of it.
    """

    def __init__(self, stream: OnceOnly) -> None:
        self.size = 0
        self.checksum = 0
        self._file = tempfile.TemporaryFile(prefix="cbgen-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        with stream.open() as source:
            while block := source.read(_BLOCK_BYTES):
                self._file.write(block)
                self.size += len(block)
                self.checksum = zlib.crc32(block, self.checksum)
        self._file.flush()

    def open(self) -> IO[bytes]:
        """The file, at its first byte; any number of readers, in any threads, go their own ways in it."""
        return io.BufferedReader(_Shared(self._file.fileno(), self.size), _BUFFER_BYTES)


class _Shared(RangedFile):
    """A position of its own in an open file."""

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._size = size

    def size(self) -> int:
        return self._size

    def read_range(self, position: int, count: int) -> bytes:
        return os.pread(self._descriptor, count, position)


class _Continued(io.RawIOBase):
    """The bytes that were looked at, then the rest."""

    def __init__(self, head: bytes, stream: io.BufferedReader) -> None:
        super().__init__()
        self._head = memoryview(head)
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), len(self._head))
        if not count:
            return int(self._stream.readinto1(buffer))
        buffer[:count] = self._head[:count]
        self._head = self._head[count:]
        return count

    def close(self) -> None:
        self._head = memoryview(b"")
        super().close()
