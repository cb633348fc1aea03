"""Files wherever they are: local paths, and URIs of object stores and of the Hugging Face hub, through pyarrow.fs.

Enters: a path or a URI (`s3://bucket/key`, `gs://`, `abfs://`, `az://`, `hf://`, `https://`, `file://`). Leaves: a
filesystem, entries of a directory, a file read in large ranges, or a local file published as one object. Requests that
fail in passing are tried again; what fails for good says so in one sentence that never holds a credential.
"""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import random
import re
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlencode, urlsplit, urlunsplit

import pyarrow as pa
from pyarrow import fs

from cbgen.errors import InputError

READ_BYTES = 8 << 20
"""One request reads so much of a remote file."""

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "az", "hf", "http", "https", "file")
_TRIES = 5
_FIRST_PAUSE_SECONDS = 0.5
_CONNECT_SECONDS = 5
_REQUEST_SECONDS = 30
_SDK_TRIES = 2
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_S3_FLAGS = ("force_virtual_addressing", "anonymous")
_S3_TEXTS = ("region", "scheme", "endpoint_override", "tls_ca_file_path")
_FOR_GOOD = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
_FOR_GOOD_WORDS = re.compile(
    r"ACCESS_DENIED|NO_SUCH_BUCKET|NO_SUCH_KEY|RESOURCE_NOT_FOUND|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH"
    r"|UNRECOGNIZED_CLIENT|HTTP status 40[134]|\b40[134] Client Error"
)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_PARAMETER = re.compile(r"([?&][^=&\s]*(?:key|token|secret|sig|password|credential)[^=&\s]*=)[^&\s'\"]+", re.I)
_SECRET_WORD = re.compile(r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|A[KS]IA[A-Z0-9]{12,})")
Result = TypeVar("Result")
Sleep = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a directory. `path` opens it; `size` is None where the listing does not tell."""

    path: str
    name: str
    is_directory: bool
    size: int | None = None


def is_uri(path: str) -> bool:
    """Whether it names its file by a scheme, such as `s3://`."""
    return _URI.match(path) is not None


def local_path(path: str) -> Path | None:
    """The path on this machine that a plain path or a `file://` URI names; None for what is elsewhere."""
    if not is_uri(path):
        return Path(path)
    parts = _split(path)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def redact(text: str) -> str:
    """The text without credentials: user names in URIs, secret query parameters, and tokens of a known form.

    >>> redact("s3://KEY:SECRET@bucket/a?region=x&token=abc")
    's3://***@bucket/a?region=x&token=***'
    """
    text = _USERINFO.sub("***@", text)
    text = _SECRET_PARAMETER.sub(r"\1***", text)
    return _SECRET_WORD.sub("***", text)


def open_filesystem(path: str) -> tuple[fs.FileSystem, str]:
    """The filesystem that a path or URI lies on, and the path there.

    Raises:
        InputError: the scheme is not known, or its access cannot be set up.
    """
    if not is_uri(path):
        return fs.LocalFileSystem(), os.path.abspath(path)
    parts = _split(path)
    try:
        if parts.scheme == "s3":
            return _s3(parts.netloc, parts.query), unquote(_bucket(parts.netloc) + parts.path).rstrip("/")
        return _from_uri(parts)
    except ImportError as error:
        raise InputError(f"cannot open {redact(path)}: {reason(error)}") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"cannot open {redact(path)}: {reason(error)}; check the address and the options in it") from (
            error
        )


def child_path(directory: str, name: str) -> str:
    """The path or URI of a name in a directory."""
    if not is_uri(directory):
        return os.path.join(directory, name)
    parts = _split(directory)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}"))


def base_name(path: str) -> str:
    """The last part of a path or URI."""
    return Path(unquote(_split(path).path) if is_uri(path) else path).name


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


class RemoteFile(io.RawIOBase):
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
        self._position = 0
        self._size: int | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: 0}[whence]
        self._position = max(0, offset + (self.size() if whence == os.SEEK_END else base))
        return self._position

    def size(self) -> int:
        """Bytes in all.

        Raises:
            OSError: the file is not there, or cannot be asked for.
        """
        if self._size is None:
            self._size = int(with_retries(lambda: self._opened().size(), self._sleep, self._reopen))
        return self._size

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.size() - self._position)
        count = left if size is None or size < 0 else min(size, left)
        if not count:
            return b""
        data = with_retries(lambda: self._read_range(count), self._sleep, self._reopen)
        self._position += count
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _read_range(self, count: int) -> bytes:
        data = bytes(self._opened().read_at(count, self._position))
        if len(data) < count:
            raise OSError(errno.EIO, f"{redact(self._uri)} ended {count - len(data)} bytes early")
        return data

    def _opened(self) -> pa.NativeFile:
        if self._file is None:
            self._file = self._filesystem.open_input_file(self._path)
        return self._file

    def _reopen(self) -> None:
        self._file = None


def with_retries(
    action: Callable[[], Result], sleep: Sleep | None = None, prepare: Callable[[], None] | None = None
) -> Result:
    """The action's result, in up to 5 tries with growing, random pauses between them.

    Args:
        action: what may fail in passing.
        sleep: waits so many seconds.
        prepare: called before each further try.

    Raises:
        OSError: of the last try, or of the first that no further try can help.
    """
    for attempt in range(_TRIES):
        try:
            return action()
        except OSError as error:
            if attempt + 1 == _TRIES or isinstance(error, _FOR_GOOD) or _FOR_GOOD_WORDS.search(str(error)):
                raise
        (sleep or time.sleep)(_FIRST_PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.5))
        if prepare is not None:
            prepare()
    raise AssertionError("unreachable")


def reason(error: BaseException) -> str:
    """An error's own words on one line, without credentials."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = text.strip().splitlines()
    return redact(lines[0].rstrip(". ")) if lines else type(error).__name__


# -- filesystems ------------------------------------------------------------------------------------------------------


def _split(uri: str) -> SplitResult:
    # `#` may stand in a key, so it begins no fragment.
    return urlsplit(uri, allow_fragments=False)


def _bucket(netloc: str) -> str:
    return netloc.rpartition("@")[2]


@cache
def _s3(netloc: str, query: str) -> fs.S3FileSystem:
    """One client per bucket, however many files are read from it."""
    options: dict[str, Any] = {}
    for name, (value, *_) in parse_qs(query, keep_blank_values=True).items():
        if name not in _S3_FLAGS + _S3_TEXTS:
            raise ValueError(f"{name!r} is no option of s3:// ({', '.join(_S3_TEXTS + _S3_FLAGS)} are)")
        options[name] = value.lower() in ("1", "true", "yes") if name in _S3_FLAGS else value
    userinfo, _, bucket = netloc.rpartition("@")
    if not bucket:
        raise ValueError("there is no bucket in it")
    if userinfo:
        access_key, _, secret_key = userinfo.partition(":")
        options |= {"access_key": unquote(access_key), "secret_key": unquote(secret_key)}
    endpoint = options.get("endpoint_override") or _environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    if endpoint:
        scheme, _, address = endpoint.rpartition("://")
        options = {"scheme": scheme or "https", **options, "endpoint_override": address}
    elif "region" not in options and not _environment("AWS_REGION", "AWS_DEFAULT_REGION"):
        options["region"] = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_SDK_TRIES),
        **options,
    )


def _environment(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _from_uri(parts: SplitResult) -> tuple[fs.FileSystem, str]:
    scheme, query = parts.scheme, parts.query
    if scheme not in SCHEMES:
        raise ValueError(f"{scheme}:// is not known; known are {', '.join(f'{name}://' for name in SCHEMES)}")
    if scheme in ("http", "https"):
        if importlib.util.find_spec("aiohttp") is None:
            raise ImportError("reading from the web needs the package aiohttp; install it, or download the file first")
        scheme = f"fsspec+{scheme}"
    elif scheme in ("gs", "gcs") and "retry_limit_seconds" not in query:
        query = "&".join(filter(None, [query, urlencode({"retry_limit_seconds": 2 * _REQUEST_SECONDS})]))
    elif scheme == "az":
        scheme = "abfs"
    # The hub's filesystem takes a path as it is; the others decode it, and refuse blanks.
    path = unquote(parts.path) if scheme == "hf" else quote(parts.path, safe="/%@:=+,~!$&'()*;")
    filesystem, inner = fs.FileSystem.from_uri(urlunsplit(parts._replace(scheme=scheme, query=query, path=path)))
    return filesystem, str(inner)


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
