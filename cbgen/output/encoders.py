"""Output lines to files of another form, and back: JSONL parts, plain or compressed, and Parquet.

A Parquet file has one schema from its first row on. It is declared before any row is generated: the result fields have
fixed types; the columns carried through have the types of the Parquet input, from which they are taken again row by
row, exact to the bit; or, for JSONL input, the types of its first rows. What a later row holds beyond those types is
not lost: it goes into the column `extra_columns`, as JSON.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.config import OutputConfig
from cbgen.data.lines import dumps, loads
from cbgen.data.prompts import clash_message
from cbgen.data.sources import Source
from cbgen.errors import InputError
from cbgen.output.carried import CarriedColumns
from cbgen.output.tape import Codec, all_lines, compress

EXTRA = "extra_columns"
CODECS: dict[str, Codec | None] = {"jsonl": None, "jsonl.gz": "gzip", "jsonl.zst": "zstd", "parquet": None}
"""What each output format's lines are compressed with."""

_BATCH_ROWS = 4096
_FRAME_BYTES = 8 << 20
_GROUP_ROWS = 5_000
_ANSWERS: tuple[Any, ...] = ("x", ["x"], [{"type": "text", "text": "x"}])
_MOST_NESTED = 32  # a list takes two levels of the 100 that a Parquet schema may have
_LARGEST_EXACT = 2**53  # whole numbers up to it are exact as doubles

TakeColumns = Callable[[int, int], pa.Table]
"""(first row, number of rows) -> those rows' input columns; asked for ranges in ascending order."""


class Encoder(ABC):
    """Between lines and a file.

    Attributes:
        takes_from_input: whether lines hold only what differs from the input's own columns.
    """

    takes_from_input = False

    @abstractmethod
    def encode(self, first_row: int, lines: Iterable[bytes], path: Path) -> None:
        """Write a whole file with the lines of rows `first_row`, `first_row + 1`, ..."""

    @abstractmethod
    def decode(self, first_row: int, path: Path) -> Iterator[bytes]:
        """The lines of such a file."""

    def join(self, pieces: Sequence[tuple[Path, int]], last: Path, path: Path) -> None:
        """One file of the first so many rows of each piece, and all of the last."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What a later run needs to build the same encoder, as JSON."""
        return {}


class JsonlEncoder(Encoder):
    """Lines as they are, or in frames."""

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec

    def encode(self, first_row: int, lines: Iterable[bytes], path: Path) -> None:
        with path.open("wb") as file:
            for batch in _batches(lines, _BATCH_ROWS):
                file.write(compress(b"".join([line + b"\n" for line in batch]), self._codec))

    def decode(self, first_row: int, path: Path) -> Iterator[bytes]:
        return all_lines(path, self._codec)


class ParquetEncoder(Encoder):
    """Lines to Parquet.

    Args:
        columns: the carried columns and their types.
        config: which result fields there are.
        num_samples: completions per row; their columns are lists when it is more than one.
        take: for Parquet input, gives the carried columns; lines then hold only what differs from the input.
    """

    def __init__(
        self, columns: pa.Schema, config: OutputConfig, num_samples: int, take: TakeColumns | None = None
    ) -> None:
        self._columns = columns
        self._config = config
        self._take = take
        self._num_samples = num_samples
        self.takes_from_input = take is not None
        extra = [] if take else [pa.field(EXTRA, pa.string())]
        self.schema = pa.schema([*columns, *extra, *_result_schema(config, num_samples)])

    def describe(self) -> dict[str, Any]:
        return {
            "columns": base64.b64encode(self._columns.serialize().to_pybytes()).decode(),
            "num_samples": self._num_samples,
            "from_input": self._take is not None,
        }

    def encode(self, first_row: int, lines: Iterable[bytes], path: Path) -> None:
        with pq.ParquetWriter(path, self.schema, compression="zstd") as writer:
            for batch in _batches(lines, _GROUP_ROWS):
                writer.write_table(self._table(first_row, [loads(line) for line in batch]), _GROUP_ROWS)
                first_row += len(batch)

    def _table(self, first_row: int, records: list[dict[str, Any]]) -> pa.Table:
        results = {field.name: self._result_column(field, records) for field in self._result_fields()}
        if self._take is None:
            carried = self._carried_from_records(records)
        else:
            carried = self._carried_from_input(first_row, records)
        return pa.table([*carried, *results.values()], schema=self.schema)

    def _result_fields(self) -> list[pa.Field]:
        return list(self.schema)[len(self.schema) - len(self._config.result_fields) :]

    def _result_column(self, field: pa.Field, records: list[dict[str, Any]]) -> pa.Array:
        values = [record.get(field.name) for record in records]
        if pa.types.is_list(field.type) and self._num_samples > 1 and field.name != self._config.field("source"):
            values = [value if value is None or isinstance(value, list) else [value] for value in values]
        return pa.array(values, field.type)

    def _carried_from_input(self, first_row: int, records: list[dict[str, Any]]) -> list[pa.ChunkedArray]:
        assert self._take is not None
        table = self._take(first_row, len(records))
        columns = []
        for field in self._columns:
            column = table.column(field.name)
            if any(field.name in record for record in records):  # the messages, with the answer appended
                own = column.to_pylist()
                values = [record.get(field.name, value) for record, value in zip(records, own, strict=True)]
                column = pa.chunked_array([pa.array(values, field.type)])
            columns.append(column)
        return columns

    def _carried_from_records(self, records: list[dict[str, Any]]) -> list[pa.Array]:
        ours = {*self._columns.names, *self._config.result_fields}
        extras = [{name: value for name, value in record.items() if name not in ours} for record in records]
        columns = []
        for field in self._columns:
            values = [record.get(field.name) for record in records]
            for row, value in enumerate(values):
                if not fits(value, field.type):
                    extras[row][field.name], values[row] = value, None
            columns.append(pa.array(values, field.type))
        return [*columns, pa.array([dumps(extra).decode() if extra else None for extra in extras], pa.string())]

    def decode(self, first_row: int, path: Path) -> Iterator[bytes]:
        kept = None if self._take is None else list(self._config.result_fields)
        if kept is not None and self._config.append_message and self._config.messages_column in self._columns.names:
            kept.append(self._config.messages_column)
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=kept):
                for record in batch.to_pylist():
                    yield dumps(_with_extras(record))

    def join(self, pieces: Sequence[tuple[Path, int]], last: Path, path: Path) -> None:
        with pq.ParquetWriter(path, self.schema, compression="zstd") as writer:
            for piece, num_rows in [*pieces, (last, None)]:
                with pq.ParquetFile(piece, pre_buffer=False) as file:
                    for group in range(file.num_row_groups):
                        table = file.read_row_group(group)
                        if num_rows is not None:
                            table = table.slice(0, num_rows)
                            num_rows -= len(table)
                        if len(table):
                            writer.write_table(table.cast(self.schema), _GROUP_ROWS)


def declare_encoder(
    config: OutputConfig, sources: list[Source], first_rows: list[dict[str, Any]], num_samples: int
) -> Encoder:
    """The encoder of a new output.

    Args:
        config: the output's.
        sources: all inputs; when they are Parquet, columns are taken over from them.
        first_rows: columns of the first rows, from which JSON columns are declared.
        num_samples: completions per row.

    Raises:
        InputError: the columns cannot be declared, or have no room for an answer that is to be added.
    """
    if config.resolved_format != "parquet":
        return JsonlEncoder(CODECS[config.resolved_format])
    if sources and all(source.kind == "parquet" for source in sources):
        carried = CarriedColumns(sources, keep=config.carried)
        _check_names(carried.schema, config)
        if config.append_message and config.messages_column in carried.schema.names:
            _check_takes_answers(carried.schema.field(config.messages_column))
        return ParquetEncoder(carried.schema, config, num_samples, carried.take)
    columns = declare_columns(first_rows, config.carried)
    _check_names(columns, config)
    return ParquetEncoder(columns, config, num_samples)


def _check_names(columns: pa.Schema, config: OutputConfig) -> None:
    """A table has one column of each name.

    Raises:
        InputError: a carried column has the name of a result field; perhaps no row has shown it yet.
    """
    clash = next((name for name in columns.names if name in config.result_fields), None)
    if clash is not None:
        raise InputError(clash_message(clash))


def _check_takes_answers(column: pa.Field) -> None:
    """Whether messages of this type can hold an answer, as text or as a list of parts, and come back as they were.

    Raises:
        InputError: they cannot.
    """
    if not pa.types.is_nested(column.type):
        return  # no chats
    for content in _ANSWERS if _is_plain(column.type) else ():
        with contextlib.suppress(pa.ArrowException, ValueError, TypeError, KeyError, IndexError):
            (messages,) = pa.array([[{"role": "assistant", "content": content}]], column.type).to_pylist()
            if dict(messages[0])["content"] == content:
                return
    raise InputError(
        f"--append-message cannot add an answer to column {column.name!r}, whose type is {column.type}; write JSONL "
        "instead of Parquet"
    )


def _is_plain(kind: pa.DataType) -> bool:
    """Whether every value in it is one of JSON's."""
    if kind.num_fields:
        return all(_is_plain(kind.field(number).type) for number in range(kind.num_fields))
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_boolean,
             pa.types.is_integer, pa.types.is_floating, pa.types.is_null)  # fmt: skip
    return any(test(kind.value_type if pa.types.is_dictionary(kind) else kind) for test in tests)


def restore_encoder(config: OutputConfig, sources: list[Source], description: dict[str, Any]) -> Encoder:
    """The encoder that `describe` described."""
    if not description:
        return JsonlEncoder(CODECS[config.resolved_format])
    columns = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(description["columns"])))
    take = CarriedColumns(sources, schema=columns).take if description["from_input"] else None
    return ParquetEncoder(columns, config, description["num_samples"], take)


def declare_columns(rows: list[dict[str, Any]], keep: tuple[str, ...] | None) -> pa.Schema:
    """The columns that these rows have in common types; what has no common type stays out and goes to the extras.

    Raises:
        InputError: a column has the name that the extras need.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    if EXTRA in (names if keep is None else keep):
        raise InputError(
            f"the input has a column {EXTRA!r}, which Parquet output needs; rename it, or leave it out with --keep"
        )
    fields = []
    for name in names if keep is None else keep:
        kind = _common_type([row[name] for row in rows if row.get(name) is not None])
        if kind is not None:
            fields.append(pa.field(name, kind))
    return pa.schema(fields)


def _common_type(values: list[Any]) -> pa.DataType | None:
    try:
        inferred = pa.infer_type(values) if values else pa.string()
        kind = _without_nulls(inferred, _MOST_NESTED)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return None
    return kind if all(fits(value, kind) for value in values) else None


def _without_nulls(kind: pa.DataType, most_nested: int) -> pa.DataType:
    """The same type with text where only nulls were seen: nothing else can be said of those.

    Raises:
        ValueError: Parquet cannot hold it.
    """
    if not most_nested:
        raise ValueError("a type nested too deeply for Parquet's readers")
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_nulls(kind.value_type, most_nested - 1))
    if pa.types.is_struct(kind):
        if not kind.num_fields:
            raise ValueError("a struct without fields cannot be written")
        return pa.struct([pa.field(field.name, _without_nulls(field.type, most_nested - 1)) for field in kind])
    return kind


def fits(value: Any, kind: pa.DataType) -> bool:
    """Whether a JSON value can be held in this type and read back as the same value (a missing key as null)."""
    if value is None:
        return True
    if pa.types.is_string(kind):
        return isinstance(value, str)
    if pa.types.is_boolean(kind):
        return isinstance(value, bool)
    if pa.types.is_integer(kind):
        return type(value) is int and -(2**63) <= value < 2**63
    if pa.types.is_floating(kind):
        return isinstance(value, float) or (type(value) is int and abs(value) <= _LARGEST_EXACT)
    if pa.types.is_list(kind):
        return isinstance(value, list) and all(fits(item, kind.value_type) for item in value)
    if pa.types.is_struct(kind):
        return isinstance(value, dict) and all(
            kind.get_field_index(key) >= 0 and fits(item, kind.field(key).type) for key, item in value.items()
        )
    return False


def _result_schema(config: OutputConfig, num_samples: int) -> list[pa.Field]:
    """The result fields, always the same types: no column may start as null and be text later."""

    def each(kind: pa.DataType) -> pa.DataType:
        return pa.list_(kind) if num_samples > 1 else kind

    tokens = [("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64()), ("cached_tokens", pa.int64())]
    kinds = {
        "completion": each(pa.string()),
        "finish_reason": each(pa.string()),
        "usage": pa.struct(tokens),
        "error": pa.struct([("code", pa.string()), ("message", pa.string())]),
        "token_ids": each(pa.list_(pa.int32())),
        "source": pa.struct([("file", pa.string()), ("line", pa.int64())]),
    }
    prefixed = {config.field(name): kind for name, kind in kinds.items()}
    return [pa.field(name, prefixed[name]) for name in config.result_fields]


def _with_extras(record: dict[str, Any]) -> dict[str, Any]:
    extra = record.pop(EXTRA, None)
    return {**record, **loads(extra.encode())} if extra else record


def _batches(lines: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    lines = iter(lines)
    while batch := list(itertools.islice(lines, size)):
        yield batch
