"""A directory that finished files go to, local or in an object store; whole files or nothing.

Enters: a local file that is complete. Leaves: the same bytes under the user's path, in one step: a rename, or one
upload that becomes visible when it has ended.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as pafs

from cbgen.data import addresses, files, filesystems


class Place:
    """A directory by its path or URI."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/") or "/"
        self.is_remote = addresses.is_uri(root)

    def names(self) -> list[str]:
        """What is in it, directories included; empty when it does not exist."""
        if self.is_remote:
            return sorted(name.split("/", 1)[0] for name in self.sizes())
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self.root))
        return []

    def sizes(self) -> dict[str, int]:
        """Bytes of each file directly in it."""
        if self.is_remote:
            filesystem, path = filesystems.open_filesystem(self.root)
            found = filesystem.get_file_info(pafs.FileSelector(path, allow_not_found=True))
            return {info.base_name: info.size for info in found if info.is_file}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        return {}

    def put(self, local: Path, name: str) -> None:
        """Publish a finished local file under this name, replacing an older one; the local file is gone then."""
        if self.is_remote:
            files.publish(self.uri(name), local)
            local.unlink()
        else:
            move(local, Path(self.root) / name)

    def rename(self, name: str, new_name: str) -> None:
        """Give a file another name."""
        if not self.is_remote:
            os.replace(Path(self.root) / name, Path(self.root) / new_name)
            return
        filesystem, path = filesystems.open_filesystem(self.root)
        filesystem.copy_file(f"{path}/{name}", f"{path}/{new_name}")
        filesystem.delete_file(f"{path}/{name}")

    @contextlib.contextmanager
    def fetched(self, name: str, scratch: Path) -> Iterator[Path]:
        """A local copy of a file; the file itself where it is local."""
        if not self.is_remote:
            yield Path(self.root) / name
            return
        filesystem, path = filesystems.open_filesystem(self.root)
        local = scratch / f"fetched-{name}"
        try:
            pafs.copy_files(
                f"{path}/{name}",
                str(local),
                source_filesystem=filesystem,
                destination_filesystem=pafs.LocalFileSystem(),
            )
            yield local
        finally:
            local.unlink(missing_ok=True)

    def uri(self, name: str) -> str:
        """The full path of a file in it."""
        return addresses.child_path(self.root, name)


def split_path(path: str) -> tuple[str, str]:
    """(directory, file name) of a path or URI; the directory keeps a URI's query parameters."""
    if not addresses.is_uri(path):
        head, name = os.path.split(path)
        return head or ".", name
    address, question_mark, query = path.partition("?")
    head, _, name = address.rstrip("/").rpartition("/")
    return f"{head}{question_mark}{query}", name


def move(local: Path, target: Path) -> None:
    """Bring a finished file to its final name, surviving a power cut; from another filesystem too."""
    sync_file(local)
    try:
        os.replace(local, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        files.publish(str(target), local)
        local.unlink()
    sync_directory(target.parent)


def sync_file(path: Path) -> None:
    """fsync a file that somebody else wrote."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut, where the filesystem can."""
    with contextlib.suppress(OSError):
        sync_file(path)
