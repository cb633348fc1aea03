"""Arrow record batches to rows of Python values that can be written as JSON, whatever the types.

Values keep their Python type where there is one that `lines.dumps` writes. What Python cannot hold exactly
(nanoseconds, years past 9999, an unknown time zone) becomes text, alone, wherever it sits. Maps become objects, or
lists of pairs when their keys repeat or are no text. Views, dictionaries and encodings are only ways to store a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

Columns = dict[str, Any]


def batch_rows(batch: pa.RecordBatch) -> Iterator[Columns | UnicodeDecodeError]:
    """The rows of a batch; the error in place of a row whose text is not UTF-8."""
    names = batch.schema.names
    columns = [_column(column) for column in batch.columns]
    if not columns:
        yield from ({} for _ in range(batch.num_rows))
    for row in zip(*columns, strict=True):
        broken = next((value for value in row if isinstance(value, UnicodeDecodeError)), None)
        yield broken if broken is not None else dict(zip(names, row, strict=True))


def _column(array: pa.Array) -> list[Any]:
    """Values of all rows; one by one if something in them cannot be turned."""
    try:
        return values(array)
    except Exception:  # a value that breaks its row must not break the others
        return [_alone(array.slice(number, 1)) for number in range(len(array))]


def _alone(array: pa.Array) -> Any:
    try:
        return values(array)[0]
    except UnicodeDecodeError as error:
        return error
    except Exception:  # a type that is newer than this module
        return str(array[0])


def values(array: pa.Array) -> list[Any]:
    """The array as Python values.

    Raises:
        UnicodeDecodeError: text that is not UTF-8.
    """
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        items = values(array.storage)
        return [_uuid(item) for item in items] if kind.extension_name == "arrow.uuid" else items
    convert = next((convert for is_kind, convert in _CONVERTERS if is_kind(kind)), None)
    return convert(array) if convert is not None else array.to_pylist()


def _uuid(value: bytes | None) -> str | None:
    import uuid

    return None if value is None else str(uuid.UUID(bytes=value))


def _from_dictionary(array: pa.DictionaryArray) -> list[Any]:
    entries = values(array.dictionary)
    return [None if index is None else entries[index] for index in array.indices.to_pylist()]


def _from_run_ends(array: pa.RunEndEncodedArray) -> list[Any]:
    items = values(array.values)
    offset = array.offset
    found: list[Any] = []
    for end, item in zip(array.run_ends.to_pylist(), items, strict=True):
        count = min(end - offset, len(array)) - len(found)
        found += [item] * max(0, count)
    return found


def _from_lists(array: pa.Array) -> list[Any]:
    import pyarrow.compute as pc  # slow to import, and only lists need it

    lengths = pc.list_value_length(array).to_pylist()
    items = values(array.flatten())
    found: list[Any] = []
    start = 0
    for length in lengths:
        found.append(None if length is None else items[start : start + length])
        start += length or 0
    return found


def _from_structs(array: pa.StructArray) -> list[Any]:
    names = [field.name for field in array.type]
    present = array.is_valid().to_pylist()
    if not names:
        return [{} if valid else None for valid in present]
    columns = [values(child) for child in array.flatten()]
    rows = zip(present, zip(*columns, strict=True), strict=True)
    return [_object(list(zip(names, row, strict=True))) if valid else None for valid, row in rows]


def _from_maps(array: pa.MapArray) -> list[Any]:
    offsets = array.offsets.to_pylist()
    first, end = offsets[0], offsets[-1]
    pairs = list(
        zip(values(array.keys.slice(first, end - first)), values(array.items.slice(first, end - first)), strict=True)
    )
    present = array.is_valid().to_pylist()
    make = _pairs if _is_moment(array.type.key_type) else _object  # some moments become text; the form stays the same
    return [
        make(pairs[offsets[number] - first : offsets[number + 1] - first]) if valid else None
        for number, valid in enumerate(present)
    ]


def _object(pairs: list[tuple[Any, Any]]) -> Any:
    """An object, or a list of pairs where JSON has no such object."""
    found = dict(pairs) if all(isinstance(key, str) for key, _ in pairs) else {}
    return found if len(found) == len(pairs) else _pairs(pairs)


def _pairs(pairs: list[tuple[Any, Any]]) -> list[list[Any]]:
    return [[key, value] for key, value in pairs]


def _from_moments(array: pa.Array) -> list[Any]:
    try:
        return list(array.to_pylist())
    except (ValueError, OverflowError, LookupError, pa.ArrowException):
        return [_moment(scalar) for scalar in array]


def _moment(scalar: pa.Scalar) -> Any:
    """Exactly: as Python's type, as text, or as the number that is stored."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, LookupError, pa.ArrowException):
        pass
    kind = scalar.type
    try:
        if pt.is_timestamp(kind) and kind.tz is not None:
            plain = pa.scalar(scalar.value, pa.int64()).cast(pa.timestamp(kind.unit))
            text = plain.cast(pa.string()).as_py() + "Z"
        else:
            text = scalar.cast(pa.string()).as_py()
    except pa.ArrowException:
        return str(scalar.value)
    if text.startswith("<"):  # "<value out of range: ...>"
        return str(scalar.value)
    # The moments beside it that Python does hold are written with a T.
    return text.replace(" ", "T") if pt.is_timestamp(kind) else text


def _from_intervals(array: pa.Array) -> list[Any]:
    return [None if item is None else list(item) for item in array.to_pylist()]


def _from_halves(array: pa.Array) -> list[Any]:
    return list(array.cast(pa.float32()).to_pylist())


def _is_moment(kind: pa.DataType) -> bool:
    return pt.is_temporal(kind) and not pt.is_interval(kind)


def _is_list(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (pt.is_list, pt.is_large_list, pt.is_fixed_size_list, pt.is_list_view, pt.is_large_list_view)
    )


_CONVERTERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any], list[Any]]], ...] = (
    (pt.is_dictionary, _from_dictionary),
    (pt.is_run_end_encoded, _from_run_ends),
    (pt.is_map, _from_maps),
    (_is_list, _from_lists),
    (pt.is_struct, _from_structs),
    (pt.is_interval, _from_intervals),
    (_is_moment, _from_moments),
    (pt.is_float16, _from_halves),
)
