"""One run per output: a lock that dies with its process, also where the filesystem has no locks.

`flock` is the lock wherever it works. Some network filesystems refuse it; there a lease takes its place: a file that
names its holder and whose content changes with every commit. A lease whose holder is gone is taken over: on the same
host when the process no longer lives, from another host when it has not changed while we watched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

import orjson
import psutil

from cbgen.errors import RefusedError

_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_WATCH_SECONDS = 15.0  # several times the longest gap between two commits of a healthy run
_POLL_SECONDS = 0.25
_RENEW_SECONDS = 2.0
_CLOCK_SECONDS = 2.0  # the system counts start times from its boot, by a clock that is set now and then


class OutputLock:
    """Held from `acquire` to `release`.

    Args:
        directory: the sidecar directory; it exists.
        output: how messages name the output.
        watch_seconds: how long another host's lease must stand still to count as dead.
    """

    def __init__(self, directory: Path, output: str, watch_seconds: float = _WATCH_SECONDS) -> None:
        self._path = directory / "lock"
        self._lease = directory / "lease.json"
        self._output = output
        self._watch_seconds = watch_seconds
        self._file = -1
        self._owns_lease = False
        self._started = psutil.Process().create_time()
        self._beats = 0
        self._next_beat = 0.0

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            RefusedError: another run holds it.
            OSError: the directory cannot be written.
        """
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._refusal(os.pread(self._file, 200, 0).decode(errors="replace").strip()) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._take_lease()
            return
        if not self._path.exists() or not os.path.samestat(os.fstat(self._file), self._path.stat()):
            raise self._refusal("it ended just now")  # it failed and removed the file: what we hold guards nothing
        os.truncate(self._file, 0)
        os.pwrite(self._file, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def renew(self) -> None:
        """Show that this run lives; called with every commit, and only a lease has something to do then.

        Raises:
            RefusedError: another run took the lease over because it believed this one dead.
        """
        if not self._owns_lease:
            return
        holder = self._read_lease()
        if holder is not None and not self._is_ours(holder):
            raise self._refusal(_describe(holder))
        if holder is None or time.monotonic() >= self._next_beat:
            self._write_lease()

    def release(self, *, remove: bool) -> None:
        """Let go; `remove` deletes the files too."""
        if self._owns_lease:
            if self._is_ours(self._read_lease() or {}):  # or another run has taken it over
                self._lease.unlink(missing_ok=True)
            self._owns_lease = False
        if self._file >= 0:
            if remove:
                self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    # -- lease --------------------------------------------------------------------------------------------------------

    def _take_lease(self) -> None:
        try:
            os.close(os.open(self._lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            holder = self._read_lease()
            if not self._is_dead(holder):
                raise self._refusal(_describe(holder or {})) from None
            self._write_lease()
            time.sleep(_POLL_SECONDS)  # should another run take it over at the same time, the later one has it
            holder = self._read_lease() or {}
            if not self._is_ours(holder):
                raise self._refusal(_describe(holder)) from None
        else:
            self._write_lease()
        self._owns_lease = True
        for left in self._lease.parent.glob("lease.*.tmp"):  # of holders that were killed while they wrote
            left.unlink(missing_ok=True)

    def _is_dead(self, holder: dict[str, object] | None) -> bool:
        if holder is not None and holder.get("host") == socket.gethostname():
            return not _lives(holder)
        deadline = time.monotonic() + self._watch_seconds
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            if self._read_lease() != holder:
                return False
        return True

    def _read_lease(self) -> dict[str, object] | None:
        try:
            value = orjson.loads(self._lease.read_bytes())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def _write_lease(self) -> None:
        self._beats += 1
        self._next_beat = time.monotonic() + _RENEW_SECONDS
        lease = {"host": socket.gethostname(), "pid": os.getpid(), "started": self._started, "beats": self._beats}
        temporary = self._lease.with_name(f"lease.{os.getpid()}.tmp")
        temporary.write_bytes(orjson.dumps(lease))
        os.replace(temporary, self._lease)

    def _is_ours(self, holder: dict[str, object]) -> bool:
        ours = (socket.gethostname(), os.getpid(), self._started)
        return (holder.get("host"), holder.get("pid"), holder.get("started")) == ours

    def _refusal(self, holder: str) -> RefusedError:
        return RefusedError(
            f"another run is writing {self._output} ({holder or 'unknown'}); wait for it, or choose another -o"
        )


def _lives(holder: dict[str, object]) -> bool:
    """Whether the process that wrote a lease still runs; another one may have got its number since."""
    try:
        process = psutil.Process(int(str(holder["pid"])))
        is_same = abs(process.create_time() - float(str(holder["started"]))) < _CLOCK_SECONDS
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, KeyError):
        return False


def _describe(holder: dict[str, object]) -> str:
    return f"pid {holder.get('pid')} on {holder.get('host')}" if holder else "unknown"
