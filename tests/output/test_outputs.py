"""Every kind of local output: right, in order and once, through deaths at every call, power cuts and other people."""

import random
from pathlib import Path
from typing import Any

import pytest

from cbgen.config import OutputConfig
from cbgen.errors import CbgenError, UsageError
from cbgen.output.outputs import make_output
from cbgen.output.places import Place
from tests.output.machine import deaths, machine
from tests.output.miniature import Mini, answer

pytestmark = pytest.mark.usefixtures("small_files")

NUM_ROWS = 7


def unbroken(directory: Path, kind: str, num_rows: int = NUM_ROWS, **options: Any) -> list[dict[str, Any]]:
    """The rows of a run that nothing happens to."""
    job = Mini(directory / "unbroken", kind, num_rows)
    job.work(**options)
    return job.decoded()


# -- what is in them --------------------------------------------------------------------------------------------------


def test_rows_are_the_inputs_columns_and_the_answers_in_input_order(tmp_path: Path, kind: str) -> None:
    rows = unbroken(tmp_path, kind, 11, seed=3)

    assert [row["prompt"] for row in rows] == [f"p{index}" for index in range(11)]
    for index, row in enumerate(rows):
        expected = answer(Mini(tmp_path / "unbroken", kind, 11).rows()[index])
        assert row["completion"] == getattr(expected, "text", None)
        assert (row["error"] is None) == (index % 5 != 3)


def test_parts_hold_fixed_ranges_of_rows(tmp_path: Path) -> None:
    job = Mini(tmp_path / "job", "jsonl-parts", 8)
    job.work()

    parts = {path.name: path.read_bytes().count(b"\n") for path in Path(job.config.path).glob("part-*")}
    assert parts == {"part-000000.jsonl": 3, "part-000001.jsonl": 3, "part-000002.jsonl": 2}


def test_input_that_grows_again_and_again_ends_in_the_same_rows(tmp_path: Path, kind: str) -> None:
    job = Mini(tmp_path / "job", kind, 11)
    for count in range(12):
        assert len(job.work(count=count)) == (count > 0)
        assert [row["prompt"] for row in (job.decoded() if count else ())] == [f"p{index}" for index in range(count)]

    assert job.decoded() == unbroken(tmp_path, kind, 11)


# -- deaths -----------------------------------------------------------------------------------------------------------


def test_killed_at_every_call_it_ends_in_the_same_rows_and_nothing_is_done_twice(tmp_path: Path, kind: str) -> None:
    expected = unbroken(tmp_path, kind)
    for call, directory, it in deaths(tmp_path, least=40):
        job = Mini(directory, kind, NUM_ROWS)
        finished: list[int] = []
        with it.running():
            job.work(generated=finished)

        again = job.work(seed=1)

        assert job.decoded() == expected, f"killed at call {call}"
        assert not set(again) & set(finished), f"killed at call {call}"


@pytest.mark.parametrize("seed", range(4))
def test_killed_again_and_again_while_the_input_grows_it_still_recovers(tmp_path: Path, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    job, finished = Mini(tmp_path / "job", kind, 16), set[int]()
    for life in range(20):
        generated: list[int] = []
        with machine(dies_at=rng.randrange(90)):
            job.work(count=min(16, 4 + life), seed=life, generated=generated)
        assert not finished & set(generated)
        finished |= set(generated)

    job.work()

    assert job.decoded() == unbroken(tmp_path, kind, 16)


@pytest.mark.parametrize("seed", range(12))
def test_power_cut_ends_in_the_same_rows_and_loses_nothing_that_was_committed(
    tmp_path: Path, kind: str, seed: int
) -> None:
    rng = random.Random(seed)
    job = Mini(tmp_path / "job", kind, 12)
    for life in range(3):
        with machine(dies_at=rng.randrange(10, 120)) as it:
            job.work(seed=life, count=6 + 3 * life)
        it.cut_power(tmp_path / "job", rng)

    job.work()

    assert job.decoded() == unbroken(tmp_path, kind, 12)


def test_disk_that_is_full_from_any_call_on_is_one_sentence_and_loses_nothing(tmp_path: Path, kind: str) -> None:
    expected = unbroken(tmp_path, kind)
    for call, directory, it in deaths(tmp_path, step=2, is_full=True):
        job = Mini(directory, kind, NUM_ROWS)
        finished: list[int] = []
        failure = None
        try:
            with it.running():
                job.work(generated=finished)
        except CbgenError as error:
            failure = str(error)
        assert failure is None or ("No space left on device" in failure and "\n" not in failure), f"full at call {call}"

        again = job.work(seed=1)

        assert job.decoded() == expected, f"full at call {call}"
        assert not set(again) & set(finished), f"full at call {call}"


def test_machine_leaves_the_calls_of_an_unbroken_run_alone(tmp_path: Path, kind: str) -> None:
    job = Mini(tmp_path / "job", kind, NUM_ROWS)
    with machine() as it:
        job.work()

    assert it.calls > 40
    assert job.decoded() == unbroken(tmp_path, kind)


@pytest.mark.parametrize("kind", ["parquet", "carried-parts", "jsonl-parts"])
def test_publication_that_a_crash_prevents_again_and_again_leaves_a_file_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    job = Mini(tmp_path / "job", kind, 5)
    job.work(count=4)
    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(Place, "put", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                job.work()

    job.work()

    assert job.decoded() == unbroken(tmp_path, kind, 5)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.jsonl", "jsonl"),
        ("a", "jsonl"),
        ("a.pq", "parquet"),
        ("A.PARQUET", "parquet"),
        ("a.jsonl.zstd", "jsonl.zst"),
        ("a.jsonl.gz", "jsonl.gz"),
    ],
)
def test_a_name_tells_the_form(name, form):
    assert OutputConfig(path=name).resolved_format == form


@pytest.mark.parametrize("name", ["a.csv", "a.arrow", "a.jsonl.bz2", "a.parquet.gz", "a.csv.zst", "a.tar.gz"])
def test_a_name_that_promises_another_form_is_refused(name, tmp_path):
    with pytest.raises(UsageError, match=r"can be \.jsonl"):
        make_output(OutputConfig(path=str(tmp_path / name)))
    assert make_output(OutputConfig(path=str(tmp_path / name), format="jsonl"))
