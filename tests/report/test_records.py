"""Records for programs: strict JSON, one object a line, and no failure when nobody reads them."""

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.report import records as records_module
from cbgen.report.records import JsonRecords, strict
from tests.report.test_progress import snapshot


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def read(stream: io.StringIO) -> list[dict[str, Any]]:
    text = stream.getvalue()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.split("\n")[:-1]]


def test_a_run_is_start_progress_done() -> None:
    stream = io.StringIO()
    records = JsonRecords(stream)
    records.start({"settings": {"limit": None}})
    records.progress(snapshot(rows=3, errors=1, fraction=0.5))
    records.done({"rows": 3, "exit_code": 3})

    start, progress, done = read(stream)
    assert start == {"type": "start", "version": 1, "settings": {"limit": None}}
    assert (progress["type"], progress["rows"], progress["errors"], progress["fraction"]) == ("progress", 3, 1, 0.5)
    assert progress["seconds"] >= 0
    assert done == {"type": "done", "rows": 3, "exit_code": 3}


def test_an_error_is_a_record_with_the_exit_code() -> None:
    stream = io.StringIO()
    JsonRecords(stream).error(4, "refused:\nno")
    assert read(stream) == [{"type": "error", "exit_code": 4, "message": "refused:\nno"}]


def test_progress_is_due_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(records_module.time, "monotonic", lambda: now[0])
    records = JsonRecords(io.StringIO(), interval_seconds=10)
    assert not records.is_due()
    now[0] += 10
    assert records.is_due()
    records.progress(snapshot())
    assert not records.is_due()


def test_each_record_is_flushed_at_once() -> None:
    class Buffered(io.StringIO):
        flushes = 0

        def flush(self) -> None:
            self.flushes += 1

    stream = Buffered()
    JsonRecords(stream).start({})
    assert stream.flushes == 1


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), ValueError("closed")])
def test_a_reader_that_went_away_does_not_end_the_run_and_is_not_written_to_again(error: Exception) -> None:
    class Gone(io.StringIO):
        tries = 0

        def write(self, text: str) -> int:
            self.tries += 1
            raise error

    stream = Gone()
    records = JsonRecords(stream)
    records.start({})
    records.done({})
    assert stream.tries == 1


def test_a_closed_stdout_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    JsonRecords().start({})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary() | st.dates(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=10,
)


@given(VALUES)
def test_any_value_is_one_line_of_strict_json(value: Any) -> None:
    stream = io.StringIO()
    JsonRecords(stream).start({"value": value})
    (record,) = read(stream)
    assert record["value"] == json.loads(json.dumps(strict(value)))
    record_text = stream.getvalue().encode("ascii")
    assert b"\\ud" not in record_text or json.dumps(record, ensure_ascii=False).encode("utf-8")


def test_values_that_json_has_no_word_for() -> None:
    assert strict({"a": float("nan"), 1: ("x", float("inf")), "b": "\udcff", "c": 2**70}) == {
        "a": None, "1": ["x", None], "b": "?", "c": 2**70,
    }  # fmt: skip
