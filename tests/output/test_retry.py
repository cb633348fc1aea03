"""Failed rows, tried again: only they change, in one step, through deaths at every call, in every kind of output."""

import contextlib
import io
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbgen.errors import CbgenError, RefusedError
from cbgen.output.retry import RetryWriter
from tests.output.machine import deaths, machine
from tests.output.miniature import (
    Command,
    Mini,
    answer,
    mended_answer,
    rows_of,
    saved_state,
    sidecar_of,
)

pytestmark = pytest.mark.usefixtures("small_files")

NUM_ROWS = 9  # rows 3 and 8 fail; row 8 is good at the second try
FAILED = [3, 8]


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


def test_retry_before_the_end_of_a_job_whose_rows_are_all_there(tmp_path: Path, kind: str) -> None:
    """Pieces that were sealed before must not be taken for those that are sealed afterwards."""
    job = Mini(tmp_path / "job", kind, 14)
    job.work(count=12, stop_after=12, commit_share=1)
    job.retry(goes_on=False)
    job.work()

    expected = Mini(tmp_path / "at-once", kind, 14)
    expected.work(give=lambda row: mended_answer(row) if row.index in FAILED else answer(row))
    assert job.decoded() == expected.decoded()


def test_killed_at_every_call_of_a_retry_it_goes_on_and_does_nothing_twice(tmp_path: Path, kind: str) -> None:
    expected = mended(tmp_path, kind)
    for call, directory, it in deaths(tmp_path, least=20):
        job = finished(directory, kind)
        generated: list[int] = []
        with it.running():
            job.retry(generated=generated)

        again = job.retry(seed=1)

        # What failed again may be tried once more when the first retry had ended and only its journal was left.
        assert not (set(again) & set(generated)) - {3}, f"killed at call {call}"
        assert job.decoded() == expected.decoded(), f"killed at call {call}"
        state, right = saved_state(job.config), saved_state(expected.config)
        assert (state.tally.errors, state.good_digest) == (right.tally.errors, right.good_digest), f"at call {call}"


def test_killed_during_a_retry_a_plain_run_goes_on_too(tmp_path: Path, kind: str) -> None:
    before, expected = finished(tmp_path / "before", kind).decoded(), mended(tmp_path, kind).decoded()
    for call, directory, it in deaths(tmp_path, step=2):
        job = finished(directory, kind)
        with it.running():
            job.retry()

        assert job.work() == []

        assert job.decoded() in (before, expected), f"killed at call {call}"
        assert saved_state(job.config).tally.num_errors == sum(row["error"] is not None for row in job.decoded())


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
    for call, directory, it in deaths(tmp_path, step=3, is_full=True):
        job = finished(directory, kind)
        failure = None
        try:
            with it.running():
                job.retry()
        except CbgenError as error:
            failure = str(error)
        assert failure is None or ("No space left on device" in failure and "\n" not in failure), f"full at call {call}"

        job.retry()

        assert job.decoded() == expected, f"full at call {call}"


# -- the command ------------------------------------------------------------------------------------------------------

PROMPTS = [f"prompt {index}" + "~" * (index % 4 == 2) for index in range(13)]
BROKEN = ["prompt 2~", "prompt 6~", "prompt 10~"]


def raw_lines(job: Command) -> list[bytes]:
    """Lines of a JSONL output, with their bytes."""
    return Path(job.output.path).read_bytes().splitlines(keepends=True)


def completions(job: Command) -> list[str | None]:
    return [row["completion"] for row in job.decoded()]


def test_command_asks_only_failed_rows_again_and_exit_code_tells_what_is_left(tmp_path: Path, kind: str) -> None:
    job = Command(tmp_path / "job", kind, PROMPTS)
    assert job.run() == 3
    before = job.decoded()

    assert job.run(retry_errors=True) == 3
    assert sorted(job.asked) == sorted(BROKEN)
    assert job.decoded() == before

    job.fails = False
    assert job.run(retry_errors=True) == 0
    assert sorted(job.asked) == sorted(BROKEN)
    assert completions(job) == [f"re:{prompt}" for prompt in PROMPTS]
    assert [row for row in job.decoded() if row["prompt"] not in BROKEN] == [
        row for row in before if row["prompt"] not in BROKEN
    ]

    assert job.run(retry_errors=True) == 0
    assert job.asked == []
    assert job.run(verify=True) == 0


def test_other_lines_keep_their_bytes(tmp_path: Path) -> None:
    job = Command(tmp_path / "job", "jsonl", PROMPTS)
    job.run()
    before = raw_lines(job)
    job.fails = False

    job.run(retry_errors=True)

    after = raw_lines(job)
    assert [new == old for new, old in zip(after, before, strict=True)] == [prompt not in BROKEN for prompt in PROMPTS]


def test_retry_and_new_rows_in_one_run(tmp_path: Path, kind: str) -> None:
    job = Command(tmp_path / "job", kind, PROMPTS)
    job.run(limit=8)
    job.fails = False

    assert job.run(retry_errors=True) == 0

    assert sorted(job.asked) == sorted([*BROKEN[:2], *PROMPTS[8:]])
    assert completions(job) == [f"re:{prompt}" for prompt in PROMPTS]


class _Interrupt(BaseException):
    """Stands for anything that ends a run at once."""


@pytest.mark.parametrize("goes_on_with_retry", [True, False])
def test_interrupted_retry_goes_on_and_asks_nothing_twice(tmp_path: Path, kind: str, goes_on_with_retry: bool) -> None:
    job = Command(tmp_path / "job", kind, PROMPTS)
    job.run()
    before = job.decoded()
    job.fails = False
    tick = RetryWriter.tick
    with pytest.MonkeyPatch.context() as patch:

        def tick_once(writer: RetryWriter) -> None:
            tick(writer)
            raise _Interrupt

        patch.setattr(RetryWriter, "tick", tick_once)
        with contextlib.suppress(_Interrupt):
            job.run(retry_errors=True)
    first = job.asked
    assert 0 < len(first) < 3
    assert job.decoded() == before

    if not goes_on_with_retry:
        assert job.run() == 3
        assert (job.asked, job.decoded()) == ([], before)
    assert job.run(retry_errors=True) == 0

    assert sorted([*first, *job.asked]) == sorted(BROKEN)
    assert completions(job) == [f"re:{prompt}" for prompt in PROMPTS]


def test_mended_input_is_accepted_where_rows_failed(tmp_path: Path, kind: str) -> None:
    job = Command(tmp_path / "job", kind, PROMPTS)
    job.run()
    mended_prompts = [prompt.replace("~", " mended") for prompt in PROMPTS]
    job.write(mended_prompts)

    with pytest.raises(RefusedError, match="the input differs from"):
        job.run()
    assert job.run(retry_errors=True) == 0

    assert sorted(job.asked) == ["prompt 10 mended", "prompt 2 mended", "prompt 6 mended"]
    assert completions(job) == [f"re:{prompt}" for prompt in mended_prompts]
    assert [row["prompt"] for row in job.decoded()] == mended_prompts
    assert job.run() == 0, "the mended input is the output's input from now on"
    assert job.asked == []
    assert job.run(verify=True) == 0


@pytest.mark.parametrize("change", ["changed", "moved", "removed", "good and bad"])
def test_changed_good_rows_are_refused_and_nothing_is_touched(tmp_path: Path, kind: str, change: str) -> None:
    job = Command(tmp_path / "job", kind, PROMPTS)
    job.run()
    before = job.decoded()
    changed = {
        "changed": ["other", *PROMPTS[1:]],
        "moved": [PROMPTS[1], PROMPTS[0], *PROMPTS[2:]],
        "removed": PROMPTS[:-1],
        "good and bad": ["other", *[prompt.replace("~", "") for prompt in PROMPTS[1:]]],
    }[change]
    job.write(changed)

    with pytest.raises(RefusedError, match=r"^the input (differs from|is shorter than) [^\n]*$"):
        job.run(retry_errors=True)

    assert job.asked == []
    job.write(PROMPTS)
    assert job.decoded() == before
    assert job.run() == 3
    assert job.asked == []


def test_mended_row_of_an_interrupted_retry_is_asked_again_when_it_was_mended_once_more(tmp_path: Path) -> None:
    job = Command(tmp_path / "job", "jsonl", PROMPTS)
    job.run()
    with pytest.MonkeyPatch.context() as patch:

        def fail(writer: RetryWriter) -> None:
            raise _Interrupt

        patch.setattr(RetryWriter, "finish", fail)
        with contextlib.suppress(_Interrupt):
            job.run(retry_errors=True)
    job.write([prompt.replace("6~", "6 mended") for prompt in PROMPTS])

    assert job.run(retry_errors=True) == 3

    assert job.asked == ["prompt 6 mended"]
    assert completions(job)[6] == "re:prompt 6 mended"


def test_edited_output_is_refused_before_anything_is_asked_or_redone_from_there(tmp_path: Path, kind: str) -> None:
    job = Command(tmp_path / "job", kind, PROMPTS)
    job.run()
    path = Path(job.output.path)
    path = sorted(path.glob("part-*"))[0] if path.is_dir() else path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    os.utime(path, ns=(5, 5))

    try:
        job.run(retry_errors=True)
    except RefusedError:
        assert job.asked == []
    else:  # a gzip member ends in zeros, as a file does that lost its end
        assert kind == "gzip"
        assert [row["prompt"] for row in job.decoded()] == PROMPTS


def test_rows_of_a_stream_cannot_be_tried_again(tmp_path: Path) -> None:
    job = Command(tmp_path / "job", "jsonl", PROMPTS)
    data = job.input.read_bytes()
    for number in range(2):
        with pytest.MonkeyPatch.context() as patch, open_pipe(data) as stdin:
            patch.setattr(sys, "stdin", stdin)
            if number == 0:
                assert job.run(source="-") == 3
            else:
                with pytest.raises(CbgenError, match=r"^[^\n]*cannot be read twice[^\n]*$"):
                    job.run(source="-", retry_errors=True)
    assert job.asked == []


@contextlib.contextmanager
def open_pipe(data: bytes) -> Iterator[io.TextIOWrapper]:
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    with open(reader) as stream:
        yield stream


def test_retry_of_an_output_that_was_never_begun_is_a_plain_run(tmp_path: Path, kind: str) -> None:
    job = Command(tmp_path / "job", kind, PROMPTS)

    assert job.run(retry_errors=True) == 3
    assert sorted(job.asked) == sorted(PROMPTS)
