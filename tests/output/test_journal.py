"""The journal: what `append` returned for is there after any crash, and nothing else is."""

import os
import random
from pathlib import Path

import pytest

from cbgen.output import journal as journal_module
from cbgen.output.journal import Journal, Record


def record(index: int, size: int = 5) -> Record:
    error_code = "invalid_json" if index % 3 == 0 else None
    return Record(index, 7000 + index, error_code, index, 2 * index, b'{"row": %d, "x": " %b "}' % (index, b"z" * size))


def filled(directory: Path, *indices: int) -> Journal:
    journal = Journal(directory, 0)
    for index in indices:
        journal.append([record(index)])
    return journal


def write(directory: Path, *indices: int) -> None:
    filled(directory, *indices).close()


def reopen(directory: Path, head: int = 0, up_to: int = 50) -> dict[int, Record]:
    """Everything a new run finds."""
    journal = Journal(directory, head)
    found = {index: journal.pop(index) for index in range(up_to) if index in journal}
    assert len(journal) == 0
    journal.close()
    return found


def records(*indices: int) -> dict[int, Record]:
    return {index: record(index) for index in indices}


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- append, pop, reopen ----------------------------------------------------------------------------------------------


def test_pop_gives_back_what_was_appended(tmp_path: Path) -> None:
    journal = filled(tmp_path, 5, 0, 3)

    assert len(journal) == 3
    assert (3 in journal, 4 in journal) == (True, False)
    assert journal.checksum(5) == 7005
    assert [journal.pop(index) for index in (0, 3, 5)] == [record(0), record(3), record(5)]
    assert len(journal) == 0
    journal.close()


def test_reopened_journal_holds_every_row_from_head_on(tmp_path: Path) -> None:
    write(tmp_path, 4, 2, 0, 1, 3)

    journal = Journal(tmp_path, 2)

    assert [index in journal for index in range(5)] == [False, False, True, True, True]
    assert [journal.checksum(index) for index in (2, 3, 4)] == [7002, 7003, 7004]
    journal.close()


def test_record_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    journal = filled(tmp_path, 0, 1)

    assert reopen(tmp_path) == records(0, 1)  # while the first one never closed, nor synced
    journal.close()


def test_later_record_of_a_row_counts(tmp_path: Path) -> None:
    write(tmp_path, 1)
    journal = Journal(tmp_path, 0)
    journal.append([record(1, size=99)])
    journal.close()

    assert reopen(tmp_path) == {1: record(1, size=99)}


def test_popped_rows_come_back_until_their_segment_is_pruned(tmp_path: Path) -> None:
    journal = filled(tmp_path, 0, 1)
    journal.pop(0)
    journal.close()

    assert reopen(tmp_path) == records(0, 1)


def test_payload_with_spaces_and_any_bytes_survives(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    odd = Record(0, 2**32 - 1, None, 0, 0, b'  {"a": "\xff\x00\r \xe2\x80\xa8"}  ')
    journal.append([odd])
    journal.close()

    assert reopen(tmp_path) == {0: odd}


def test_partial_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write_bytes(fd, data[:7]))

    write(tmp_path, 0, 1, 2)

    assert reopen(tmp_path) == records(0, 1, 2)


@pytest.mark.parametrize("recent_bytes", [0, 60, 10_000])
def test_rows_come_back_alike_from_memory_and_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recent_bytes: int
) -> None:
    monkeypatch.setattr(journal_module, "_RECENT_BYTES", recent_bytes)
    monkeypatch.setattr(journal_module, "_SEGMENT_BYTES", 100)
    journal = filled(tmp_path, *range(9))

    assert [journal.peek(index) for index in (8, 0)] == [record(8), record(0)]
    assert [journal.pop(index) for index in range(9)] == [record(index) for index in range(9)]
    assert reopen(tmp_path) == records(*range(9))
    journal.close()


def test_rows_of_one_append_are_written_at_once_and_each_can_be_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)

    journal.append([record(3), record(1), record(2)])

    assert journal.indices() == [1, 2, 3]
    assert reopen(tmp_path) == records(1, 2, 3)
    journal.close()


# -- what a crash leaves ----------------------------------------------------------------------------------------------


def test_tail_torn_anywhere_loses_only_the_torn_record(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2)
    whole = (tmp_path / "wal-000000.jsonl").read_bytes()
    ends = [number + 1 for number, byte in enumerate(whole) if byte == 0x0A]

    for size in range(len(whole)):
        for name in segments(tmp_path):
            (tmp_path / name).unlink()
        (tmp_path / "wal-000000.jsonl").write_bytes(whole[:size])
        assert reopen(tmp_path) == records(*range(sum(end <= size for end in ends)))


@pytest.mark.parametrize("zeros", [1, 100, 5000])
def test_zero_filled_tail_is_no_record(tmp_path: Path, zeros: int) -> None:
    write(tmp_path, 0, 1)
    with (tmp_path / "wal-000000.jsonl").open("ab") as file:
        file.write(bytes(zeros))

    assert reopen(tmp_path) == records(0, 1)


def test_zeros_over_the_last_record_lose_it(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    path = tmp_path / "wal-000000.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + bytes(len(second)))

    assert reopen(tmp_path) == records(0)


@pytest.mark.parametrize("bit", [1, 2, 4, 8, 128])
def test_flipped_bit_anywhere_in_a_record_stops_there_and_keeps_earlier_ones(tmp_path: Path, bit: int) -> None:
    write(tmp_path, 10, 11, 12)
    first, second, third = (tmp_path / "wal-000000.jsonl").read_bytes().splitlines(keepends=True)

    for position in range(len(second)):
        for name in segments(tmp_path):
            (tmp_path / name).unlink()
        broken = bytearray(second)
        broken[position] ^= bit
        (tmp_path / "wal-000000.jsonl").write_bytes(first + broken + third)
        assert reopen(tmp_path) == records(10), f"byte {position} of {bytes(second)!r}"


def test_changed_payload_stops_there_and_keeps_earlier_records(tmp_path: Path) -> None:
    write(tmp_path, 10, 11, 12)
    path = tmp_path / "wal-000000.jsonl"
    path.write_bytes(path.read_bytes().replace(b'{"row": 11', b'{"row": 13'))

    assert reopen(tmp_path) == records(10)


def test_broken_segment_does_not_hide_the_next_one(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    write(tmp_path, 2, 3)
    path = tmp_path / "wal-000000.jsonl"
    path.write_bytes(path.read_bytes()[:-3])

    assert reopen(tmp_path) == records(0, 2, 3)


def test_nothing_is_ever_appended_behind_a_torn_record(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    path = tmp_path / "wal-000000.jsonl"
    torn = path.read_bytes()[:-3]
    path.write_bytes(torn)

    write(tmp_path, 1, 2)

    assert path.read_bytes() == torn
    assert reopen(tmp_path) == records(0, 1, 2)


@pytest.mark.parametrize("seed", range(30))
def test_many_crashes_in_a_row_lose_only_torn_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(journal_module, "_SEGMENT_BYTES", 150)
    rng = random.Random(seed)
    expected: dict[int, Record] = {}
    for life in range(6):
        journal = Journal(tmp_path, 0)
        assert {index for index in range(100) if index in journal} == set(expected)
        for index in rng.sample(range(50), 6):
            journal.append([record(index, size=life)])
            expected[index] = record(index, size=life)
        last = tmp_path / f"wal-{journal._current:06d}.jsonl"
        journal.close()
        with last.open("ab") as file:
            file.write(rng.choice([b"", bytes(9), record(60).encode()[: rng.randrange(1, 20)]]))

    assert reopen(tmp_path) == expected


def test_record_that_changed_on_disk_meanwhile_is_an_error_not_a_wrong_row(tmp_path: Path) -> None:
    write(tmp_path, 0)
    journal = Journal(tmp_path, 0)
    path = tmp_path / "wal-000000.jsonl"
    path.write_bytes(path.read_bytes().replace(b"zzzzz", b"zzyzz"))

    with pytest.raises(OSError, match="row 0 changed on disk"):
        journal.pop(0)
    journal.close()


def test_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    for name in ("wal-1.jsonl.bak", "state.json", "wal-x.jsonl"):
        (tmp_path / name).write_bytes(b"not ours\n")
    journal = Journal(tmp_path, 0)

    journal.remove()
    journal.close()

    assert segments(tmp_path) == ["state.json", "wal-1.jsonl.bak", "wal-x.jsonl"]


# -- segments ---------------------------------------------------------------------------------------------------------


def test_full_segment_is_followed_by_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_SEGMENT_BYTES", 100)

    write(tmp_path, *range(10))

    assert len(segments(tmp_path)) > 3
    assert reopen(tmp_path) == records(*range(10))


def test_prune_removes_exactly_the_segments_whose_rows_are_all_below_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_SEGMENT_BYTES", 1)  # one record each
    journal = filled(tmp_path, 4, 0, 2, 1, 3)

    journal.prune(2)

    assert segments(tmp_path) == [f"wal-{number:06d}.jsonl" for number in (0, 2, 4)]  # rows 4, 2 and 3
    assert [journal.pop(index) for index in (2, 3, 4)] == [record(2), record(3), record(4)]
    journal.close()


def test_prune_keeps_the_segment_that_is_written_to(tmp_path: Path) -> None:
    journal = filled(tmp_path, 0)

    journal.prune(10)
    journal.append([record(11)])
    journal.close()

    assert reopen(tmp_path, head=10) == records(11)


def test_prune_removes_what_earlier_runs_left_once_it_is_useless(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    write(tmp_path, 2, 7)
    journal = Journal(tmp_path, 3)

    journal.prune(3)
    assert segments(tmp_path) == ["wal-000001.jsonl", "wal-000002.jsonl"]
    journal.prune(8)
    assert segments(tmp_path) == ["wal-000002.jsonl"]
    journal.close()


def test_remove_deletes_every_segment_and_refuses_while_rows_are_waiting(tmp_path: Path) -> None:
    journal = filled(tmp_path, 0)

    with pytest.raises(AssertionError, match="rows would be lost"):
        journal.remove()
    journal.pop(0)
    journal.remove()
    journal.close()

    assert segments(tmp_path) == []


def test_sync_makes_only_new_records_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    journal = filled(tmp_path, 0)

    journal.sync()
    journal.sync()

    assert len(synced) == 1
    journal.close()


def test_segment_is_synced_before_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(journal_module, "_SEGMENT_BYTES", 1)

    write(tmp_path, 0, 1, 2)

    assert len(synced) == 2


def test_records_of_a_run_that_was_killed_are_synced_when_they_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0, 1)
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))

    Journal(tmp_path, 0).close()

    assert synced == [str(tmp_path / "wal-000000.jsonl")]
