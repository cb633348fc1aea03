"""Files wherever they are: on this machine, in object stores and on the Hugging Face hub.

Enters: a path or a URI. Leaves: entries of a directory, a file read in large ranges, or a local file published as one
object, whole or not at all.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from cbgen.data.addresses import base_name, child_path, is_uri, local_path, redact
from cbgen.data.filesystems import Result, Sleep, open_filesystem, reason, with_retries
from cbgen.data.ranges import RangedFile
from cbgen.errors import InputError

READ_BYTES = 8 << 20
"""One request reads so much of a remote file."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a directory. `path` opens it; `size` is None where the listing does not tell."""

    path: str
    name: str
    is_directory: bool
    size: int | None = None


def find_entry(path: str) -> Entry | None:
    """What a path or URI names: a file with its size, a directory, or nothing.

    Raises:
        InputError: the place cannot be asked.
    """
    info = _info(path)
    if info.type == fs.FileType.NotFound:
        return None
    return Entry(path, base_name(path), info.type == fs.FileType.Directory, info.size)


def list_directory(path: str) -> list[Entry]:
    """Files and directories directly in a directory, in no order; none if there is no such directory.

    Raises:
        InputError: it cannot be listed.
    """
    local = local_path(path)
    if local is not None:
        return _list_local(path, local)
    filesystem, inner = open_filesystem(path)
    selector = fs.FileSelector(inner, allow_not_found=True)
    infos = _asking(path, lambda: filesystem.get_file_info(selector))
    return [
        Entry(child_path(path, info.base_name), info.base_name, info.type == fs.FileType.Directory, info.size)
        for info in infos
        if info.base_name
    ]


def signature(path: str) -> list[int]:
    """Size and time of change in nanoseconds.

    Raises:
        InputError: there is no such file, or it cannot be asked for.
    """
    info = _info(path)
    if info.type == fs.FileType.NotFound:
        raise InputError(f"cannot read {redact(path)}: No such file")
    return [int(info.size or 0), int(info.mtime_ns or 0)]


# -- writing ----------------------------------------------------------------------------------------------------------


def publish(uri: str, local: Path, sleep: Sleep | None = None) -> None:
    """Put a finished local file in place as one object: whole or not at all.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    target = local_path(uri)
    if target is not None:
        _publish_locally(target, lambda partial: shutil.copyfile(local, partial))
    elif local.stat().st_size == 0:
        _put(uri, b"", sleep)
    else:
        with pa.memory_map(str(local)) as file:
            _put(uri, file.read_buffer(), sleep)


def write_bytes(uri: str, data: bytes, sleep: Sleep | None = None) -> None:
    """Put bytes in place as one object or file: whole or not at all.

    Raises:
        OSError: they could not be written; what was there before is still there.
    """
    target = local_path(uri)
    if target is not None:
        _publish_locally(target, lambda partial: partial.write_bytes(data))
    else:
        _put(uri, data, sleep)


def read_bytes(uri: str) -> bytes:
    """The whole content.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    local = local_path(uri)
    return local.read_bytes() if local is not None else RemoteFile(uri).read()


def list_names(uri: str) -> list[str]:
    """Sorted names of the files directly in a directory; none if there is no such directory."""
    return sorted(entry.name for entry in list_directory(uri) if not entry.is_directory)


def exists(uri: str) -> bool:
    """Whether there is a file or a directory of that name."""
    return find_entry(uri) is not None


def delete(uri: str) -> None:
    """Remove a file; no matter if there is none.

    Raises:
        OSError: it is there and cannot be removed.
    """
    filesystem, path = open_filesystem(uri)
    try:
        with_retries(lambda: filesystem.delete_file(path))
    except FileNotFoundError:
        return
    except OSError:
        if exists(uri):
            raise


def _put(uri: str, data: Any, sleep: Sleep | None) -> None:
    filesystem, path = open_filesystem(uri)

    def put() -> None:
        # A stream publishes what it was given as soon as it is closed, by its destructor too. So it gets everything
        # in one write, and nothing can happen between the parts; a part that failed in the background fails the close.
        stream = filesystem.open_output_stream(path, compression=None)
        try:
            stream.write(data)
        except BaseException:
            with suppress(OSError):
                stream.close()
            raise
        stream.close()
        size = filesystem.get_file_info(path).size
        if size != len(data):
            raise OSError(errno.EIO, f"{redact(uri)} has {size} of {len(data)} bytes after it was written")

    with_retries(put, sleep)


def _publish_locally(target: Path, write: Callable[[Path], object]) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# -- reading ----------------------------------------------------------------------------------------------------------


class RemoteFile(RangedFile):
    """A remote file, read by ranges: one `read` is one request, tried again on a file opened anew if it fails.

    Args:
        uri: of a file.
        sleep: waits between tries.
    """

    def __init__(self, uri: str, sleep: Sleep | None = None) -> None:
        super().__init__()
        self._uri = uri
        self._sleep = sleep
        self._filesystem, self._path = open_filesystem(uri)
        self._file: pa.NativeFile | None = None
        self._size: int | None = None

    def size(self) -> int:
        if self._size is None:
            self._size = int(with_retries(lambda: self._opened().size(), self._sleep, self._reopen))
        return self._size

    def read_range(self, position: int, count: int) -> bytes:
        return with_retries(lambda: self._try_range(position, count), self._sleep, self._reopen)

    def _try_range(self, position: int, count: int) -> bytes:
        data = bytes(self._opened().read_at(count, position))
        if len(data) < count:
            raise OSError(errno.EIO, f"{redact(self._uri)} ended {count - len(data)} bytes early")
        return data

    def _opened(self) -> pa.NativeFile:
        if self._file is None:
            self._file = self._filesystem.open_input_file(self._path)
        return self._file

    def _reopen(self) -> None:
        self._file = None


# -- asking -----------------------------------------------------------------------------------------------------------


def _info(path: str) -> fs.FileInfo:
    filesystem, inner = open_filesystem(path)
    return _asking(path, lambda: filesystem.get_file_info(inner))


def _asking(path: str, ask: Callable[[], Result]) -> Result:
    try:
        return with_retries(ask)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"cannot read {redact(path)}: {reason(error)}") from error


def _list_local(path: str, local: Path) -> list[Entry]:
    base = str(local) if is_uri(path) else path
    try:
        with os.scandir(local) as entries:
            found = [Entry(os.path.join(base, entry.name), entry.name, entry.is_dir()) for entry in entries]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    return [entry for entry in found if entry.is_directory or not _is_special(entry.path)]


def _is_special(path: str) -> bool:
    """Whether it is a pipe, a socket or a device. A link that leads nowhere is not: its reader says so."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
