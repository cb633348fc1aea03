"""The output file: in order, once each, through kills at every system call, power cuts, full disks and other people."""

import contextlib
import errno
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from cbgen.config import OutputConfig
from cbgen.errors import CbgenError, RefusedError, RowError, UsageError
from cbgen.output import journal as journal_module
from cbgen.output import sidecar as sidecar_module
from cbgen.output import writers as writers_module
from cbgen.output.formats import RecordFormat
from cbgen.output.sidecar import Sidecar
from cbgen.output.state import State, add_row
from cbgen.output.writers import OrderedWriter
from cbgen.records import Completion, Position, Row, Tally
from tests.helpers import make_row
from tests.output.machine import deaths, machine
from tests.output.miniature import (
    FINGERPRINT,
    SIGNATURES,
    config_for,
    long_answer,
    opened,
    output_of,
    read,
    record_of,
    rows_of,
    saved_state,
    sidecar_of,
    work,
)


def started(config: OutputConfig, rows: list[Row], stop_after: int, seed: int = 0) -> list[int]:
    """A run that was killed after so many rows, between two system calls."""
    return work(config, rows, stop_after=stop_after, seed=seed)


# -- in order ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("seed", range(40))
def test_any_completion_order_gives_the_output_in_input_order(tmp_path: Path, seed: int) -> None:
    config, rows = config_for(tmp_path), rows_of(20)

    generated = work(config, rows, seed=seed)

    assert sorted(generated) == list(range(20))
    assert read(config) == output_of(rows, config)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("seed", range(10))
def test_each_commit_leaves_exactly_the_gap_free_prefix(tmp_path: Path, seed: int) -> None:
    config, rows = config_for(tmp_path), rows_of(12)
    order = random.Random(seed).sample(rows, 12)

    with opened(config) as writer:
        for number, row in enumerate(order, 1):
            writer.put(row, record_of(row, config))
            writer.commit()
            done = {row.index for row in order[:number]}
            head = next(index for index in range(13) if index not in done)
            assert read(config) == output_of(rows[:head], config)
            assert (writer.head, writer.state.rows, writer.num_finished) == (head, head, number)
            assert saved_state(config) == writer.state
            assert writer.state.position == Position(0, 10 * head, head)


def test_state_counts_rows_errors_and_tokens(tmp_path: Path) -> None:
    config, rows = config_for(tmp_path), rows_of(10)

    work(config, rows)

    state = saved_state(config)
    assert state.tally == Tally(10, sum(range(10)) - 3 - 8, 16, {"empty_prompt": 2})
    assert state.num_bytes == len(read(config))
    assert state.signatures == SIGNATURES
    digest = good_digest = 0
    for row in rows:
        digest = add_row(digest, row.index, row.checksum)
        good_digest = good_digest if row.index in (3, 8) else add_row(good_digest, row.index, row.checksum)
    assert (state.digest, state.good_digest) == (digest, good_digest)


def test_digest_depends_on_places_and_on_every_checksum_but_not_on_the_order_of_adding() -> None:
    digests = {add_row(add_row(0, 0, a), 1, b) for a, b in [(1, 2), (2, 1), (1, 1), (1, 3)]}

    assert len(digests) == 4
    assert add_row(add_row(0, 0, 1), 1, 2) == add_row(add_row(0, 1, 2), 0, 1)


def test_finished_output_has_no_journal_left(tmp_path: Path) -> None:
    config = config_for(tmp_path)

    work(config, rows_of(5))

    assert sorted(path.name for path in sidecar_of(config).iterdir()) == ["lock", "marks", "run.json", "state.json"]


def test_finished_output_runs_again_without_any_work(tmp_path: Path) -> None:
    config, rows = config_for(tmp_path), rows_of(5)
    work(config, rows)

    assert work(config, rows) == []
    assert read(config) == output_of(rows, config)


def test_input_that_grew_continues(tmp_path: Path) -> None:
    config, rows = config_for(tmp_path), rows_of(8)
    work(config, rows[:5])

    assert sorted(work(config, rows)) == [5, 6, 7]
    assert read(config) == output_of(rows, config)


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:13]))
    config, rows = config_for(tmp_path), rows_of(5)

    work(config, rows)

    assert read(config) == output_of(rows, config)


def test_tick_commits_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(writers_module.time, "monotonic", lambda: now[0])
    config, rows = config_for(tmp_path), rows_of(2)

    with opened(config) as writer:
        writer.put(rows[0], record_of(rows[0], config))
        now[0] = 100.9
        writer.tick()
        assert writer.state.rows == 0
        now[0] = 101.1
        writer.tick()
        assert writer.state.rows == 1
        writer.put(rows[1], record_of(rows[1], config))
        now[0] = 101.9
        writer.tick()
        assert writer.state.rows == 1


# -- kills and power cuts ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_every_system_call_it_recovers_and_generates_nothing_twice(tmp_path: Path, seed: int) -> None:
    rows = rows_of(9)
    for call, directory, it in deaths(tmp_path, least=40):
        config, finished = config_for(directory), list[int]()
        with it.running():
            work(config, rows, seed=seed, generated=finished)

        again = work(config, rows, seed=seed + 1)

        assert read(config) == output_of(rows, config), f"killed at call {call}"
        assert not set(again) & set(finished), f"killed at call {call}"


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("seed", range(40))
def test_killed_again_and_again_it_still_recovers(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    config, rows, finished = config_for(tmp_path), rows_of(30), set[int]()
    for life in range(30):
        generated: list[int] = []
        with machine(dies_at=rng.randrange(60)):
            work(config, rows, seed=life, generated=generated)
        assert not finished & set(generated)
        finished |= set(generated)

    work(config, rows)

    assert read(config) == output_of(rows, config)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("seed", range(80))
def test_power_cut_loses_at_most_what_was_never_synced(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    config, rows = config_for(tmp_path), rows_of(20)
    committed: list[int] = []
    finished: list[int] = []
    commit = OrderedWriter.commit

    def noted_commit(writer: OrderedWriter) -> None:
        commit(writer)
        committed[:] = finished

    with machine(dies_at=rng.randrange(20, 150)) as it, pytest.MonkeyPatch.context() as patch:
        patch.setattr(OrderedWriter, "commit", noted_commit)
        work(config, rows, seed=seed, generated=finished)
    it.cut_power(tmp_path, rng)

    again = work(config, rows, seed=seed)

    assert not set(again) & set(committed)
    assert read(config) == output_of(rows, config)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("stop_after", [1, 5, 9])
@pytest.mark.parametrize("names_first", ["run.json", "state.json", "wal"])
def test_killed_while_overwriting_it_never_mixes_the_old_job_into_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names_first: str, stop_after: int
) -> None:
    listed = Path.iterdir
    monkeypatch.setattr(
        Path, "iterdir", lambda path: iter(sorted(listed(path), key=lambda p: (not p.name.startswith(names_first), p)))
    )
    rows, new = rows_of(9), {"model": "new"}
    for call, directory, it in deaths(tmp_path, least=10):
        config = config_for(directory)
        work(config, rows, give=old_answer, stop_after=stop_after)
        old = read(config)
        with it.running():
            work(config_for(directory, overwrite=True), rows, fingerprint=new, stop_after=4)

        with contextlib.suppress(RefusedError):  # as good an answer as going on
            work(config, rows, fingerprint=new)
            assert read(config) == output_of(rows, config), f"killed at call {call}"
        assert not old or any(path.read_bytes() == old for path in directory.glob("out.jsonl*") if path.is_file())


def old_answer(row: Row) -> Completion:
    return Completion(f"old answer {row.index}", "stop", 1, 1, [1])


# -- an output that somebody touched ----------------------------------------------------------------------------------


def test_tail_beyond_the_committed_size_is_cut(tmp_path: Path) -> None:
    config, rows = config_for(tmp_path), rows_of(5)
    work(config, rows[:3])
    state = Path(f"{config.path}.cbgen/state.json")
    state.write_bytes(replace(State.from_json(state.read_bytes()), closed=False).to_json())  # as after a kill
    with Path(config.path).open("ab") as file:
        file.write(b'{"half a rec')

    work(config, rows)

    assert read(config) == output_of(rows, config)


BATCH = {"custom_id": "a", "url": "u", "body": {}}


@pytest.mark.parametrize(
    ("columns", "form", "options"),
    [
        ({}, "native", {}),
        ({}, "native", {"result_prefix": "r_", "token_ids": True}),
        ({"response": "a column of the user's own"}, "native", {}),
        ({"response": {"body": {"usage": None}}}, "native", {"result_prefix": "r_"}),
        (BATCH, "openai_chat", {}),
        (BATCH, "openai_completion", {}),
    ],
    ids=["native", "prefix", "response-column", "response-object", "chat", "completion"],
)
def test_output_cut_short_keeps_its_whole_rows_and_only_they_count(
    tmp_path: Path, columns: dict[str, Any], form: Any, options: dict[str, Any]
) -> None:
    config, rows = config_for(tmp_path, **options), rows_of(8, **columns)
    for row in rows:
        row.form = form
    work(config, rows)
    whole = read(config)
    ends = [number + 1 for number, byte in enumerate(whole) if byte == 0x0A]

    for size in [0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[4] - 1, ends[4], len(whole) - 1]:
        os.truncate(config.path, size)
        kept = sum(end <= size for end in ends)
        assert repaired(config) == (kept, len(output_of(rows[:kept], config)), tally_of(rows[:kept], config))
        assert sorted(work(config, rows)) == list(range(kept, 8))
        assert read(config) == whole


def repaired(config: OutputConfig) -> tuple[int, int, Tally]:
    with Sidecar.open(config, ()) as sidecar:
        state = sidecar.repair(sidecar.read_state())
    assert Path(config.path).stat().st_size == state.num_bytes
    return state.rows, state.num_bytes, state.tally


def tally_of(rows: list[Row], config: OutputConfig) -> Tally:
    tally = Tally()
    for row in rows:
        record = record_of(row, config)
        tally.add(record.error_code, record.prompt_tokens, record.completion_tokens)
    return tally


def test_deleted_output_is_generated_again(tmp_path: Path) -> None:
    config, rows = config_for(tmp_path), rows_of(5)
    work(config, rows)
    Path(config.path).unlink()

    assert sorted(work(config, rows)) == [0, 1, 2, 3, 4]
    assert read(config) == output_of(rows, config)


def test_rows_that_wait_in_the_journal_survive_a_shortened_output(tmp_path: Path) -> None:
    config, rows = config_for(tmp_path), rows_of(6)
    with opened(config) as writer:
        for index in (0, 1, 4, 5):
            writer.put(rows[index], record_of(rows[index], config))
        writer.commit()
    os.truncate(config.path, 3)

    assert set(work(config, rows)) <= {0, 1, 2, 3}
    assert read(config) == output_of(rows, config)


@pytest.mark.usefixtures("small_files")
def test_killed_after_a_repair_every_row_is_still_whole_though_answers_differ(tmp_path: Path) -> None:
    """Redone rows need not have the bytes they had: sampling on another device, say."""
    rows = rows_of(9)
    for call, directory, it in deaths(tmp_path):
        config = config_for(directory)
        work(config, rows)
        os.truncate(config.path, len(read(config)) // 3)
        with it.running():
            work(config, rows, give=long_answer, commit_share=0)

        work(config, rows)

        prompts = [orjson.loads(line)["prompt"] for line in read(config).splitlines()]
        assert prompts == [row.columns["prompt"] for row in rows], f"killed at call {call}"


def test_row_that_changed_after_it_was_finished_is_refused_with_its_place(tmp_path: Path) -> None:
    config, rows = config_for(tmp_path), rows_of(4)
    with opened(config) as writer:
        writer.put(rows[2], record_of(rows[2], config))
        writer.flush()
    rows[2].checksum += 1

    with pytest.raises(RefusedError, match=r"in\.jsonl line 3 has changed"):
        work(config, rows)


def test_fewer_rows_than_the_journal_holds_lose_none_and_end_well(tmp_path: Path) -> None:  # a smaller --limit
    config, rows = config_for(tmp_path), rows_of(6)
    with opened(config) as writer:
        writer.put(rows[5], record_of(rows[5], config))
        writer.flush()

    work(config, rows[:3])
    assert read(config) == output_of(rows[:3], config)

    assert sorted(work(config, rows)) == [3, 4]
    assert read(config) == output_of(rows, config)


# -- who may write where ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_begun", [False, True])
def test_second_run_on_an_output_is_refused_and_does_not_disturb_the_first(tmp_path: Path, has_begun: bool) -> None:
    config, rows = config_for(tmp_path), rows_of(3)
    with Sidecar.open(config, ()) as sidecar:
        if has_begun:
            sidecar.begin(FINGERPRINT, {})
        with pytest.raises(RefusedError, match=rf"another run is writing .*out\.jsonl \(pid {os.getpid()} on "):
            work(config, rows)
        assert (sidecar.directory / "lock").exists(), "the first run's directory is gone"
        sidecar.begin(FINGERPRINT, {})

    work(config, rows)
    assert read(config) == output_of(rows, config)


def test_third_run_is_refused_too_while_the_first_one_loads(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    with Sidecar.open(config, ()):
        for _ in range(2):
            with pytest.raises(RefusedError, match="another run is writing"):
                work(config, rows_of(3))


def test_lock_goes_with_the_run_that_held_it(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    with contextlib.suppress(KeyboardInterrupt), Sidecar.open(config, ()) as sidecar:
        sidecar.begin(FINGERPRINT, {})
        raise KeyboardInterrupt

    work(config, rows_of(2))

    assert read(config) == output_of(rows_of(2), config)


@pytest.mark.parametrize(
    ("now", "line"),
    [
        ({"model": "m", "temperature": 0.7}, "temperature: 0.5 before, 0.7 now"),
        ({"model": "other", "temperature": 0.5}, 'model: "m" before, "other" now'),
        ({"model": "m"}, "temperature: 0.5 before, null now"),
        ({"model": "m", "temperature": 0.5, "seed": 3}, "seed: null before, 3 now"),
    ],
)
def test_other_settings_are_refused_with_field_and_both_values(tmp_path: Path, now: dict[str, Any], line: str) -> None:
    config, rows = config_for(tmp_path), rows_of(4)
    started(config, rows, 2)
    before = read(config)

    with pytest.raises(RefusedError) as refused:
        work(config, rows, fingerprint=now)

    shown = [text for text in str(refused.value).splitlines() if text.startswith("  ")]
    assert shown == [f"  {line}"]
    assert read(config) == before


def test_settings_are_compared_as_they_are_written(tmp_path: Path) -> None:
    config, rows = config_for(tmp_path), rows_of(2)
    work(config, rows, fingerprint={"stop": ("a",), "seed": 2**63 - 1, "text": "é\n"})

    assert work(config, rows, fingerprint={"stop": ["a"], "seed": 2**63 - 1, "text": "é\n"}) == []


def test_output_of_another_format_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, rows = config_for(tmp_path), rows_of(4)
    started(config, rows, 2)
    monkeypatch.setattr(sidecar_module, "FORMAT_VERSION", 3)

    with pytest.raises(RefusedError, match="another version"):
        work(config, rows)


def test_foreign_output_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    Path(config.path).write_bytes(b"precious\n")

    with pytest.raises(RefusedError, match="--overwrite"):
        work(config, rows_of(2))

    assert read(config) == b"precious\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_empty_file_may_be_written_to(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    Path(config.path).touch()

    work(config, rows_of(2))

    assert read(config) == output_of(rows_of(2), config)


def test_overwrite_keeps_the_old_output_as_a_backup(tmp_path: Path) -> None:
    config = config_for(tmp_path, overwrite=True)
    Path(config.path).write_bytes(b"precious\n")

    work(config, rows_of(2))

    (backup,) = tmp_path.glob("out.jsonl.backup-*")
    assert backup.read_bytes() == b"precious\n"
    assert read(config) == output_of(rows_of(2), config)


def test_two_overwrites_within_a_second_keep_both_old_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20240102-030405")
    config = config_for(tmp_path, overwrite=True)
    Path(config.path).write_bytes(b"precious\n")

    work(config, rows_of(1))
    work(config, rows_of(2))

    backups = sorted(path.read_bytes() for path in tmp_path.glob("out.jsonl.backup-*"))
    assert backups == sorted([b"precious\n", output_of(rows_of(1), config)])


def test_overwrite_touches_nothing_before_it_begins(tmp_path: Path) -> None:
    config, rows = config_for(tmp_path), rows_of(4)
    started(config, rows, 3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"}

    with contextlib.suppress(ZeroDivisionError), Sidecar.open(config_for(tmp_path, overwrite=True), ()) as sidecar:
        sidecar.check_fingerprint({"model": "new"})
        assert sidecar.repair(sidecar.read_state()) == State()
        raise ZeroDivisionError  # the model could not be loaded

    assert {path: path.read_bytes() for path in before} == before
    assert not list(tmp_path.glob("*backup*"))


def test_overwrite_forgets_journal_state_and_settings(tmp_path: Path) -> None:
    config, rows = config_for(tmp_path, overwrite=True), rows_of(6)
    work(config_for(tmp_path), rows, give=old_answer, stop_after=4)

    generated = work(config, rows, fingerprint={"model": "new"})

    assert sorted(generated) == [0, 1, 2, 3, 4, 5]
    assert read(config) == output_of(rows, config)


def test_run_that_fails_before_it_begins_leaves_no_directory(tmp_path: Path) -> None:
    config = config_for(tmp_path)

    with pytest.raises(ZeroDivisionError), Sidecar.open(config, ()):
        raise ZeroDivisionError

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("link", ["same", "symlink", "hardlink"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_output_that_is_an_input_is_refused(tmp_path: Path, link: str, overwrite: bool) -> None:
    config = config_for(tmp_path, overwrite=overwrite)
    source = Path(config.path) if link == "same" else tmp_path / "in.jsonl"
    source.write_bytes(b"{}\n")
    if link == "symlink":
        Path(config.path).symlink_to(source)
    elif link == "hardlink":
        os.link(source, config.path)

    with pytest.raises(RefusedError, match="is the input"), Sidecar.open(config, (str(source),)):
        pass

    assert source.read_bytes() == b"{}\n"
    assert not sidecar_of(config).exists()


def test_output_below_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = OutputConfig(path=str(tmp_path / "file" / "out.jsonl"))

    with pytest.raises(UsageError, match="cannot write"), Sidecar.open(config, ()):
        pass


@pytest.mark.parametrize("name", ["out.csv", "out.tsv", "out.xlsx", "out.bz2"])
def test_output_of_another_form_is_a_usage_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"\.jsonl"), Sidecar.open(OutputConfig(path=str(tmp_path / name)), ()):
        pass


def test_folders_of_the_output_are_made(tmp_path: Path) -> None:
    config = config_for(tmp_path / "a" / "b")

    work(config, rows_of(1))

    assert read(config) == output_of(rows_of(1), config)


# -- full disks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fills_at", range(10))
def test_full_disk_is_an_error_that_names_the_output_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fills_at: int
) -> None:
    config, rows, finished = config_for(tmp_path), rows_of(9), list[int]()
    disk = FullDisk(fills_at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", disk.write)
        with pytest.raises(CbgenError, match=rf"cannot write {config.path}: No space left on device") as failed:
            work(config, rows, seed=fills_at, generated=finished)
    assert failed.value.exit_code == 1

    again = work(config, rows)

    assert not set(again) & set(finished)
    assert read(config) == output_of(rows, config)


class FullDisk:
    """Takes so many writes, then half of one."""

    def __init__(self, fills_at: int) -> None:
        self.left = fills_at
        self._write = os.write

    def write(self, fd: int, data: memoryview) -> int:
        self.left -= 1
        if self.left == -1:
            return self._write(fd, data[: len(data) // 2])
        if self.left < -1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(fd, data)


def test_segment_that_cannot_be_opened_is_an_error_that_names_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_SEGMENT_BYTES", 1)
    config, rows = config_for(tmp_path), rows_of(3)

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill_the_disk() -> None:
        with opened(config) as writer:
            writer.put(rows[0], record_of(rows[0], config))
            writer.flush()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "open", fail)
                writer.put(rows[1], record_of(rows[1], config))
                writer.flush()

    with pytest.raises(CbgenError, match=r"cannot write .*out\.jsonl: No space left"):
        fill_the_disk()


def test_failing_fsync_is_an_error_that_names_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, rows = config_for(tmp_path), rows_of(1)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(config) as writer:
        writer.put(rows[0], record_of(rows[0], config))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(CbgenError, match=r"out\.jsonl: Input/output error"):
                writer.commit()


# -- records ----------------------------------------------------------------------------------------------------------


def test_record_holds_the_rows_columns_and_then_the_result() -> None:
    row = make_row(0, prompt="p", id=2**70)

    record = RecordFormat(OutputConfig(path="o"), "m").record(row, Completion("text", "stop", 3, 2, [7, 8]))

    assert record.payload == (
        b'{"prompt":"p","id":%d,"completion":"text","finish_reason":"stop","usage":{"prompt_tokens":3,'
        b'"completion_tokens":2,"cached_tokens":0},"error":null}' % 2**70
    )
    assert (record.error_code, record.prompt_tokens, record.completion_tokens) == (None, 3, 2)
    assert record.checksum == row.checksum


@pytest.mark.parametrize("options", [{}, {"token_ids": True}, {"result_prefix": "r_"}])
def test_failed_row_has_the_same_fields_as_a_good_one(options: dict[str, Any]) -> None:
    config, row = OutputConfig(path="o", **options), make_row(0, prompt="p")
    good = orjson.loads(RecordFormat(config, "m").record(row, Completion("text", "stop", 3, 2, [7, 8])).payload)

    bad = orjson.loads(RecordFormat(config, "m").record(row, RowError("empty_prompt", "why")).payload)

    assert list(bad) == list(good) == ["prompt", *config.result_fields]
    assert bad[config.field("error")] == {"code": "empty_prompt", "message": "why"}
    assert bad[config.field("completion")] is None
    assert good[config.field("completion")] == "text"


@pytest.mark.parametrize("form", ["openai_chat", "openai_completion"])
def test_batch_row_is_answered_in_batch_form(form: Any) -> None:
    row = make_row(4, custom_id="mine", url="u", body={})
    row.form = form

    value = orjson.loads(
        RecordFormat(OutputConfig(path="o"), "m").record(row, Completion("text", "length", 3, 2, [])).payload
    )

    body = value["response"]["body"]
    choice = body["choices"][0]
    assert (value["custom_id"], value["error"], value["response"]["status_code"]) == ("mine", None, 200)
    assert (body["model"], body["usage"]["total_tokens"], choice["finish_reason"]) == ("m", 5, "length")
    assert (choice["message"]["content"] if form == "openai_chat" else choice["text"]) == "text"


@pytest.mark.parametrize(("code", "status"), [("invalid_request", 400), ("nan_logits", 500)])
def test_failed_batch_row_says_whose_fault_it_is(code: str, status: int) -> None:
    row = make_row(4, custom_id="mine", url="u", body={})
    row.form = "openai_chat"

    value = orjson.loads(RecordFormat(OutputConfig(path="o"), "m").record(row, RowError(code, "why")).payload)

    assert value["response"]["status_code"] == status
    assert value["error"] == {"code": code, "message": "why"}
    assert value["custom_id"] == "mine"
