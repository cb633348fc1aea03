"""Failed rows, tried again: only they change, in one step, through deaths at every call, in every kind of output."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbgen.errors import CbgenError
from tests.data.machine import fast_directory, machine
from tests.data.miniature import KINDS, Mini, answer, mended_answer, rows_of, saved_state, sidecar_of, small_files

NUM_ROWS = 9  # rows 3 and 8 fail; row 8 is good at the second try
FAILED = [3, 8]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with fast_directory(tmp_path) as directory:
        yield directory


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    small_files(monkeypatch)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def finished(directory: Path, kind: str, num_rows: int = NUM_ROWS) -> Mini:
    job = Mini(directory, kind, num_rows)
    job.work()
    return job


def mended(directory: Path, kind: str, num_rows: int = NUM_ROWS) -> Mini:
    """An output whose failed rows were tried again and nothing happened."""
    job = finished(directory / "mended", kind, num_rows)
    job.retry()
    return job


def test_only_failed_rows_are_done_again_and_all_others_stay(tmp_path: Path, kind: str) -> None:
    job = finished(tmp_path / "job", kind)
    before = job.decoded()

    assert sorted(job.retry()) == FAILED

    after = job.decoded()
    assert [row for number, row in enumerate(after) if number not in FAILED] == [
        row for number, row in enumerate(before) if number not in FAILED
    ]
    assert [after[8][name] for name in ("prompt", "completion", "error")] == ["p8", "mended 8", None]
    assert after[3] == before[3]
    assert saved_state(job.config).tally.errors == {"empty_prompt": 1}
    assert not (sidecar_of(job.config) / "retry").exists()


def test_totals_are_those_of_a_run_that_had_these_answers_at_once(tmp_path: Path, kind: str) -> None:
    at_once = Mini(tmp_path / "at-once", kind, NUM_ROWS)
    at_once.work(give=lambda row: mended_answer(row) if row.index in FAILED else answer(row))
    job = mended(tmp_path, kind)

    again, state = saved_state(at_once.config), saved_state(job.config)
    assert (state.tally, state.digest, state.good_digest, state.rows) == (
        again.tally,
        again.digest,
        again.good_digest,
        again.rows,
    )
    assert job.decoded() == at_once.decoded()


def test_input_may_grow_after_a_retry(tmp_path: Path, kind: str) -> None:
    job = Mini(tmp_path / "job", kind, 14)
    job.work(count=NUM_ROWS)
    job.retry()
    job.work()

    expected = Mini(tmp_path / "at-once", kind, 14)
    expected.work(give=lambda row: mended_answer(row) if row.index in FAILED else answer(row))
    assert job.decoded() == expected.decoded()


def test_retry_in_the_middle_of_a_job_and_the_rest_afterwards(tmp_path: Path, kind: str) -> None:
    job = Mini(tmp_path / "job", kind, 14)
    job.work(seed=3, stop_after=12, commit_share=1)
    job.retry()
    job.work()

    assert [row["prompt"] for row in job.decoded()] == [row.columns["prompt"] for row in rows_of(14)]
    assert [row["completion"] for row in job.decoded()].count(None) >= 1


def test_killed_at_every_call_of_a_retry_it_goes_on_and_does_nothing_twice(tmp_path: Path, kind: str) -> None:
    expected = mended(tmp_path, kind)
    for call in range(10_000):
        job = finished(tmp_path / str(call), kind)
        generated: list[int] = []
        with machine(dies_at=call) as it:
            job.retry(generated=generated)

        again = job.retry(seed=1)

        # What failed again may be tried once more when the first retry had ended and only its journal was left.
        assert not (set(again) & set(generated)) - {3}, f"killed at call {call}"
        assert job.decoded() == expected.decoded(), f"killed at call {call}"
        state, right = saved_state(job.config), saved_state(expected.config)
        assert (state.tally.errors, state.good_digest) == (right.tally.errors, right.good_digest), f"at call {call}"
        if it.calls <= call:
            break
    assert call > 20


def test_killed_at_every_call_of_a_retry_a_plain_run_goes_on_too(tmp_path: Path, kind: str) -> None:
    before, expected = finished(tmp_path / "before", kind).decoded(), mended(tmp_path, kind).decoded()
    for call in range(10_000):
        job = finished(tmp_path / str(call), kind)
        with machine(dies_at=call) as it:
            job.retry()

        assert job.work() == []

        assert job.decoded() in (before, expected), f"killed at call {call}"
        assert saved_state(job.config).tally.num_errors == sum(row["error"] is not None for row in job.decoded())
        if it.calls <= call:
            break


@pytest.mark.parametrize("seed", range(12))
def test_power_cut_during_a_retry(tmp_path: Path, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    expected = mended(tmp_path, kind).decoded()
    job = finished(tmp_path / "job", kind)
    for life in range(2):
        with machine(dies_at=rng.randrange(60)) as it:
            job.retry(seed=life)
        it.cut_power(tmp_path / "job", rng)

    job.retry()

    assert job.decoded() == expected


def test_full_disk_during_a_retry_loses_nothing(tmp_path: Path, kind: str) -> None:
    expected = mended(tmp_path, kind).decoded()
    for call in range(0, 10_000, 2):
        job = finished(tmp_path / str(call), kind)
        failure = None
        try:
            with machine(dies_at=call, is_full=True) as it:
                job.retry()
        except CbgenError as error:
            failure = str(error)
        assert failure is None or ("No space left on device" in failure and "\n" not in failure), f"full at call {call}"

        job.retry()

        assert job.decoded() == expected, f"full at call {call}"
        if it.calls <= call:
            break
