"""Compressed files to bytes: as far as they can be read, however they are torn.

Enters: a way to open the file. Leaves: its decompressed bytes in blocks, then the error, if it has one. Members and
frames that follow each other are one file; zero bytes behind a gzip member are padding.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import pyarrow as pa

_BLOCK_BYTES = 1 << 16
_SMALL_BYTES = 1 << 12
_SKIPPED_BYTES = 1 << 20
_ARROW_BYTES = 1 << 16  # what Arrow reads of a compressed file at a time
_MOST_ZEROS = 16  # that a gzip member ends with: empty blocks, a checksum and a size
_GZIP = 31  # zlib's number for gzip's header and checksum around the data


def decompressed(open_raw: Callable[[], IO[bytes]], kind: str, skipped: int = 0, *, once: bool) -> Iterator[bytes]:
    """The bytes of a compressed file after the first `skipped`.

    Args:
        open_raw: opens the compressed bytes at the first one.
        kind: `gzip` or `zstd`.
        skipped: decompressed bytes that are not wanted.
        once: it cannot be opened again, so that up to 4 KiB in front of a fault in zstd may be lost.

    Raises:
        OSError: it is torn, and all in front of the tear came before; or damaged, and up to 64 KiB of gzip in front
            of the damage are not trusted.
        pyarrow.ArrowException: the same.
    """
    if kind == "gzip":
        return _gunzip(open_raw, skipped, once=once)
    return _unzstd(open_raw, skipped, once=once)


# -- gzip -------------------------------------------------------------------------------------------------------------


def _gunzip(open_raw: Callable[[], IO[bytes]], skipped: int, *, once: bool) -> Iterator[bytes]:
    with open_raw() as raw:
        for block in _members(_as_it_comes(raw) if once else raw.read):
            rest = block[skipped:]
            skipped -= len(block) - len(rest)
            if rest:
                yield rest


def _members(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """All members' bytes. Zero bytes are held back: where they end the file they may stand for what was lost."""
    members = _Members()
    num_zeros = 0
    while data := read(_BLOCK_BYTES):
        content = data.rstrip(b"\0")
        if content:
            for start in range(0, num_zeros, _BLOCK_BYTES):
                yield from members.add(bytes(min(_BLOCK_BYTES, num_zeros - start)))
            yield from members.add(content)
            num_zeros = 0
        num_zeros += len(data) - len(content)
    last = list(members.add(bytes(min(num_zeros, _MOST_ZEROS))))
    if not members.at_end:
        raise OSError("the file ends within its compressed data")
    yield from last


class _Members:
    """A decoder of gzip members that follow each other."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP)

    @property
    def at_end(self) -> bool:
        """Whether a member has ended and no other has begun."""
        return self._member.eof

    def add(self, data: bytes) -> Iterator[bytes]:
        """What more of the file decodes to.

        Raises:
            OSError: it is damaged.
        """
        while data:
            if self.at_end:
                data = data.lstrip(b"\0")
                if not data:
                    return
                self._member = zlib.decompressobj(_GZIP)
            try:
                yield from self._inflate(data)
            except zlib.error as error:
                raise OSError(f"its compressed data is damaged: {error}") from error
            data = self._member.unused_data

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        is_full = True  # more may be ready than a block holds
        while not self._member.eof and (data or is_full):
            block = self._member.decompress(data, _BLOCK_BYTES)
            yield block
            is_full = len(block) == _BLOCK_BYTES
            data = self._member.unconsumed_tail


# -- zstd -------------------------------------------------------------------------------------------------------------


def _unzstd(open_raw: Callable[[], IO[bytes]], skipped: int, *, once: bool) -> Iterator[bytes]:
    """Arrow throws away all that the failing call had made, so what is near a fault is read again in smaller steps."""
    sizes = (_SMALL_BYTES,) if once else (_BLOCK_BYTES, _SMALL_BYTES, 1)
    slow_from = None
    for size in sizes:
        raw = _Paced(open_raw(), slow_from, once=once)
        try:
            with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd") as stream:
                _skip(stream, skipped)
                while block := stream.read(size):
                    skipped += len(block)
                    yield block
                return
        except (OSError, pa.ArrowException):
            if size == sizes[-1]:
                raise
        slow_from = raw.position - 2 * _ARROW_BYTES if slow_from is None else slow_from


def _skip(stream: pa.NativeFile, num_bytes: int) -> None:
    while num_bytes > 0:
        block = stream.read(min(num_bytes, _SKIPPED_BYTES))
        if not block:
            return
        num_bytes -= len(block)


class _Paced(io.RawIOBase):
    """A file that gives single bytes from some position on, so that a decoder's step holds little that can be lost."""

    def __init__(self, raw: IO[bytes], slow_from: int | None, *, once: bool) -> None:
        super().__init__()
        self._raw = raw
        self._read = _as_it_comes(raw) if once else raw.read
        self._most = _SMALL_BYTES if once else _ARROW_BYTES
        self._slow_from = slow_from
        self.position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        is_slow = self._slow_from is not None and self.position >= self._slow_from
        block = self._read(1 if is_slow else min(len(buffer), self._most))
        buffer[: len(block)] = block
        self.position += len(block)
        return len(block)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _as_it_comes(raw: IO[bytes]) -> Callable[[int], bytes]:
    """Reads what is there, so that a slow writer's rows are not waited for until a block is full."""
    return raw.read1 if isinstance(raw, io.BufferedReader) else raw.read
