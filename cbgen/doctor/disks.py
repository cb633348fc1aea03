"""The disks that a run writes to, and the cache that models come from.

Enters: the path of an output, and the hub's environment variables. Leaves: a `Check` for room, for the cache, and for a
file that was really written, locked and deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from cbgen.doctor.check import Check, as_gib


def output_directory(output: str | None) -> Path | None:
    """The directory that an output would be written in; None for an object store."""
    if output is None:
        return Path.cwd()
    if "://" in output:
        return None
    path = Path(output)
    return path if path.is_dir() else path.parent


def check_free_space(name: str, directory: Path, *, enough: int) -> Check:
    """Room on the disk that a directory is on, or would be on."""
    place = _existing(directory)
    try:
        free = shutil.disk_usage(place).free
        inodes = os.statvfs(place)
    except OSError as error:
        return Check(name, "fail", f"{place} cannot be read: {error.strerror}; choose another place")
    if inodes.f_files and not inodes.f_favail:
        return Check(name, "fail", f"{place} can hold no more files, however large; delete some")
    if free < enough / 100:
        return Check(name, "fail", f"only {as_gib(free)} free at {place}; free some, or choose another place")
    if free < enough:
        return Check(name, "warn", f"only {as_gib(free)} free at {place}; a large job or model may not fit")
    return Check(name, "ok", f"{as_gib(free)} free at {place}")


def check_cache(cache: Path) -> Check:
    """Where models are kept."""
    place = _existing(cache)
    if not os.access(place, os.W_OK | os.X_OK):
        return Check("model cache", "fail", f"{cache} cannot be written; set HF_HOME to a directory that can")
    with contextlib.suppress(OSError):
        num_models = sum(entry.name.startswith("models--") for entry in os.scandir(cache))
        return Check("model cache", "ok", f"{cache} holds {num_models} {'model' if num_models == 1 else 'models'}")
    return Check("model cache", "ok", f"{cache} is made with the first model")


def check_hub() -> Check:
    """How models are fetched. Whether there is a token is said, the token never."""
    token = "a token is set" if _has_token() else "no token is set, so models with terms to accept cannot be fetched"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Check("hub", "ok", f"HF_HUB_OFFLINE is set: only models in the cache can be used; {token}")
    return Check("hub", "ok", token)


def check_writing(directory: Path) -> Check:
    """Create, sync, rename, lock and delete a file, as a run does."""
    if not directory.is_dir():
        return Check("write test", "fail", f"{directory} is no directory; create it first")
    try:
        with tempfile.TemporaryDirectory(prefix=".cbgen-doctor-", dir=directory) as scratch:
            locks = _try_writing(Path(scratch))
    except OSError as error:
        return Check("write test", "fail", f"writing in {directory} failed: {error.strerror}; choose another place")
    if not locks:
        message = f"{directory} has no working file locks; never start two runs on the same output from two machines"
        return Check("write test", "warn", message)
    return Check("write test", "ok", f"create, sync, rename, lock and delete work in {directory}")


def _try_writing(scratch: Path) -> bool:
    """Whether locks work; that the rest does is said by no error.

    Raises:
        OSError: a step failed.
    """
    first, second = scratch / "first", scratch / "second"
    with first.open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
    first.replace(second)
    handle = os.open(scratch, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    if second.read_bytes() != b"x" * 4096:
        raise OSError(0, "what was written is not what is read")
    return _locks_exclude(second)


def _locks_exclude(path: Path) -> bool:
    with path.open("rb+") as first, path.open("rb+") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    path = path.absolute()
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


def _hub_home() -> str:
    return os.path.expanduser(
        os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    )


def hub_cache() -> str:
    """The directory that the hub's library keeps models in."""
    return os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(_hub_home(), "hub"))


def _has_token() -> bool:
    if os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    return os.path.exists(os.environ.get("HF_TOKEN_PATH") or os.path.join(_hub_home(), "token"))
