"""The columns that Parquet output takes over from Parquet input: the same Arrow values, never through Python.

Enters: the input files, and the columns to keep. Leaves: tables of any row range, asked for in ascending order (going
back opens the files again). Files may differ in columns and in compatible types; a missing column is null.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from cbgen.data.parquet import has_inner_dictionary
from cbgen.data.sources import Source, open_parquet
from cbgen.errors import InputError

_BATCH_ROWS = 1024


class CarriedColumns:
    """Reads the carried columns of row ranges.

    Args:
        sources: all of kind `parquet`.
        keep: column names; None for all.
        schema: the columns as an earlier run declared them, instead.

    Raises:
        InputError: two files hold a column in types that do not go together.
    """

    def __init__(
        self, sources: list[Source], *, keep: tuple[str, ...] | None = None, schema: pa.Schema | None = None
    ) -> None:
        self._sources = sources
        self.schema = _common_schema(sources, keep) if schema is None else schema
        self._batches: Iterator[pa.Table] = iter(())
        self._next_row = -1
        self._rest: list[pa.Table] = []

    def take(self, first_row: int, num_rows: int) -> pa.Table:
        """Rows `first_row` to `first_row + num_rows - 1` of all sources in a row."""
        if first_row != self._next_row:
            self._batches, self._rest = self._read(first_row), []
        parts, missing = [], num_rows
        while missing:
            table = self._rest.pop() if self._rest else next(self._batches)
            parts.append(table.slice(0, missing))
            if len(table) > missing:
                self._rest.append(table.slice(missing))
            missing -= len(parts[-1])
        self._next_row = first_row + num_rows
        return pa.concat_tables(parts) if parts else self.schema.empty_table()

    def _read(self, first_row: int) -> Iterator[pa.Table]:
        for source in self._sources:
            with open_parquet(source) as file:
                if first_row >= file.metadata.num_rows:
                    first_row -= file.metadata.num_rows
                    continue
                names = [name for name in self.schema.names if name in file.schema_arrow.names]
                groups: list[int] = []
                for group in range(file.num_row_groups):
                    size = file.metadata.row_group(group).num_rows
                    if groups or first_row < size:
                        groups.append(group)
                    else:
                        first_row -= size
                for batch in _read_batches(file, groups, names):
                    table = self._aligned(batch)
                    if first_row < len(table):
                        yield table.slice(first_row)
                    first_row = max(0, first_row - len(table))

    def _aligned(self, batch: pa.RecordBatch) -> pa.Table:
        """A batch in the common schema."""
        present = set(batch.schema.names)
        columns = [
            _as_type(batch.column(field.name), field.type)
            if field.name in present
            else pa.nulls(len(batch), field.type)
            for field in self.schema
        ]
        return pa.table(columns, schema=self.schema) if columns else pa.table({"_": pa.nulls(len(batch))}).select([])


def _read_batches(file: Any, groups: list[int], names: list[str]) -> Iterator[pa.RecordBatch]:
    # Arrow cannot join dictionaries of several row groups inside of lists and structs.
    apart = any(has_inner_dictionary(field.type) for field in file.schema_arrow)
    for together in [[group] for group in groups] if apart else [groups]:
        yield from file.iter_batches(_BATCH_ROWS, row_groups=together, columns=names)


def _as_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if not (pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type)):
        return array.cast(kind)
    # Arrow's own cast of a view leaves its last offset out.
    import pyarrow.compute as pc  # slow to import, and only lists need it

    ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(array), 0).cast(pa.int32()))
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    return pa.ListArray.from_arrays(offsets, pc.list_flatten(array), mask=array.is_null()).cast(kind)


def _common_schema(sources: list[Source], keep: tuple[str, ...] | None) -> pa.Schema:
    schemas = []
    for source in sources:
        with open_parquet(source) as file:
            fields = [pa.field(field.name, writable(field.type)) for field in file.schema_arrow]
            schemas.append(pa.schema([field for field in fields if keep is None or field.name in keep]))
    try:
        schema = pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"the input files hold a column in types that cannot share one Parquet column ({reason}); leave it out "
            "with --keep, or write JSONL"
        ) from error
    if keep is None:
        return schema
    present = {field.name: field for field in schema}
    return pa.schema([present.get(name, pa.field(name, pa.string())) for name in keep])


def writable(kind: pa.DataType) -> pa.DataType:
    """The type in which Parquet can hold the same values: views and encodings become the plain type."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return writable(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return pa.list_(writable(kind.value_type))
    if pa.types.is_null(kind):
        return pa.string()
    return _without_views(kind) if kind.num_fields else kind


def _without_views(kind: pa.DataType) -> pa.DataType:
    """The type with plain text and bytes inside of its lists, structs and maps: Arrow cannot write views there."""
    inner = [kind.field(number) for number in range(kind.num_fields)]
    plain = [field.with_type(_without_views(field.type)) for field in inner]
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind):
        return pa.list_(plain[0])
    if pa.types.is_large_list(kind):
        return pa.large_list(plain[0])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain[0], kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct(plain)
    if pa.types.is_map(kind):
        key, item = (_without_views(found) for found in (kind.key_type, kind.item_type))
        return pa.map_(kind.key_field.with_type(key), kind.item_field.with_type(item), kind.keys_sorted)
    return kind
