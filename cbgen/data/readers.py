"""Input files to rows, in order, in bounded memory. A bad row is a `Row` with an error, in its place; never a gap.

Enters: paths (JSONL, plain or compressed; Parquet; `-` for stdin) and a `Position` to start from. Leaves: an iterator
of `Row`. What a file is, its first bytes decide, not its name. Whole-file mistakes are refused by `check_inputs`,
before any model is loaded.
"""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.data.lines import BYTE_ORDER_MARK, Line, dumps, loads, split_lines
from cbgen.errors import BrokenInputError, InputError, RowError
from cbgen.records import Position, Row

STDIN = "-"
Kind = Literal["jsonl", "gzip", "zstd", "parquet"]

_MAGIC: dict[bytes, Kind] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BLOCK_BYTES = 1 << 20
_COMPRESSED_BLOCK_BYTES = 1 << 16  # what a torn file loses before the tear
_SNIFF_BYTES = 1 << 16
_PARQUET_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class Source:
    """One input file. `name` is what messages call it.

    Attributes:
        size: bytes, 0 for stdin.
        length: what `Position.offset` is at its end (bytes, or rows of Parquet); None where only reading it all tells.
    """

    path: str
    kind: Kind
    size: int = 0
    length: int | None = None

    @property
    def name(self) -> str:
        return "stdin" if self.path == STDIN else Path(self.path).name

    @property
    def can_seek(self) -> bool:
        return self.kind in ("jsonl", "parquet") and self.path != STDIN

    def signature(self) -> list[Any]:
        """Size and time of change: equal to an earlier one, the file is taken to be unchanged without reading it."""
        if self.path == STDIN:
            return [STDIN]
        stat = Path(self.path).stat()
        return [stat.st_size, stat.st_mtime_ns]


def check_inputs(paths: tuple[str, ...]) -> list[Source]:
    """Look at the start of every input.

    Raises:
        InputError: missing, unreadable, or as a whole not what can be read here; one sentence, with the way out.
    """
    if paths.count(STDIN) > 1:
        raise InputError("`-` (stdin) can be read only once")
    return [_check_input(path) for path in paths]


def _check_input(path: str) -> Source:
    if path == STDIN:
        head = _stdin().peek(_SNIFF_BYTES)[:_SNIFF_BYTES]
    else:
        file = Path(path)
        if file.is_dir():
            raise InputError(f"{path} is a directory; name the files in it")
        try:
            with file.open("rb") as stream:
                head = stream.read(_SNIFF_BYTES)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
    kind: Kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "jsonl")
    if kind == "parquet" and path == STDIN:
        raise InputError("stdin is a Parquet file, which has to be read from its end; give its path instead")
    if path == STDIN:
        _check_text(path, head) if kind == "jsonl" else None
        return Source(path, kind)
    size = Path(path).stat().st_size
    if kind == "parquet":
        return Source(path, kind, size, _num_parquet_rows(path))
    if kind == "jsonl":
        _check_text(path, head)
    return Source(path, kind, size, size if kind == "jsonl" else None)


def _num_parquet_rows(path: str) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path} begins like a Parquet file but is not a whole one: {reason}") from error


def _check_text(path: str, head: bytes) -> None:
    if head.startswith(_UTF16) or head[:400].count(0) > len(head[:400]) // 4:
        raise InputError(f"{path} is UTF-16 text; convert it to UTF-8, for example with `iconv -f UTF-16 -t UTF-8`")
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if text.startswith(b"[") and _is_json_array(text, len(head) < _SNIFF_BYTES):
        raise InputError(
            f"{path} is one JSON array, not one object per line; convert it with `jq -c '.[]' {path} > prompts.jsonl`"
        )


def _is_json_array(text: bytes, is_whole_file: bool) -> bool:
    """Whether text that starts with `[` is one array, rather than lines of which the first is (wrongly) a list."""
    first, _, rest = text.partition(b"\n")
    try:
        value = loads(first.strip())
    except ValueError:
        return True
    return is_whole_file and not rest.strip() and any(isinstance(item, dict) for item in value)


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
                f"{sources[file].path}: cannot be read past row {index}: {error}; finished rows are kept, and the same "
                "command continues once the file is whole"
            ) from error


def _read_source(source: Source, start: Position) -> Iterator[Row]:
    if source.kind == "parquet":
        yield from _read_parquet(source, start)
        return
    with _open_stream(source) as stream:
        if source.can_seek:
            stream.seek(start.offset)
        else:
            _discard(stream, start.offset)
        size = _BLOCK_BYTES if source.kind == "jsonl" else _COMPRESSED_BLOCK_BYTES
        for line in split_lines(iter(lambda: stream.read(size), b""), start.offset, start.line):
            yield _row_from_line(source, start.file, line)


def _stdin() -> io.BufferedReader:
    stream = sys.stdin.buffer
    return stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)  # type: ignore[arg-type]


def _open_stream(source: Source) -> IO[bytes]:
    raw: IO[bytes] = _stdin() if source.path == STDIN else open(source.path, "rb", buffering=0)  # noqa: SIM115
    if source.kind == "jsonl":
        return raw
    stream: IO[bytes] = pa.CompressedInputStream(
        pa.PythonFile(raw, mode="r"), source.kind
    )  # multi-member, detects torn
    return stream


def _discard(stream: IO[bytes], num_bytes: int) -> None:
    while num_bytes > 0:
        block = stream.read(min(num_bytes, _BLOCK_BYTES))
        if not block:
            return
        num_bytes -= len(block)


def _row_from_line(source: Source, file: int, line: Line) -> Row:
    place = f"{source.name} line {line.number}"
    row = Row(0, place, {}, zlib.crc32(line.data), Position(file, line.end, line.number))
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
        return RowError(
            "invalid_utf8", f"{place}: not valid UTF-8 at byte {wrong.start + 1}; convert the file to UTF-8"
        )
    cut = "" if line.terminated else "; the file ends within this line, so it may be cut off"
    return RowError("invalid_json", f"{place}: not valid JSON: {str(error).split(': line 1')[0]}{cut}")


def _read_parquet(source: Source, start: Position) -> Iterator[Row]:
    # Small buffers: with pre_buffer a file of one huge row group would be held in memory whole.
    with pq.ParquetFile(source.path, pre_buffer=False, buffer_size=_BLOCK_BYTES) as file:
        number, groups = _skip_row_groups(file, start.offset)
        if not groups:
            return
        for batch in file.iter_batches(_PARQUET_BATCH_ROWS, row_groups=groups):
            for columns in _batch_rows(batch):
                number += 1
                if number > start.offset:
                    yield _row_from_columns(
                        f"{source.name} row {number}", columns, Position(start.file, number, number)
                    )


def _row_from_columns(place: str, columns: dict[str, Any] | UnicodeDecodeError, position: Position) -> Row:
    if isinstance(columns, UnicodeDecodeError):
        error = RowError("invalid_utf8", f"{place}: a text column is not valid UTF-8; write the file anew")
        return Row(0, place, {}, zlib.crc32(columns.object), position, error)
    return Row(0, place, columns, zlib.crc32(dumps(columns)), position)


def _batch_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """The rows of a batch as Python values; slowly, and in part as text, when Python has no such value."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):  # nanoseconds, years past 9999, broken text: somewhere in these rows
        for number in range(batch.num_rows):
            try:
                yield {name: _cell(batch.column(name)[number]) for name in batch.schema.names}
            except UnicodeDecodeError as error:
                yield error


def _cell(scalar: pa.Scalar) -> Any:
    """One value; what Python cannot hold exactly becomes text, alone, wherever it sits in lists and structs."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError):
        if isinstance(scalar, pa.StructScalar):
            return {name: _cell(item) for name, item in scalar.items()}
        if isinstance(scalar, pa.ListScalar):
            return [_cell(item) for item in scalar.values]
        try:
            return scalar.cast(pa.string()).as_py()
        except pa.ArrowException:
            return str(scalar.value)


def _skip_row_groups(file: pq.ParquetFile, num_rows: int) -> tuple[int, list[int]]:
    """Rows before the row group that holds row `num_rows`, and the groups from there on."""
    before = 0
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        if before + size > num_rows:
            return before, list(range(group, file.num_row_groups))
        before += size
    return before, []
