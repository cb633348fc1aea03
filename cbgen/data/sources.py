"""What every input is, told by its first bytes, before any model is loaded: `check_inputs` makes `Source`s of paths.

Enters: input arguments. Leaves: one `Source` per file, or one sentence on why a file cannot be used and what to do.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data import addresses, files, filesystems
from cbgen.data.expand import STDIN, NamedFile, expand_inputs
from cbgen.data.mistakes import SNIFF_BYTES, check_head, decompressed_head, is_plain_row
from cbgen.data.streams import OnceOnly, Spooled
from cbgen.errors import InputError

Kind = Literal["jsonl", "gzip", "zstd", "parquet"]
_MAGIC: dict[bytes, Kind] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
_MAGIC |= {bytes([0x50 + number]) + b"\x2a\x4d\x18": "zstd" for number in range(16)}  # a frame to be skipped
_MAGIC_BYTES = 4
_NEVER_EMPTY = re.compile(r"\.(parquet|pq|gz|zst|zstd)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Source:
    """One input file.

    Attributes:
        path: a path, a URI, or `-`; a URI may hold credentials, `shown` does not.
        size: bytes, 0 where it cannot be known.
        length: what `Position.offset` is at its end (bytes, or rows of Parquet); None where only reading it all tells.
        label: what messages call it.
        stream: an input without a file that could be opened again.
    """

    path: str
    kind: Kind
    size: int = 0
    length: int | None = None
    label: str = ""
    stream: OnceOnly | Spooled | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """What rows and messages call it; always text, whatever bytes the file's name has."""
        name = self.label or ("stdin" if self.path == STDIN else addresses.base_name(self.path))
        return name.encode("utf-8", "backslashreplace").decode()

    @property
    def shown(self) -> str:
        """The path without credentials."""
        return "stdin" if self.path == STDIN else addresses.redact(self.path)

    @property
    def is_stream(self) -> bool:
        """Whether it can be read only once."""
        return isinstance(self.stream, OnceOnly) or (self.path == STDIN and self.stream is None)

    @property
    def is_remote(self) -> bool:
        return addresses.is_uri(self.path)

    @property
    def can_seek(self) -> bool:
        return self.kind in ("jsonl", "parquet") and not self.is_stream

    def signature(self) -> list[Any]:
        """Size and time of change: equal to an earlier one, the file is taken to be unchanged without reading it."""
        if isinstance(self.stream, Spooled):
            return [STDIN, self.stream.size, self.stream.checksum]
        if self.is_stream:
            return [STDIN]
        if self.is_remote:
            return files.signature(self.path)
        found = os.stat(self.path)
        return [found.st_size, found.st_mtime_ns]

    def open(self) -> IO[bytes]:
        """The bytes of the file, from the first one. What is spooled stays open for the next reader.

        Raises:
            OSError: it cannot be opened.
        """
        if self.stream is not None:
            return self.stream.open()
        if self.is_remote:
            return io.BufferedReader(files.RemoteFile(self.path), files.READ_BYTES)
        return open(self.path, "rb", buffering=0)


def check_inputs(paths: tuple[str, ...], exclude: tuple[str, ...] = ()) -> list[Source]:
    """Find the input files, and look at the start of each.

    Args:
        paths: files, directories, glob patterns, URIs, or `-` for stdin.
        exclude: outputs, which are no input where they lie in a directory or match a pattern.

    Raises:
        InputError: missing, unreadable, or as a whole not what can be read here; one sentence, with the way out.
    """
    if paths.count(STDIN) > 1:
        raise InputError("`-` (stdin) can be read only once")
    found = expand_inputs(paths, exclude)
    pipes = [os.path.realpath(file.path) for file in found if _is_pipe(file.path)]
    twice = next((path for path in pipes if pipes.count(path) > 1), None)
    if twice is not None:
        raise InputError(f"{twice} is a pipe, which can be read only once")
    return [_check_input(file) for file in found]


@contextmanager
def open_parquet(source: Source, *, pre_buffer: bool = False, buffer_bytes: int | None = None) -> Iterator[Any]:
    """A source of kind `parquet`, as a `pyarrow.parquet.ParquetFile`.

    Args:
        source: where it is.
        pre_buffer: fetch all of what is asked for in few large reads, at the price of memory.
        buffer_bytes: of each column's reads; a few large ones by default for what is remote.

    Raises:
        OSError: it cannot be read.
        pyarrow.ArrowException: it is damaged.
    """
    if buffer_bytes is None:
        buffer_bytes = files.READ_BYTES if source.is_remote else 1 << 20
    with open_random_access(source) as file:
        yield pq.ParquetFile(file, pre_buffer=pre_buffer, buffer_size=0 if pre_buffer else buffer_bytes)


@contextmanager
def open_random_access(source: Source) -> Iterator[pa.NativeFile]:
    """The bytes of a source for Arrow to read in any order.

    Raises:
        OSError: it cannot be opened.
    """
    if isinstance(source.stream, Spooled):
        yield pa.PythonFile(source.stream.open(), mode="r")
        return
    with pa.PythonFile(files.RemoteFile(source.path), mode="r") if source.is_remote else pa.OSFile(source.path) as file:
        yield file


def _is_pipe(path: str) -> bool:
    """Whether it is a local path, and one that cannot be opened twice."""
    try:
        mode = 0 if path == STDIN or addresses.is_uri(path) else os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def _check_input(file: NamedFile) -> Source:
    shown = "stdin" if file.path == STDIN else addresses.redact(file.path)
    try:
        if file.path == STDIN or _is_pipe(file.path):
            return _check_stream(file, shown)
        source = Source(file.path, "jsonl", label=file.label)
        with source.open() as stream:
            head = _read_head(stream)
        size = files.RemoteFile(file.path).size() if file.size is None and source.is_remote else file.size
        source = replace(source, size=os.stat(file.path).st_size if size is None else size)
        has_lost_its_start = head.startswith(bytes(_MAGIC_BYTES)) and _ends_like_parquet(source)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"cannot read {shown}: {filesystems.reason(error)}") from error
    if has_lost_its_start:
        raise InputError(f"{shown} is a damaged Parquet file: it begins with zero bytes; write or copy it anew")
    _check_not_empty(source)
    return _classified(source, head)


def _ends_like_parquet(source: Source) -> bool:
    with open_random_access(source) as file:
        return source.size >= _MAGIC_BYTES and file.read_at(_MAGIC_BYTES, source.size - _MAGIC_BYTES) == b"PAR1"


def _check_not_empty(source: Source) -> None:
    """Nothing is a file of no rows only where rows are lines; of the other forms none is so short.

    Raises:
        InputError: its name says that it is of another form.
    """
    ending = _NEVER_EMPTY.search(source.path.partition("?")[0]) if source.size == 0 else None
    if ending is not None:
        what = "a Parquet file" if ending[1].lower() in ("parquet", "pq") else "a compressed file"
        raise InputError(f"{source.shown} is empty, not {what}; write or copy it anew, or remove it")


def _read_head(stream: IO[bytes]) -> bytes:
    head = b""
    while len(head) < SNIFF_BYTES and (block := stream.read(SNIFF_BYTES - len(head))):
        head += block
    return head


def _check_stream(file: NamedFile, shown: str) -> Source:
    stream = OnceOnly.stdin() if file.path == STDIN else OnceOnly.pipe(file.path)
    head = stream.head(_tells_what_it_is)
    source = Source(file.path, "jsonl", label=file.label, stream=stream)
    if head.startswith(b"PAR1"):
        spooled = Spooled(stream)
        source = replace(source, stream=spooled, size=spooled.size)
    return _classified(source, head)


def _tells_what_it_is(head: bytes) -> bool:
    """Whether so much of a stream is enough; a slow writer's first row is, and the run can begin."""
    if len(head) >= SNIFF_BYTES:
        return True
    if len(head) < _MAGIC_BYTES:
        return False
    return any(head.startswith(magic) for magic in _MAGIC) or (b"\n" in head and is_plain_row(head))


def _classified(source: Source, head: bytes) -> Source:
    kind = _kind(head)
    if kind == "parquet":
        return replace(source, kind=kind, length=_num_parquet_rows(source))
    if kind == "jsonl":
        check_head(source.shown, head, len(head) < SNIFF_BYTES)
        return replace(source, kind=kind, length=None if source.is_stream else source.size)
    text, is_whole_file = decompressed_head(source.shown, head, kind)
    check_head(source.shown, text, is_whole_file)
    return replace(source, kind=kind)


def _kind(head: bytes) -> Kind:
    for magic, kind in _MAGIC.items():
        # A compressed file may be cut within its first bytes, which are no text.
        if head.startswith(magic) or (magic.startswith(head) and head.strip(b"(PQRSTUVWXYZ[\\]^_AR")):
            return kind
    return "jsonl"


def _num_parquet_rows(source: Source) -> int:
    try:
        with open_parquet(source) as file:
            metadata, names = file.metadata, file.schema_arrow.names
            hole = _miscount(metadata) or (None if source.is_remote else _first_hole(source, metadata))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(
            f"{source.shown} begins like a Parquet file but is not a whole one (truncated or damaged): "
            f"{filesystems.reason(error)}"
        ) from error
    if hole is not None:
        raise InputError(f"{source.shown} is a damaged Parquet file: {hole}; write or copy it anew")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{source.shown} has two columns named {twice!r}; rename one of them")
    return int(metadata.num_rows)


def _miscount(metadata: Any) -> str | None:
    """Where the counts of a footer contradict each other; a later run would find its place by other ones."""
    rows = sum(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    if rows != metadata.num_rows:
        return f"its footer counts {metadata.num_rows:,} rows, and {rows:,} in its row groups"
    return None


def _first_hole(source: Source, metadata: Any) -> str | None:
    """Where a file whose end is intact has lost its data: a column chunk never begins with zero bytes."""
    with open_random_access(source) as file:
        size = file.size()
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns if metadata.row_group(group).num_rows else 0):
                chunk = metadata.row_group(group).column(number)
                start = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0)
                if start + chunk.total_compressed_size > size:
                    return f"row group {group + 1} lies beyond its end"
                if not file.read_at(_MAGIC_BYTES, start).strip(b"\0"):
                    return f"row group {group + 1} of {metadata.num_row_groups} is zero bytes"
    return None
