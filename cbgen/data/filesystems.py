"""The filesystem that a path or URI lies on, through pyarrow.fs, and requests to it that are tried again.

Enters: a path or a URI, or a request that may fail in passing. Leaves: a filesystem with the path in it, the request's
result, or the reason of a failure in words that never hold a credential.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlencode, urlunsplit

import pyarrow as pa
from pyarrow import fs

from cbgen.data.addresses import SCHEMES, is_uri, redact, split_uri
from cbgen.errors import InputError

_TRIES = 5
_FIRST_PAUSE_SECONDS = 0.5
_CONNECT_SECONDS = 5
_REQUEST_SECONDS = 30
_SDK_TRIES = 2
_S3_FLAGS = ("force_virtual_addressing", "anonymous")
_S3_TEXTS = ("region", "scheme", "endpoint_override", "tls_ca_file_path")
_FOR_GOOD = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
_FOR_GOOD_WORDS = re.compile(
    r"ACCESS_DENIED|NO_SUCH_BUCKET|NO_SUCH_KEY|RESOURCE_NOT_FOUND|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH"
    r"|UNRECOGNIZED_CLIENT|HTTP status 40[134]|\b40[134] Client Error"
)
Result = TypeVar("Result")
Sleep = Callable[[float], None]


def open_filesystem(path: str) -> tuple[fs.FileSystem, str]:
    """The filesystem that a path or URI lies on, and the path there.

    Raises:
        InputError: the scheme is not known, or its access cannot be set up.
    """
    if not is_uri(path):
        return fs.LocalFileSystem(), os.path.abspath(path)
    parts = split_uri(path)
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


def _bucket(netloc: str) -> str:
    return netloc.rpartition("@")[2]


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
