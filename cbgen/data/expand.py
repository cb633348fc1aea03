"""Input arguments to files: directories and glob patterns become the data files in them, in natural order.

Enters: what the user named; what this run itself writes is left out. Leaves: files, each with the name that messages
call it by. Names that begin with `_` or `.` and directories ending in `.cbgen` are job litter and skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from cbgen.data import addresses, files
from cbgen.errors import InputError

STDIN = "-"
_SUFFIX = re.compile(r"\.(jsonl|ndjson|json|parquet|pq)(\.(gz|zst|zstd))?$", re.IGNORECASE)
_UNREAD = re.compile(
    r"\.(jsonl|ndjson|json|parquet|pq)\.(bz2|xz|lzma|lz4|lzo|lz|br|sz|snappy|z|zip|7z|rar)$", re.IGNORECASE
)
_DATASETS_LITTER = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")  # the `datasets` library's notes
_DATASETS_STATE = "state.json"
_ARROW = ".arrow"
_KNOWN = ".jsonl, .ndjson, .json, .parquet, .pq, also with .gz or .zst behind"
_MAGIC = re.compile(r"[*?[]")
_MAGIC_IN_URI = re.compile(r"[*[]")  # a question mark begins the options


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file to read. `label` is what messages call it; `size` is None until somebody asks."""

    path: str
    label: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    entry: files.Entry
    parts: tuple[str, ...]  # below the directory or the fixed part of the pattern


def expand_inputs(paths: tuple[str, ...], exclude: tuple[str, ...] = ()) -> list[NamedFile]:
    """The files that the arguments stand for, in order.

    Args:
        paths: files, directories, glob patterns, URIs of these, or `-`.
        exclude: outputs; in directories and globs they, their sidecars and their backups are no input.

    Raises:
        InputError: a directory or pattern without data files; one sentence, with the way out.
    """
    found = [file for path in paths for file in _expand(path, _Excluded(exclude))]
    labels = [file.label for file in found]
    return [
        NamedFile(file.path, addresses.redact(file.path), file.size) if _is_shared(file, found, labels) else file
        for file in found
    ]


def _is_shared(file: NamedFile, found: list[NamedFile], labels: list[str]) -> bool:
    """Whether two different files go by this label."""
    if len(labels) == len(set(labels)) or labels.count(file.label) < 2:
        return False
    return any(other.label == file.label and other.path != file.path for other in found)


def _expand(path: str, excluded: _Excluded) -> list[NamedFile]:
    if path == STDIN:
        return [NamedFile(path, "stdin")]
    if path.startswith("file://"):
        path = str(addresses.local_path(path))
    if addresses.is_uri(path):
        return _expand_uri(path, excluded)
    if os.path.isdir(path):
        return _in_directory(path, excluded)
    if os.path.lexists(path) or not _MAGIC.search(path):
        return [NamedFile(path, path if path.startswith("/dev/") else os.path.basename(path))]
    return _matching(path, _MAGIC, excluded)


def _expand_uri(uri: str, excluded: _Excluded) -> list[NamedFile]:
    if uri.startswith(("http://", "https://")):
        return [NamedFile(uri, addresses.base_name(uri) or addresses.redact(uri))]
    path = uri.partition("?")[0]
    entry = None if path.count("/") < 3 and _MAGIC_IN_URI.search(path) else files.find_entry(uri)
    if entry is not None and entry.is_directory:
        return _in_directory(uri, excluded)
    if entry is not None:
        return [NamedFile(uri, entry.name, entry.size)]
    if _MAGIC_IN_URI.search(path):
        return _matching(uri, _MAGIC_IN_URI, excluded)
    raise InputError(f"cannot read {addresses.redact(uri)}: No such file or directory")


def _in_directory(directory: str, excluded: _Excluded) -> list[NamedFile]:
    everything = list(_walk(directory, (), excluded))
    taken = _data_files(everything)
    if not taken:
        shown = addresses.redact(directory)
        if not everything:
            raise InputError(f"directory {shown} has no data files in it; name a file or another directory")
        example = everything[0].parts[-1]
        raise InputError(
            f"directory {shown} has no file with a known ending ({_KNOWN}) but {example!r} for one; rename the files, "
            f"or name them, for example with the pattern {shown.rstrip('/')}/*"
        )
    return _in_order(taken)


def _matching(pattern: str, magic: re.Pattern[str], excluded: _Excluded) -> list[NamedFile]:
    base, parts, options = _cut_pattern(pattern, magic)
    matches = list(_match(base + options, (), parts, excluded))
    taken = [found for found in matches if not found.entry.is_directory]
    if not taken:
        for found in matches:
            taken += _walk(found.entry.path, found.parts, excluded)
        taken = _data_files(taken)
    if not taken:
        raise InputError(
            f"no file matches {addresses.redact(pattern)}; check the pattern (names that begin with `_` or `.` are "
            "skipped)"
        )
    return _in_order(list({found.entry.path: found for found in taken}.values()))


def _data_files(everything: list[_Found]) -> list[_Found]:
    """The files whose names say that they hold rows.

    Raises:
        InputError: one of them is compressed in a way that is not read here, which must not be missed silently; or
            there are only Arrow files.
    """
    unread = next((found for found in everything if _UNREAD.search(found.entry.name)), None)
    if unread is not None:
        shown = addresses.redact(unread.entry.path)
        raise InputError(f"{shown} is compressed in a way that is not read here; decompress it or move it away")
    arrow = [found for found in everything if found.entry.name.endswith(_ARROW)]
    beside_arrow = {found.parts[:-1] for found in arrow}
    taken = [
        found
        for found in everything
        if _SUFFIX.search(found.entry.name)
        and found.entry.name not in _DATASETS_LITTER
        and not (found.entry.name == _DATASETS_STATE and found.parts[:-1] in beside_arrow)
    ]
    if arrow and not taken:
        raise InputError(
            f"{addresses.redact(arrow[0].entry.path)} is an Arrow file, and there are no others to read; export them "
            "to Parquet, for example with `datasets.load_from_disk(...).to_parquet(...)`"
        )
    return taken


def _cut_pattern(pattern: str, magic: re.Pattern[str]) -> tuple[str, tuple[str, ...], str]:
    """The directory before the first wildcard, the pattern's parts below it, and a URI's options."""
    options = ""
    if addresses.is_uri(pattern):
        pattern, mark, rest = pattern.partition("?")
        options = mark + rest
    position = magic.search(pattern)
    assert position is not None
    base = pattern[: pattern.rfind("/", 0, position.start()) + 1]
    return base or ".", tuple(filter(None, pattern[len(base) :].split("/"))), options


def _in_order(found: list[_Found]) -> list[NamedFile]:
    ordered = sorted(found, key=lambda item: [_natural(part) for part in item.parts])
    return [NamedFile(item.entry.path, "/".join(item.parts), item.entry.size) for item in ordered]


def _natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sorts part-2 before part-10."""
    pieces = re.findall(r"([0-9]+)|([^0-9]+)", name)
    return [(0, int(digits), "") if digits else (1, 0, text) for digits, text in pieces], name


# -- walking ----------------------------------------------------------------------------------------------------------


class _Excluded:
    """What this run writes, compared by real path."""

    def __init__(self, outputs: tuple[str, ...]) -> None:
        self._outputs = tuple(_real(output) for output in outputs if output != STDIN)

    def __contains__(self, path: str) -> bool:
        path = _real(path) if self._outputs else path
        return any(path == output or path.startswith(f"{output}.backup-") for output in self._outputs)


def _real(path: str) -> str:
    if path.startswith("file://"):
        path = str(addresses.local_path(path))
    return path.partition("?")[0].rstrip("/") if addresses.is_uri(path) else os.path.realpath(path)


def _is_litter(entry: files.Entry) -> bool:
    return entry.name.startswith(("_", ".")) or (entry.is_directory and entry.name.endswith(".cbgen"))


def _list(directory: str, above: tuple[str, ...], excluded: _Excluded) -> list[files.Entry]:
    """What counts in a directory; nothing if a link led back to one of those `above` it."""
    if _real(directory) in above:
        return []
    return [entry for entry in files.list_directory(directory) if entry.path not in excluded]


def _walk(directory: str, parts: tuple[str, ...], excluded: _Excluded, above: tuple[str, ...] = ()) -> Iterator[_Found]:
    """Every file at any depth."""
    for entry in _list(directory, above, excluded):
        if _is_litter(entry):
            continue
        if entry.is_directory:
            yield from _walk(entry.path, (*parts, entry.name), excluded, (*above, _real(directory)))
        else:
            yield _Found(entry, (*parts, entry.name))


def _match(
    directory: str,
    parts: tuple[str, ...],
    pattern: tuple[str, ...],
    excluded: _Excluded,
    above: tuple[str, ...] = (),
) -> Iterator[_Found]:
    """Files and directories that a pattern names; `**` stands for any number of directories."""
    first, rest = pattern[0], pattern[1:]
    if first == "**" and rest:
        yield from _match(directory, parts, rest, excluded, above)
    for entry in _list(directory, above, excluded):
        if (_is_litter(entry) and first[0] not in "_.") or not (first == "**" or fnmatchcase(entry.name, first)):
            continue
        here = (*parts, entry.name)
        if not rest:
            yield _Found(entry, here)
        following = pattern if first == "**" else rest
        if entry.is_directory and following:
            yield from _match(entry.path, here, following, excluded, (*above, _real(directory)))
