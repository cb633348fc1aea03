"""A machine that dies at any system call, and one that loses its power.

`machine(dies_at=n)` stands between the code and the disk: it counts the calls that change something, and from call n on
none of them is done any more (half of a write is). `Machine.cut_power` then brings the files to a state that a power
cut may leave: contents that were not synced are gone, torn, or zeros; what happened to names in a directory that was
not synced since is undone.
"""

import contextlib
import errno
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cbgen.output.encoders import JsonlEncoder, ParquetEncoder

_STEPS = ("write", "pwrite", "truncate", "mkdir", "rmdir")
_NEEDS_ROOM = ("write", "pwrite", "mkdir", "open", "write-file")
_ENCODERS = (JsonlEncoder, ParquetEncoder)


@contextlib.contextmanager
def fast_directory(otherwise: Path) -> Iterator[Path]:
    """In memory where the system has a place for that: thousands of renames and syncs take most of a minute."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir=shared) as directory:
        yield Path(directory)


class Killed(BaseException):
    """The process is gone; nothing of it can write any more."""


class Machine:
    """Counts and remembers.

    Args:
        dies_at: the first call that is not done any more; None for none.
        is_full: the disk is full from there on, instead: what needs room fails, everything else goes on.

    Attributes:
        calls: how many calls changed something.
        names: what was done to names in each directory since it was synced, as functions that undo it.
    """

    def __init__(self, dies_at: int | None, is_full: bool = False) -> None:
        self.calls = 0
        self.dies_at = dies_at
        self.is_full = is_full
        self.names: list[tuple[str, Callable[[], None]]] = []
        self._durable: dict[int, bytes] = {}  # inode -> content that survives
        self._real = {name: getattr(os, name) for name in ("open", "close", "write", "unlink", "replace", "truncate")}
        self._open: set[int] = set()

    @property
    def is_dead(self) -> bool:
        return self.dies_at is not None and self.calls > self.dies_at and not self.is_full

    def step(self, name: str = "", args: tuple[Any, ...] = ()) -> None:
        if self.dies_at is not None and self.calls >= self.dies_at:
            if name == "write" and self.calls == self.dies_at:
                self._real["write"](args[0], args[1][: len(args[1]) // 2])
            self.calls += 1
            if self.is_full:
                if name in _NEEDS_ROOM:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return
            raise Killed
        self.calls += 1

    def wrap(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.step(name, args)
            return real(*args, **kwargs)

        return call

    def wrap_encoder(self, real: Callable[..., None]) -> Callable[..., None]:
        """Writes by code that is not seen here: dies before it, in the middle of the file, and after it."""

        def call(encoder: Any, first: Any, second: Any, path: Path) -> None:
            self.step("write-file")
            real(encoder, first, second, path)
            self._durable[path.stat().st_ino] = b""
            try:
                self.step("write-file")
            except (Killed, OSError):
                self._real["truncate"](path, path.stat().st_size // 2)
                raise
            self.step()

        return call

    def open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        if flags & os.O_CREAT:
            self.step("open")
        fd: int = self._real["open"](path, flags, *args, **kwargs)
        self._open.add(fd)
        if is_new:
            self._durable[os.fstat(fd).st_ino] = b""
            self._renamed(path, lambda: Path(path).unlink(missing_ok=True))
        return fd

    def close(self, fd: int) -> None:
        if fd in self._open:
            self._open.discard(fd)
        elif self.is_dead:
            return  # what a dead process does on its way out of `finally` counts for nothing
        self._real["close"](fd)

    def fsync(self, fd: int) -> None:
        self.step("fsync")
        name = os.readlink(f"/proc/self/fd/{fd}")
        if os.path.isdir(name):
            self.names = [(directory, undo) for directory, undo in self.names if directory != os.path.realpath(name)]
        elif os.path.exists(name):
            self._durable[os.fstat(fd).st_ino] = Path(name).read_bytes()

    def unlink(self, path: Any, **kwargs: Any) -> None:
        self.step("unlink")
        if not kwargs and os.path.exists(path):
            data = Path(path).read_bytes()
            self._durable.pop(os.stat(path).st_ino, None)  # the number may be given again
            self._renamed(path, lambda: _restore(path, data))
        self._real["unlink"](path, **kwargs)

    def replace(self, source: Any, target: Any) -> None:
        self.step("replace")
        if os.path.isfile(source):
            self._durable.setdefault(os.stat(source).st_ino, b"")  # written by code that is not seen here
            if os.path.exists(target):
                self._durable.pop(os.stat(target).st_ino, None)
            moved, old = Path(source).read_bytes(), Path(target).read_bytes() if os.path.exists(target) else None

            def undo() -> None:
                _restore(source, moved)
                if old is None:
                    Path(target).unlink(missing_ok=True)
                else:
                    _restore(target, old)

            self._renamed(target, undo)
        self._real["replace"](source, target)

    def _renamed(self, path: Any, undo: Callable[[], None]) -> None:
        self.names.append((os.path.realpath(os.path.dirname(path) or "."), undo))

    @contextlib.contextmanager
    def running(self) -> Iterator["Machine"]:
        """Everything inside runs on this machine; its death ends it quietly."""
        with pytest.MonkeyPatch.context() as patch:
            for kind in _ENCODERS:
                patch.setattr(kind, "encode", self.wrap_encoder(kind.encode))
            patch.setattr(ParquetEncoder, "join", self.wrap_encoder(ParquetEncoder.join))
            for name in _STEPS:
                patch.setattr(os, name, self.wrap(name))
            for name in ("open", "close", "fsync", "unlink", "replace"):
                patch.setattr(os, name, getattr(self, name))
            try:
                with contextlib.suppress(Killed):
                    yield self
            finally:
                self.off()

    def off(self) -> None:
        for fd in list(self._open):
            self.close(fd)  # as the kernel does; locks go with it

    def cut_power(self, root: Path, rng: random.Random) -> None:
        """Leave what a power cut may leave of everything under `root`."""
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.stat().st_ino in self._durable:
                _tear(path, self._durable[path.stat().st_ino], rng)
        counts = Counter(directory for directory, _ in self.names)
        undone = {directory: rng.randint(0, count) for directory, count in counts.items()}  # the latest ones
        for directory, undo in reversed(self.names):
            if undone[directory]:
                undone[directory] -= 1
                undo()


def _restore(path: Any, data: bytes) -> None:
    if os.path.isdir(os.path.dirname(path) or "."):
        Path(path).write_bytes(data)


def _tear(path: Path, durable: bytes, rng: random.Random) -> None:
    now = path.read_bytes()
    if now == durable:
        return
    if rng.random() < 0.25 or not now.startswith(durable):
        path.write_bytes(rng.choice([durable, now]) if not now.startswith(durable) else durable)
        return
    kept = rng.randint(len(durable), len(now))
    path.write_bytes(now[:kept] + bytes(rng.choice([0, len(now) - kept])))


def machine(dies_at: int | None = None, *, is_full: bool = False) -> contextlib.AbstractContextManager[Machine]:
    """Everything inside runs on a machine that dies at this call, or whose disk is full from it on."""
    return Machine(dies_at, is_full).running()


def deaths(root: Path, *, step: int = 1, is_full: bool = False, least: int = 0) -> Iterator[tuple[int, Path, Machine]]:
    """A machine that dies at its first call, then one that dies at a later call, up to one that outlives its work.

    Args:
        root: where each gets an empty directory.
        step: 2 tries every other call.
        is_full: their disks are full from that call on, instead.
        least: the work must make more calls than this, or it was not the work that is meant.

    Yields:
        The call, the directory, and the machine, which `Machine.running` starts.
    """
    for call in range(0, 10_000, step):
        directory = root / str(call)
        directory.mkdir()
        it = Machine(call, is_full)
        yield call, directory, it
        if it.calls <= call:
            break
    assert call > least
