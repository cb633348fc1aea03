"""What paths and URIs say by themselves: their scheme, their names, and which of their parts are secret.

Enters: a path or a URI (`s3://bucket/key`, `gs://`, `abfs://`, `az://`, `hf://`, `https://`, `file://`), or a message
that may quote one. Leaves: its parts, or the text without credentials. Nothing is opened or asked here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "az", "hf", "http", "https", "file")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_PARAMETER = re.compile(r"([?&][^=&\s]*(?:key|token|secret|sig|password|credential)[^=&\s]*=)[^&\s'\"]+", re.I)
_SECRET_WORD = re.compile(r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|A[KS]IA[A-Z0-9]{12,})")


def is_uri(path: str) -> bool:
    """Whether it names its file by a scheme, such as `s3://`."""
    return _URI.match(path) is not None


def local_path(path: str) -> Path | None:
    """The path on this machine that a plain path or a `file://` URI names; None for what is elsewhere."""
    if not is_uri(path):
        return Path(path)
    parts = split_uri(path)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def split_uri(uri: str) -> SplitResult:
    """The parts of a URI, still quoted. `#` may stand in a key, so it begins no fragment."""
    return urlsplit(uri, allow_fragments=False)


def child_path(directory: str, name: str) -> str:
    """The path or URI of a name in a directory."""
    if not is_uri(directory):
        return os.path.join(directory, name)
    parts = split_uri(directory)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}"))


def base_name(path: str) -> str:
    """The last part of a path or URI."""
    return Path(unquote(split_uri(path).path) if is_uri(path) else path).name


def redact(text: str) -> str:
    """The text without credentials: user names in URIs, secret query parameters, and tokens of a known form.

    >>> redact("s3://KEY:SECRET@bucket/a?region=x&token=abc")
    's3://***@bucket/a?region=x&token=***'
    """
    text = _USERINFO.sub("***@", text)
    text = _SECRET_PARAMETER.sub(r"\1***", text)
    return _SECRET_WORD.sub("***", text)
