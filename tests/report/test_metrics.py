"""The summary of a run: its arithmetic, and the table people read."""

import json
from typing import Any

import pytest

from cbgen.records import EngineStats, Tally
from cbgen.report.metrics import RunSummary, Timings, format_summary, summarize


def run_of(**changes: Any) -> RunSummary:
    facts: dict[str, Any] = {
        "complete": True,
        "tally": Tally(100, 5000, 2000, {"prompt_too_long": 2, "empty_prompt": 1}),
        "resumed_rows": 40,
        "prompt_tokens": 3000,
        "completion_tokens": 1200,
        "timings": Timings(load=2.0004, generate=60.0, total=63.0),
        "stats": EngineStats(
            num_steps=300, num_active=1800, num_queued_steps=100, num_queued_active=790, run_seconds=50.0
        ),
        "slots": 8,
        "peak_memory_bytes": 1_500_000_000,
        "peak_device_memory_bytes": 0,
        "settings": {"a": 1},
        "versions": {"cbgen": "0"},
    }
    return RunSummary(**{**facts, **changes})


def test_rows_and_tokens_are_of_the_output_and_speeds_of_this_run() -> None:
    summary = summarize(run_of())

    assert (summary["rows"], summary["rows_ok"], summary["rows_failed"], summary["resumed_rows"]) == (100, 97, 3, 40)
    assert (summary["prompt_tokens"], summary["completion_tokens"], summary["generated_tokens"]) == (5000, 2000, 1200)
    assert summary["output_tokens_per_second"] == 20.0
    assert summary["prompt_tokens_per_second"] == 50.0


def test_occupancy_is_the_share_of_slots_that_computed() -> None:
    summary = summarize(run_of())

    assert summary["occupancy"] == 0.75
    assert summary["occupancy_while_queued"] == 0.9875


def test_errors_are_listed_by_name() -> None:
    assert list(summarize(run_of())["errors"].items()) == [("empty_prompt", 1), ("prompt_too_long", 2)]


def test_run_that_generated_nothing_divides_by_nothing() -> None:
    summary = summarize(run_of(stats=EngineStats(), slots=0, timings=Timings(), completion_tokens=0, tally=Tally()))

    assert summary["occupancy"] == summary["output_tokens_per_second"] == 0.0
    assert "throughput" not in format_summary(summary)
    assert "occupancy" not in format_summary(summary)


def test_summary_is_json_and_its_names_stay() -> None:
    summary = json.loads(json.dumps(summarize(run_of())))

    assert set(summary) >= {
        "version", "complete", "rows", "rows_ok", "rows_failed", "errors", "resumed_rows", "prompt_tokens",
        "completion_tokens", "generated_tokens", "output_tokens_per_second", "prompt_tokens_per_second",
        "generate_seconds", "load_seconds", "total_seconds", "steps", "occupancy", "occupancy_while_queued",
        "preemptions", "step_seconds", "peak_memory_bytes", "peak_device_memory_bytes", "settings", "versions",
    }  # fmt: skip
    assert summary["version"] == 1
    assert summary["load_seconds"] == 2.0
    assert summary["step_seconds"]["run"] == 50.0


def test_table_says_what_happened() -> None:
    table = format_summary(summarize(run_of()))

    assert "100: 97 ok, 3 failed, 40 of them by earlier runs" in table
    assert "empty_prompt 1, prompt_too_long 2" in table
    assert "5,000 in, 2,000 out" in table
    assert "20 tok/s out, 50 tok/s in, over 60.0 s" in table
    assert "75.0% of slots over 300 steps (98.8% while rows were queued), 0 preemptions" in table
    assert "1.50 GB" in table


@pytest.mark.parametrize(
    ("changes", "absent"), [({"tally": Tally(3)}, "errors"), ({"resumed_rows": 0}, "earlier runs")]
)
def test_table_leaves_out_what_there_is_none_of(changes: dict[str, Any], absent: str) -> None:
    assert absent not in format_summary(summarize(run_of(**changes)))


def test_device_memory_is_shown_where_there_is_some() -> None:
    assert "on the device" not in format_summary(summarize(run_of()))
    assert "2.00 GB on the device" in format_summary(summarize(run_of(peak_device_memory_bytes=2 * 10**9)))


def test_steps_that_ran_out_of_memory_are_told() -> None:
    summary = summarize(run_of(stats=EngineStats(num_steps=9, num_out_of_memory=3)))

    assert summary["out_of_memory_steps"] == 3
    assert "3 steps ran out of memory" in format_summary(summary)
