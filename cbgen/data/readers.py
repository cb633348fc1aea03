"""Input files to rows, in order, in bounded memory. A bad row is a `Row` with an error, in its place; never a gap.

Enters: the `Source`s that `check_inputs` made (JSONL, plain or compressed; Parquet; from disk, a pipe or an object
store) and a `Position` to start from. Leaves: an iterator of `Row`.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import IO

import pyarrow as pa

from cbgen.data import filesystems
from cbgen.data.arrow_values import Columns
from cbgen.data.compressed import decompressed
from cbgen.data.expand import STDIN
from cbgen.data.lines import MAX_LINE_BYTES, Line, dumps, loads, split_lines
from cbgen.data.parquet import read_parquet
from cbgen.data.sources import Kind, Source, check_inputs, open_parquet
from cbgen.errors import BrokenInputError, RowError
from cbgen.records import Position, Row

__all__ = ["STDIN", "Kind", "Source", "check_inputs", "input_fraction", "open_parquet", "read_rows"]

_BLOCK_BYTES = 1 << 20


def input_fraction(sources: list[Source], position: Position) -> float | None:
    """How much of the input lies before `position`, 0 to 1; None where that cannot be known without reading it all."""
    current = sources[position.file]
    total = sum(source.size for source in sources)
    if not total or current.length is None or any(source.length is None for source in sources):
        return None
    before = sum(source.size for source in sources[: position.file])
    return min(1.0, (before + position.offset / max(current.length, 1) * current.size) / total)


def read_rows(sources: list[Source], start: Position = Position(), first_index: int = 0) -> Iterator[Row]:
    """Rows of all sources from `start` on; `first_index` is the index of the first one.

    Raises:
        BrokenInputError: a file ends in the middle of a compressed frame, or cannot be read any further.
    """
    index = first_index
    for file in range(start.file, len(sources)):
        position = start if file == start.file else Position(file)
        try:
            for row in _read_source(sources[file], position):
                row.index = index
                yield row
                index += 1
        except (OSError, EOFError, pa.ArrowException) as error:
            raise BrokenInputError(
                f"{sources[file].shown}: cannot be read past row {index}: {filesystems.reason(error)}; finished "
                "rows are kept, and the same command continues once the file is whole"
            ) from error


def _read_source(source: Source, start: Position) -> Iterator[Row]:
    if source.kind == "parquet":
        yield from _read_parquet(source, start)
        return
    for line in split_lines(_blocks(source, start.offset), start.offset, start.line):
        yield _row_from_line(source, start.file, line)


def _blocks(source: Source, offset: int) -> Iterator[bytes]:
    """The bytes of the text from `offset` on."""
    if source.kind != "jsonl":
        yield from decompressed(source.open, source.kind, offset, once=source.is_stream)
        return
    with source.open() as stream:
        if source.can_seek:
            stream.seek(offset)
        else:
            _discard(stream, offset)
        # A pipe gives what is there, so that a slow writer's rows are not waited for until a block is full.
        read = stream.read1 if source.is_stream and isinstance(stream, io.BufferedReader) else stream.read
        while block := read(_BLOCK_BYTES):
            yield block


def _discard(stream: IO[bytes], num_bytes: int) -> None:
    while num_bytes > 0:
        block = stream.read(min(num_bytes, _BLOCK_BYTES))
        if not block:
            return
        num_bytes -= len(block)


def _row_from_line(source: Source, file: int, line: Line) -> Row:
    place = f"{source.name} line {line.number}"
    row = Row(0, place, {}, line.checksum or zlib.crc32(line.data), Position(file, line.end, line.number))
    if line.num_dropped:
        most = f"{MAX_LINE_BYTES >> 20} MiB"
        row.error = RowError("line_too_long", f"{place}: the line has {line.num_dropped:,} bytes, more than {most}")
        return row
    try:
        value = loads(line.data)
    except ValueError as error:
        row.error = _parse_error(place, line, error)
        return row
    if isinstance(value, dict):
        row.columns = value
    else:
        kind = "null" if value is None else type(value).__name__
        row.error = RowError("not_an_object", f"{place}: a row must be a JSON object, not {kind}")
    return row


def _parse_error(place: str, line: Line, error: ValueError) -> RowError:
    try:
        line.data.decode("utf-8")
    except UnicodeDecodeError as wrong:
        if not line.terminated and wrong.reason == "unexpected end of data":
            return RowError("invalid_utf8", f"{place}: the file ends within a character, so it may be cut off")
        return RowError(
            "invalid_utf8", f"{place}: not valid UTF-8 at byte {wrong.start + 1}; convert the file to UTF-8"
        )
    cut = "" if line.terminated else "; the file ends within this line, so it may be cut off"
    return RowError("invalid_json", f"{place}: not valid JSON: {str(error).split(': line 1')[0]}{cut}")


def _read_parquet(source: Source, start: Position) -> Iterator[Row]:
    for number, columns in read_parquet(source, start.offset):
        yield _row_from_columns(f"{source.name} row {number}", columns, Position(start.file, number, number))


def _row_from_columns(place: str, columns: Columns | UnicodeDecodeError, position: Position) -> Row:
    if isinstance(columns, UnicodeDecodeError):
        error = RowError("invalid_utf8", f"{place}: a text column is not valid UTF-8; write the file anew")
        return Row(0, place, {}, zlib.crc32(columns.object), position, error)
    return Row(0, place, columns, zlib.crc32(dumps(columns)), position)
