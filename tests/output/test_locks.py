"""One run per output, by flock or, where the filesystem has none, by a lease."""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from cbgen.errors import RefusedError
from cbgen.output import locks
from cbgen.output.locks import OutputLock
from tests.output.miniature import KINDS, Mini, config_for, read, rows_of, work

HERE = socket.gethostname()


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(locks, "_POLL_SECONDS", 0.002)


@contextlib.contextmanager
def held(directory: Path, watch_seconds: float = 0.05) -> Iterator[OutputLock]:
    lock = OutputLock(directory, "out.jsonl", watch_seconds)
    lock.acquire()
    try:
        yield lock
    finally:
        lock.release(remove=False)


def lease(directory: Path) -> dict[str, Any]:
    return dict(orjson.loads((directory / "lease.json").read_bytes()))


def write_lease(directory: Path, **fields: Any) -> None:
    value = {"host": HERE, "pid": os.getpid(), "started": psutil.Process().create_time(), "beats": 1, **fields}
    (directory / "lease.json").write_bytes(orjson.dumps(value))


def dead_process() -> tuple[int, float]:
    """Number and start time of a process that is no more."""
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    assert process.pid is not None
    found = process.pid, psutil.Process(process.pid).create_time()
    process.kill()
    process.join()
    return found


def refused(directory: Path, watch_seconds: float = 0.05) -> str:
    with pytest.raises(RefusedError) as refusal, held(directory, watch_seconds):
        pass
    return str(refusal.value)


# -- flock ------------------------------------------------------------------------------------------------------------


def test_second_lock_is_refused_and_names_the_first(tmp_path: Path) -> None:
    with held(tmp_path):
        assert refused(tmp_path) == (
            f"another run is writing out.jsonl (pid {os.getpid()} on {HERE}); wait for it, or choose another -o"
        )
    with held(tmp_path):
        pass


def test_lock_that_cannot_be_written_is_an_error_not_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output"), held(tmp_path):
        pass
    assert not (tmp_path / "lease.json").exists()


def test_lock_whose_file_was_removed_meanwhile_guards_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def flock_too_late(file: int, how: int) -> None:
        flock(file, how)
        (tmp_path / "lock").unlink()

    monkeypatch.setattr(fcntl, "flock", flock_too_late)
    assert "another run is writing out.jsonl" in refused(tmp_path)


# -- lease ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_second_run_is_refused_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with held(tmp_path):
        assert f"(pid {os.getpid()} on {HERE})" in refused(tmp_path, 60)
        assert lease(tmp_path)["pid"] == os.getpid()
    assert not (tmp_path / "lease.json").exists()
    with held(tmp_path):
        pass


@pytest.mark.usefixtures("no_flock")
def test_holder_on_this_host_that_died_is_taken_over_at_once(tmp_path: Path) -> None:
    pid, started = dead_process()
    write_lease(tmp_path, pid=pid, started=started)

    with held(tmp_path, 60):
        assert lease(tmp_path)["pid"] == os.getpid()


@pytest.mark.usefixtures("no_flock")
def test_another_process_with_the_number_of_a_dead_holder_is_not_the_holder(tmp_path: Path) -> None:
    write_lease(tmp_path, started=psutil.Process().create_time() - 1000)

    with held(tmp_path, 60):
        pass


@pytest.mark.usefixtures("no_flock")
def test_holder_that_lives_stays_the_holder_when_the_clock_was_set(tmp_path: Path) -> None:
    write_lease(tmp_path, started=psutil.Process().create_time() + 0.7)

    assert f"(pid {os.getpid()} on {HERE})" in refused(tmp_path, 60)


@pytest.mark.usefixtures("no_flock")
def test_other_hosts_lease_that_stands_still_is_taken_over(tmp_path: Path) -> None:
    write_lease(tmp_path, host="elsewhere", pid=1)

    with held(tmp_path):
        assert lease(tmp_path)["host"] == HERE


@pytest.mark.usefixtures("no_flock")
def test_other_hosts_lease_that_moves_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lease(tmp_path, host="elsewhere", pid=1)
    beats = iter(range(2, 100))
    monkeypatch.setattr(
        locks.time, "sleep", lambda _: write_lease(tmp_path, host="elsewhere", pid=1, beats=next(beats))
    )

    assert "(pid 1 on elsewhere)" in refused(tmp_path, 60)


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\0" * 80, b'{"host": "elsewhere"}', b"{}"])
def test_lease_that_says_nothing_is_watched_like_one_of_another_host(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lease.json").write_bytes(content)

    with held(tmp_path):
        assert lease(tmp_path)["pid"] == os.getpid()


@pytest.mark.usefixtures("no_flock")
def test_lease_of_this_host_without_a_process_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_bytes(orjson.dumps({"host": HERE}))

    with held(tmp_path):
        pass


@pytest.mark.usefixtures("no_flock")
def test_first_run_notices_that_it_was_taken_over_and_leaves_the_lease(tmp_path: Path) -> None:
    with held(tmp_path) as lock:
        write_lease(tmp_path, host="elsewhere", pid=77)
        with pytest.raises(RefusedError, match="pid 77 on elsewhere"):
            lock.renew()

    assert lease(tmp_path)["pid"] == 77


@pytest.mark.usefixtures("no_flock")
def test_of_two_that_take_over_at_the_same_time_one_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid, started = dead_process()
    write_lease(tmp_path, pid=pid, started=started)
    monkeypatch.setattr(locks.time, "sleep", lambda _: write_lease(tmp_path, host="elsewhere", pid=5))

    assert "(pid 5 on elsewhere)" in refused(tmp_path, 60)
    assert lease(tmp_path)["pid"] == 5


@pytest.mark.usefixtures("no_flock")
def test_renewal_changes_the_lease_so_that_others_see_it_live(tmp_path: Path) -> None:
    with held(tmp_path) as lock:
        before = lease(tmp_path)
        lock.renew()
        assert lease(tmp_path) == before, "not at every commit"
        lock._next_beat = 0.0
        lock.renew()
        assert lease(tmp_path)["beats"] == before["beats"] + 1
        (tmp_path / "lease.json").unlink()  # somebody tidied up: it is made again
        lock.renew()
        assert lease(tmp_path)["pid"] == os.getpid()


@pytest.mark.usefixtures("no_flock", "small_files")
def test_output_under_a_lease_is_the_same_and_the_lease_is_gone_afterwards(tmp_path: Path) -> None:
    for kind in KINDS:
        job = Mini(tmp_path / kind, kind, 7)
        job.work(stop_after=4)
        job.work()
        assert [row["prompt"] for row in job.decoded()] == [f"p{index}" for index in range(7)]
    assert not list(tmp_path.rglob("lease*"))


@pytest.mark.usefixtures("no_flock")
def test_run_that_was_taken_over_stops_before_it_writes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, rows = config_for(tmp_path), rows_of(6)
    monkeypatch.setattr(locks, "_RENEW_SECONDS", 0.0)
    work(config, rows, stop_after=3, commit_share=1)
    before = read(config)
    renew = OutputLock.renew

    def taken_over(lock: OutputLock) -> None:
        write_lease(lock._lease.parent, host="elsewhere", pid=9)
        renew(lock)

    monkeypatch.setattr(OutputLock, "renew", taken_over)
    with pytest.raises(RefusedError, match="pid 9 on elsewhere"):
        work(config, rows, commit_share=1)
    assert read(config) == before


@pytest.mark.usefixtures("no_flock")
def test_holder_that_nobody_has_buried_is_dead(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    assert process.pid is not None
    write_lease(tmp_path, pid=process.pid, started=psutil.Process(process.pid).create_time())
    assert f"(pid {process.pid} on {HERE})" in refused(tmp_path, 60)
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    with held(tmp_path, 60):
        assert lease(tmp_path)["pid"] == os.getpid()
    process.join()


@pytest.mark.usefixtures("no_flock")
def test_what_a_killed_holder_was_writing_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "lease.123.tmp").write_bytes(b"{")

    with held(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lease.json", "lock"]
