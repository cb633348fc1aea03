"""`python -m tests.crash_driver LOG ARGS...`: `cbgen ARGS...`, noting in LOG what happens, a line each:

    p INDEX            the row's record was put (so it was generated)
    f INDEX...         these rows are finished: their flush returned
    c                  a commit returned: everything before it survives a power cut
    s INODE SIZE       so much of a file was synced
    @PHASE             start, rows, seal, finish, retry

Environment: CHAOS_COMMIT_SECONDS commits more often, CHAOS_NO_FLOCK makes `flock` fail as some network filesystems do.
"""

import errno
import fcntl
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from cbgen import cli
from cbgen.output import journal, outputs, retry, writers


def main() -> None:
    run(sys.argv[1], sys.argv[2:])


def run(log: str, arguments: list[str]) -> None:
    """Become `cbgen ARGUMENTS`."""
    note = _Notes(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    _note_rows(note)
    _note_phases(note)
    _note_syncs(note)
    if "CHAOS_COMMIT_SECONDS" in os.environ:
        writers._COMMIT_SECONDS = float(os.environ["CHAOS_COMMIT_SECONDS"])
        writers._MAX_COMMIT_SHARE = 1.0
        retry._COMMIT_SECONDS = 0.0
        journal._SEGMENT_BYTES = 4096
    if "CHAOS_NO_FLOCK" in os.environ:
        fcntl.flock = _no_locks
    note("@start")
    cli.main(arguments)


class _Notes:
    def __init__(self, file: int) -> None:
        self._file = file

    def __call__(self, *words: Any) -> None:
        os.write(self._file, " ".join(map(str, words)).encode() + b"\n")


def _no_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def _note_rows(note: _Notes) -> None:
    kind = writers.OrderedWriter
    put, flush, commit = kind.put, kind.flush, kind.commit
    begun: list[bool] = []

    def put_and_note(self, row, record):
        note("p", row.index)
        put(self, row, record)

    def flush_and_note(self):
        indices = [record.index for record in self._unwritten]
        flush(self)
        if indices:
            note("f", *indices)
            if not begun:
                begun.append(True)
                note("@rows")

    def commit_and_note(self):
        commit(self)
        note("c")

    kind.put, kind.flush, kind.commit = put_and_note, flush_and_note, commit_and_note


def _note_phases(note: _Notes) -> None:
    for kind in (outputs.PartsOutput, outputs.FileOutput):
        kind.seal = _announced(note, "@seal", kind.seal)
    writers.OrderedWriter.finish = _announced(note, "@finish", writers.OrderedWriter.finish)
    retry.RetryWriter.finish = _announced(note, "@retry", retry.RetryWriter.finish)


def _announced(note: _Notes, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def announce(*arguments: Any) -> Any:
        note(phase)
        return call(*arguments)

    return announce


def _note_syncs(note: _Notes) -> None:
    fsync, truncate = os.fsync, os.truncate

    def note_size(file: int | str) -> None:
        found = os.stat(file)
        note("s", found.st_ino, found.st_size)

    def fsync_and_note(file: Any) -> None:
        fsync(file)
        note_size(file if isinstance(file, int) else file.fileno())

    def truncate_and_note(file: Any, size: int) -> None:
        truncate(file, size)
        note_size(file)

    os.fsync, os.truncate = fsync_and_note, truncate_and_note


def without_cached_tokens(content: bytes) -> bytes:
    """JSON lines with 0 for how much of each prompt was cached: it depends on which rows ran before in a process."""
    return re.sub(rb'("cached_tokens":)[0-9]+', rb"\g<1>0", content)


def finished(log: Iterable[str]) -> list[str]:
    """Rows whose flush returned, from the lines of a log."""
    return [index for line in log if line.startswith("f ") for index in line.split()[1:]]


if __name__ == "__main__":
    main()
