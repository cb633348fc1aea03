"""Where rows end up: one class for each kind of output, all fed with lines in input order. `make_output` chooses.

    LinesOutput    a JSONL file, plain or compressed; the tape is the file itself
    StdoutOutput   a pipe; nothing can be continued there
    PartsOutput    a directory (local or remote) of immutable part files over fixed row ranges
    FileOutput     one file that can only be written whole: Parquet, or any object of an object store

Enters: the path and the format that were asked for. Leaves: an `Output`, or one sentence on why it cannot be one.
"""

from __future__ import annotations

import os
from dataclasses import replace
from urllib.parse import urlsplit

from cbgen.config import OutputConfig
from cbgen.data import addresses
from cbgen.errors import UsageError
from cbgen.output.base import Output
from cbgen.output.file_output import FileOutput
from cbgen.output.lines_output import LinesOutput, StdoutOutput
from cbgen.output.parts_output import PartsOutput

_UNSUPPORTED = (
    *(".arrow", ".avro", ".csv", ".feather", ".orc", ".tsv", ".xlsx"),
    *(".bz2", ".lz4", ".snappy", ".tar", ".tgz", ".xz", ".zip"),
)
_COMPRESSED = (".gz", ".zst", ".zstd")


def make_output(config: OutputConfig) -> Output:
    """The output that a path and a format stand for.

    Raises:
        UsageError: the path cannot be one; says what can.
    """
    local = addresses.local_path(config.path)
    if local is not None and addresses.is_uri(config.path):  # file://
        config = replace(config, path=str(local) + ("/" if config.path.endswith("/") else ""))
    path, form = config.path, config.resolved_format
    if path == "-":
        if form != "jsonl":
            raise UsageError(f"-o - writes plain JSONL; name a file for --format {form}")
        return StdoutOutput(config)
    if config.format is None and _promises_another_form(path.lower()):
        raise UsageError(
            f"-o {path}: the output can be .jsonl, .jsonl.gz, .jsonl.zst, .parquet, or a directory of those"
        )
    remote = addresses.is_uri(path)
    if remote and urlsplit(path).scheme not in addresses.SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in addresses.SCHEMES)
        raise UsageError(f"-o {addresses.redact(path)}: {urlsplit(path).scheme}:// is not known; known are {known}")
    if remote and not urlsplit(path).netloc:
        raise UsageError(f"-o {path} names no bucket; write it as s3://bucket/directory/")
    if not remote:
        _check_reachable(path)
    if path.endswith("/") or (not remote and os.path.isdir(path)):
        return PartsOutput(config)
    if not remote and os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"-o {path} is no regular file, so a stopped run could not be continued; name a .jsonl file")
    return FileOutput(config) if remote or form == "parquet" else LinesOutput(config)


def _promises_another_form(name: str) -> bool:
    """Whether a file of this name would surprise whoever opens it."""
    inner = next((name.removesuffix(suffix) for suffix in _COMPRESSED if name.endswith(suffix)), "")
    return name.endswith(_UNSUPPORTED) or inner.endswith((*_UNSUPPORTED, ".parquet", ".pq"))


def _check_reachable(path: str) -> None:
    """Whether there could be a file with this path.

    Raises:
        UsageError: there could not, as when it is too long, or a link in a circle.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UsageError(f"-o {path}: {error.strerror}") from error
    target = os.path.realpath(path)
    if os.path.islink(path) and (os.path.islink(target) or not os.path.isdir(os.path.dirname(target))):
        raise UsageError(f"-o {path} is a link that leads nowhere; name a file")
