"""Arrow values of any type as Python values: equal to Arrow's own where it has them, never an exception, writable."""

import datetime
import decimal
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen.data.arrow_values import batch_rows, values
from cbgen.data.lines import dumps, loads
from cbgen.data.readers import check_inputs, read_rows

_LEAVES = [
    pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3),
    pa.null(), pa.bool_(), pa.int8(), pa.uint64(), pa.int64(), pa.float16(), pa.float32(), pa.float64(),
    pa.decimal128(20, 3), pa.decimal256(50, 10), pa.date32(), pa.date64(), pa.time32("s"), pa.time64("us"),
    pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.timestamp("us", "+02:00"), pa.duration("ms"), pa.duration("us"),
]  # fmt: skip


def random_type(rng: random.Random, depth: int) -> pa.DataType:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(_LEAVES)
    inner = random_type(rng, depth - 1)
    choice = rng.randrange(9)
    if choice == 0:
        return pa.struct([(f"f{number}", random_type(rng, depth - 1)) for number in range(rng.randrange(3))])
    if choice == 1:
        return pa.map_(pa.string(), inner)
    if choice == 2:
        return pa.map_(pa.int32(), inner)
    if choice == 3:
        return pa.dictionary(pa.int16(), rng.choice([pa.string(), pa.int64(), pa.float32()]))
    lists = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda kind: pa.list_(kind, 2)]
    return lists[choice - 4](inner)


def random_value(rng: random.Random, kind: pa.DataType) -> Any:
    if rng.random() < 0.2 or pa.types.is_null(kind):
        return None
    if pa.types.is_map(kind):
        keys = ["a", "b", "a"] if pa.types.is_string(kind.key_type) else [1, 2, 3]
        return [(key, random_value(rng, kind.item_type)) for key in keys[: rng.randrange(4)]]
    if pa.types.is_struct(kind):
        return {field.name: random_value(rng, field.type) for field in kind}
    if pa.types.is_dictionary(kind):
        return random_value(rng, kind.value_type)
    if isinstance(kind, pa.FixedSizeListType):
        return [random_value(rng, kind.value_type) for _ in range(kind.list_size)]
    if hasattr(kind, "value_type"):
        return [random_value(rng, kind.value_type) for _ in range(rng.randrange(4))]
    return random_leaf(rng, kind)


def random_leaf(rng: random.Random, kind: pa.DataType) -> Any:
    if "string" in str(kind):
        return rng.choice(["", "a", "é\u2028", "\U0001f600" * 5])
    if "binary" in str(kind):
        return rng.choice([b"abc", b"\xff\x00\x01"])
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    if pa.types.is_floating(kind):
        number = rng.choice([0.0, -1.5, 0.25])
        return np.float16(number) if pa.types.is_float16(kind) else number
    if pa.types.is_integer(kind):
        return rng.choice([0, 1, 100, 2**64 - 1 if kind == pa.uint64() else 7])
    if pa.types.is_decimal(kind):
        return decimal.Decimal(rng.choice(["1.5", "-0.001", "12345678901234567"]))
    moment = datetime.datetime(2024, 2, 29, 12, 30, rng.randrange(60))
    if pa.types.is_date(kind):
        return moment.date()
    if pa.types.is_time(kind):
        return moment.time()
    if pa.types.is_duration(kind):
        return datetime.timedelta(days=rng.randrange(3), seconds=5)
    return moment.replace(tzinfo=datetime.UTC) if kind.tz else moment


def plain(value: Any, kind: pa.DataType) -> Any:
    """What Arrow itself makes of a value, with maps as objects or pairs."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        pairs = [(key, plain(item, kind.item_type)) for key, item in value]
        simple = all(isinstance(key, str) for key, _ in pairs) and len(dict(pairs)) == len(pairs)
        return dict(pairs) if simple else [list(pair) for pair in pairs]
    if pa.types.is_struct(kind):
        return {field.name: plain(value[field.name], field.type) for field in kind}
    if hasattr(kind, "value_type") and not pa.types.is_dictionary(kind):
        return [plain(item, kind.value_type) for item in value]
    return value


@pytest.mark.parametrize("seed", range(300))
def test_random_types_and_values_equal_what_arrow_itself_gives(seed: int) -> None:
    rng = random.Random(seed)
    kind = random_type(rng, 3)
    array = pa.array([random_value(rng, kind) for _ in range(12)], kind)
    expected = [plain(value, kind) for value in array.to_pylist()]

    assert values(array) == expected
    for first, count in ((3, 5), (0, 1), (11, 1), (12, 0)):
        assert values(array.slice(first, count)) == expected[first : first + count]
    for value in values(array):
        loads(dumps({"a": value}))


@pytest.mark.parametrize("seed", range(60))
def test_random_tables_come_back_from_parquet(seed: int, tmp_path: Any) -> None:
    rng = random.Random(1000 + seed)
    kinds = [random_type(rng, 2) for _ in range(4)]
    columns = [pa.array([random_value(rng, kind) for _ in range(40)], kind) for kind in kinds]
    table = pa.table(columns, names=["a", "b", "c", "d"])
    path = tmp_path / "in.parquet"
    try:
        pq.write_table(table, path, row_group_size=rng.choice([7, 40]))
        stored = pq.read_table(path)
    except pa.ArrowException:
        pytest.skip("Parquet does not store this type")
    expected = [
        {field.name: plain(row[field.name], field.type) for field in stored.schema} for row in stored.to_pylist()
    ]

    assert [row.columns for row in read_rows(check_inputs((str(path),)))] == expected


_ODD = 1_700_000_000_123_456_789


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([_ODD], pa.timestamp("ns")), ["2023-11-14T22:13:20.123456789"]),
        (pa.array([_ODD], pa.timestamp("ns", "Europe/Berlin")), ["2023-11-14T22:13:20.123456789Z"]),
        (pa.array([0], pa.timestamp("s", "Mars/Olympus")), ["1970-01-01T00:00:00Z"]),
        (pa.array([10**18], pa.timestamp("us")), ["1000000000000000000"]),
        (pa.array([2**62], pa.timestamp("s", "UTC")), [str(2**62)]),
        (pa.array([-(2**62)], pa.timestamp("ms", "Europe/Berlin")), [str(-(2**62))]),
        (pa.array([1], pa.duration("ns")), ["1"]),
        (pa.array([1], pa.time64("ns")), ["00:00:00.000000001"]),
        (pa.array([2**31 - 1], pa.date32()), ["2147483647"]),
        (pa.array([2**62], pa.duration("s")), [str(2**62)]),
        (pa.array([{"t": [_ODD, None]}], pa.struct([("t", pa.list_(pa.timestamp("ns")))])),
         [{"t": ["2023-11-14T22:13:20.123456789", None]}]),
        (pa.array([[(_ODD, 1)]], pa.map_(pa.timestamp("ns"), pa.int8())), [[["2023-11-14T22:13:20.123456789", 1]]]),
        (pa.array([(1, 2, 3), None], pa.month_day_nano_interval()), [[1, 2, 3], None]),
        (pa.RunEndEncodedArray.from_arrays([2, 3, 5], [["x"], None, ["y"]]).slice(1, 3), [["x"], None, ["y"]]),
        (pa.DictionaryArray.from_arrays(pa.array([1, None, 0]), pa.array([[1], None])), [None, None, [1]]),
        (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(15) + b"\1", None], pa.binary(16))),
         ["00000000-0000-0000-0000-000000000001", None]),
        (pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}'])), ['{"a": 1}']),
        (pa.array([float("nan"), float("inf"), None]), ["nan", "inf", None]),
        (pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), [[["a", 1], ["a", 2]]]),
        (pa.array([{}, None], pa.struct([])), [{}, None]),
        (pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])]), [1, "b"]),
    ],
    ids=lambda item: str(item.type) if isinstance(item, pa.Array) else "",
)  # fmt: skip
def test_values_that_python_lacks(array: pa.Array, expected: list[Any]) -> None:
    rows = list(batch_rows(pa.record_batch([array], names=["a"])))

    assert [str(row["a"]) if isinstance(row["a"], float) else row["a"] for row in rows] == expected
    for row in rows:
        loads(dumps(row))


def test_one_column_of_moments_has_one_form() -> None:
    array = pa.array([_ODD // 1000 * 1000, _ODD], pa.timestamp("ns"))
    rows = batch_rows(pa.record_batch([array], names=["a"]))

    assert [loads(dumps(row))["a"] for row in rows] == ["2023-11-14T22:13:20.123456", "2023-11-14T22:13:20.123456789"]


def test_text_that_is_not_utf8_breaks_its_row_only_however_deep() -> None:
    broken = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffc"))
    nested = pa.StructArray.from_arrays([pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), broken)], ["t"])

    first, second, third = batch_rows(pa.record_batch([nested, pa.array([1, 2, 3])], names=["a", "b"]))

    assert first == {"a": {"t": ["a"]}, "b": 1}
    assert isinstance(second, UnicodeDecodeError)
    assert third == {"a": {"t": ["c"]}, "b": 3}


def test_batch_without_columns_has_its_rows() -> None:
    batch = pa.record_batch([pa.array([1, 2])], names=["a"]).select([])

    assert list(batch_rows(batch)) == [{}, {}]
