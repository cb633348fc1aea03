"""Lines to files and back: no value of a row is lost or changed, whatever the first rows looked like."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.config import OutputConfig
from cbgen.data.lines import dumps, loads
from cbgen.data.readers import check_inputs
from cbgen.errors import InputError
from cbgen.output import encoders
from cbgen.output.encoders import EXTRA, Encoder, JsonlEncoder, declare_columns, declare_encoder, fits, restore_encoder
from tests.fuzzing import fuzz

TABLE = OutputConfig(path="out.parquet")
RESULTS = {
    "completion": "text",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0},
    "error": None,
}
FAILED = {
    "completion": None,
    "finish_reason": None,
    "usage": {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0},
    "error": {"code": "empty_prompt", "message": "why"},
}

names = st.sampled_from(["prompt", "id", "a", "b.c", "meta", " ", "ü"])
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**53 - 2, 2**53 + 2)
    | st.integers(2**63 - 2, 2**64 + 2)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)
rows_of_any_kind = st.lists(st.dictionaries(names, values, max_size=4), min_size=1, max_size=8)


def lines_of(rows: list[dict[str, Any]]) -> list[bytes]:
    return [dumps({**row, **(RESULTS if number % 3 else FAILED)}) for number, row in enumerate(rows)]


def without_nulls(value: Any) -> Any:
    """A JSON value without the keys of objects that are null: in a column of structs, missing is null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if without_nulls(item) not in (None, {})}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def typed(value: Any) -> Any:
    """A value that differs from another one of the same worth and another type, but for whole numbers and floats."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return (isinstance(value, bool), value)


def read_back(path: Path) -> list[dict[str, Any]]:
    """Rows as a user who knows of the extras reads them."""
    rows = pq.read_table(path).to_pylist()
    return [{**row, **(loads(row.pop(EXTRA).encode()) if row.get(EXTRA) else {})} for row in rows]


# -- Parquet ----------------------------------------------------------------------------------------------------------


@fuzz(150)
@given(rows=rows_of_any_kind, num_first=st.integers(0, 8))
def test_every_value_of_every_row_is_in_the_table(tmp_path: Path, rows: list[dict[str, Any]], num_first: int) -> None:
    encoder = declare_encoder(TABLE, [], rows[:num_first], 1)
    path = tmp_path / "part.parquet"

    encoder.encode(0, lines_of(rows), path)

    found = read_back(path)
    assert len(found) == len(rows)
    for number, (got, row) in enumerate(zip(found, rows, strict=True)):
        results = {name: got.pop(name) for name in RESULTS}
        assert results == (RESULTS if number % 3 else FAILED)
        got.pop(EXTRA, None)
        assert typed(without_nulls(got)) == typed(without_nulls(row))


@fuzz(100)
@given(rows=rows_of_any_kind, num_first=st.integers(0, 8))
def test_lines_of_a_table_give_the_same_table_again(tmp_path: Path, rows: list[dict[str, Any]], num_first: int) -> None:
    """As a retry does, which replaces some of them."""
    encoder = declare_encoder(TABLE, [], rows[:num_first], 1)
    encoder.encode(0, lines_of(rows), tmp_path / "first.parquet")

    encoder.encode(0, list(encoder.decode(0, tmp_path / "first.parquet")), tmp_path / "second.parquet")

    assert pq.read_table(tmp_path / "second.parquet").equals(pq.read_table(tmp_path / "first.parquet"))


@fuzz(60)
@given(rows=rows_of_any_kind)
def test_restored_encoder_has_the_same_columns(rows: list[dict[str, Any]]) -> None:
    encoder = declare_encoder(TABLE, [], rows, 1)

    again = restore_encoder(TABLE, [], loads(dumps(encoder.describe())))

    assert isinstance(again, encoders.ParquetEncoder)
    assert isinstance(encoder, encoders.ParquetEncoder)
    assert again.schema.equals(encoder.schema)


@pytest.mark.parametrize("group_rows", [1, 2, 3, 100])
def test_pieces_are_joined_in_order_and_cut_to_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int
) -> None:
    monkeypatch.setattr(encoders, "_GROUP_ROWS", group_rows)
    rows = [{"id": index} for index in range(12)]
    encoder = declare_encoder(TABLE, [], rows, 1)
    for name, first, end in (("a", 0, 7), ("b", 5, 9), ("last", 9, 12)):
        encoder.encode(first, lines_of(rows)[first:end], tmp_path / name)

    encoder.join([(tmp_path / "a", 5), (tmp_path / "b", 4)], tmp_path / "last", tmp_path / "out")

    assert [row["id"] for row in read_back(tmp_path / "out")] == list(range(12))


def test_empty_output_is_a_table_without_rows(tmp_path: Path) -> None:
    encoder = declare_encoder(TABLE, [], [{"id": 1}], 1)

    encoder.encode(0, [], tmp_path / "out.parquet")
    encoder.join([], tmp_path / "out.parquet", tmp_path / "joined.parquet")

    assert pq.read_table(tmp_path / "joined.parquet").num_rows == 0
    assert list(encoder.decode(0, tmp_path / "joined.parquet")) == []


def test_several_samples_are_lists_and_a_failed_row_is_null(tmp_path: Path) -> None:
    encoder = declare_encoder(TABLE, [], [{"id": 1}], 2)
    lines = [
        dumps({"id": 1, **RESULTS, "completion": ["a", "b"], "finish_reason": ["stop", "length"]}),
        dumps({"id": 2, **RESULTS, "completion": "alone", "finish_reason": "stop"}),
        dumps({"id": 3, **FAILED}),
    ]

    encoder.encode(0, lines, tmp_path / "out.parquet")

    assert [row["completion"] for row in read_back(tmp_path / "out.parquet")] == [["a", "b"], ["alone"], None]


def test_name_that_the_extras_need_is_refused_with_the_way_out() -> None:
    with pytest.raises(InputError, match=r"'extra_columns', which Parquet output needs; rename it.*--keep"):
        declare_columns([{EXTRA: 1}], None)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (pa.int64(), [0, -(2**63), 2**63 - 1], [2**63, 1.0, True, "1"]),
        (pa.float64(), [0.5, 3, 2**53], [2**53 + 1, True, "1"]),
        (pa.bool_(), [True, False], [0, 1, "true"]),
        (pa.string(), ["", "ü"], [1, True, ["a"]]),
        (pa.list_(pa.int64()), [[], [1, None]], [1, ["a"], {"a": 1}]),
        (pa.struct([pa.field("a", pa.int64())]), [{}, {"a": 1}, {"a": None}], [{"b": 1}, {"a": "x"}, [1]]),
    ],
)
def test_fits(kind: pa.DataType, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in [*good, None] if not fits(value, kind)] == []
    assert [value for value in bad if fits(value, kind)] == []


def test_columns_of_parquet_input_are_taken_over_with_their_types_for_any_range(tmp_path: Path) -> None:
    columns = {
        "id": pa.array(range(20), pa.uint8()),
        "when": pa.array([None, *range(19)], pa.timestamp("ns", "UTC")),
        "price": pa.array([None, *range(19)], pa.decimal128(9, 2)),
        "raw": pa.array([b"\xff\x00"] * 20, pa.binary()),
    }
    for name, start, end in (("a.parquet", 0, 7), ("b.parquet", 7, 20)):
        table = pa.table({key: column.slice(start, end - start) for key, column in columns.items()})
        pq.write_table(table, tmp_path / name, row_group_size=3)
    sources = check_inputs((str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")))
    encoder = declare_encoder(TABLE, sources, [], 1)

    for first, end in [(0, 5), (5, 6), (6, 20), (0, 20), (19, 20), (3, 9)]:
        encoder.encode(first, [dumps(RESULTS)] * (end - first), tmp_path / "out.parquet")
        found = pq.read_table(tmp_path / "out.parquet")
        assert found.num_rows == end - first
        for name, column in columns.items():
            assert found.column(name).combine_chunks().equals(column.slice(first, end - first)), (first, end, name)
        assert list(encoder.decode(first, tmp_path / "out.parquet")) == [dumps(RESULTS)] * (end - first)


# -- JSONL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, "gzip", "zstd"])
@pytest.mark.parametrize("batch_rows", [1, 3, 4096])
def test_jsonl_parts_hold_the_very_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Any, batch_rows: int
) -> None:
    monkeypatch.setattr(encoders, "_BATCH_ROWS", batch_rows)
    lines = [b'{"a": %d, "b": "\xe2\x80\xa8"}' % index for index in range(10)]
    encoder: Encoder = JsonlEncoder(codec)

    encoder.encode(0, lines, tmp_path / "part")

    assert list(encoder.decode(0, tmp_path / "part")) == lines
    assert encoder.describe() == {}
