"""Files that as a whole are not rows: told by their first bytes, in one sentence with the way out.

Enters: the first bytes of a file, decompressed. Leaves: nothing, or an `InputError`. What might be a file with a few
bad rows is never refused: those are row errors.
"""

from __future__ import annotations

import io
import json
from itertools import islice

import pyarrow as pa

from cbgen.data.compressed import decompressed
from cbgen.data.lines import loads, without_marks
from cbgen.errors import InputError

SNIFF_BYTES = 1 << 16
_OTHER_COMPRESSION = {
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\x00": ("xz", "unxz"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4"),
    b"\x1f\x9d": ("compress", "uncompress"),
}
_FORMATS = {
    **{
        magic: (f"compressed with {name}", f"use gzip or zstd instead, or `{tool}` it first")
        for magic, (name, tool) in _OTHER_COMPRESSION.items()
    },
    b"PK\x03\x04": ("a zip archive or an Office document", "unpack it, or export its table as JSON lines"),
    b"7z\xbc\xaf\x27\x1c": ("a 7-Zip archive", "unpack it first"),
    b"Rar!": ("a RAR archive", "unpack it first"),
    b"SQLite format 3\x00": ("an SQLite database", "export a table with `sqlite3 -json | jq -c '.[]'`"),
    b"%PDF": ("a PDF document", "give a file of rows instead"),
    b"ARROW1": ("an Arrow IPC file", "write it as Parquet"),
    b"Obj\x01": ("an Avro file", "write it as Parquet or JSON lines"),
    b"ORC": ("an ORC file", "write it as Parquet"),
    b"PARE": ("an encrypted Parquet file", "write it without encryption"),
    b"\x1f\x8b": ("compressed twice", "decompress it once"),
    b"\x28\xb5\x2f\xfd": ("compressed twice", "decompress it once"),
    b"PAR1": ("a Parquet file in a compressed file", "decompress it; Parquet compresses by itself"),
}
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32LE",
    b"\x00\x00\xfe\xff": "UTF-32BE",
    b"\xff\xfe": "UTF-16LE",
    b"\xfe\xff": "UTF-16BE",
}
_POINTER = b"version https://git-lfs.github.com/spec/"
_WINDOW_TOO_LARGE = "requires too much memory"  # in the decoder's words
_JSON_STARTS = (b"{", b"[", b'"', b"-", b"true", b"false", b"null", *(b"%d" % digit for digit in range(10)))
_FEW_LINES = 50
_SEPARATORS = ((b"\t", "TSV", ",delimiter='\\t'"), (b";", "CSV", ",delimiter=';'"), (b",", "CSV", ""))
_CSV_TO_JSON = "import csv,json,sys;[print(json.dumps(r)) for r in csv.DictReader(sys.stdin{})]"


def check_head(shown: str, head: bytes, is_whole_file: bool) -> None:
    """Refuse what is not one JSON object per line.

    Args:
        shown: the file in messages.
        head: its first bytes.
        is_whole_file: there are no more.

    Raises:
        InputError: it is something else.
    """
    problem = _binary(head) or _encoding(head)
    if problem is None:
        text = without_marks(head).lstrip()
        problem = _markup(text) or _line_ends(text, shown) or _json_document(text, is_whole_file, shown)
        problem = problem or _table(text, shown) or _plain_text(text, shown)
    if problem is not None:
        raise InputError(f"{shown} is {problem}")


def decompressed_head(shown: str, head: bytes, kind: str) -> tuple[bytes, bool]:
    """As much as can be read of a compressed file whose first bytes these are, and whether that is all of it.

    Raises:
        InputError: it can never be read, however whole it is.
    """
    text = b""
    try:
        for block in decompressed(lambda: io.BytesIO(head), kind, once=True):
            text += block
            if len(text) >= SNIFF_BYTES:
                return text, False
    except (OSError, pa.ArrowException) as error:
        if _WINDOW_TOO_LARGE in str(error):
            raise InputError(
                f"{shown} is compressed with a window that is too large to read; compress it again without `--long`"
            ) from error
        return text, False  # cut off here, or broken: who reads it will say so
    return text, True


def is_plain_row(head: bytes) -> bool:
    """Whether the first line is a JSON object."""
    return _is_object(without_marks(head).lstrip().partition(b"\n")[0])


def _binary(head: bytes) -> str | None:
    if head and not head.strip(b"\x00"):
        return "zero bytes only, which is what a crash or a broken copy leaves; restore it"
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it first"
    if head.startswith(_POINTER):
        return "a Git LFS pointer, not the file that it stands for; run `git lfs pull`"
    found = next((magic for magic in _FORMATS if head.startswith(magic)), None)
    if found is None or (found == b"BZh" and not head[3:4].isdigit()) or (found == b"ORC" and not _has_zeros(head)):
        return None
    what, way_out = _FORMATS[found]
    return f"{what}; {way_out}"


def _has_zeros(head: bytes) -> bool:
    return b"\x00" in head[:400]


def _encoding(head: bytes) -> str | None:
    name = next((name for mark, name in _MARKS.items() if head.startswith(mark)), None) or _unmarked(head[:400])
    if name is None:
        return None
    return f"{name[:6]} text; convert it to UTF-8, for example with `iconv -f {name} -t UTF-8`"


def _unmarked(head: bytes) -> str | None:
    """UTF-16 or UTF-32 without a mark: text begins with a character that is ASCII, and so with zeros beside it."""
    if head[:1] and head[0] == 0:
        return "UTF-32BE" if head[:3] == b"\x00\x00\x00" else "UTF-16BE" if head[1:2].strip(b"\x00") else None
    if head[1:2] == b"\x00":
        return "UTF-32LE" if head[1:4] == b"\x00\x00\x00" else "UTF-16LE"
    return None


def _markup(text: bytes) -> str | None:
    start = text[:200].lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "an HTML page, perhaps the error page of a failed download; fetch the file again"
    return "an XML file; convert it to one JSON object per line" if start.startswith(b"<?xml") else None


def _line_ends(text: bytes, shown: str) -> str | None:
    """Rows that end at CR alone would all be one line."""
    first, _, second = text.partition(b"\r")
    if b"\n" in text or not second.lstrip().startswith(b"{") or not _is_object(first):
        return None
    return f"text whose lines end at CR, not at LF; convert it with `tr '\\r' '\\n' < {shown} > prompts.jsonl`"


def _json_document(text: bytes, is_whole_file: bool, shown: str) -> str | None:
    if text.startswith(b"[") and _is_json_array(text, is_whole_file):
        return f"one JSON array, not one object per line; convert it with `jq -c '.[]' {shown} > prompts.jsonl`"
    if text.startswith(b"{") and _is_pretty_printed(text, is_whole_file):
        return (
            "JSON spread over several lines, not one object per line; convert it with "
            f"`jq -c . {shown} > prompts.jsonl`"
        )
    return None


def _is_json_array(text: bytes, is_whole_file: bool) -> bool:
    """Whether text that starts with `[` is one array, rather than lines of which the first is (wrongly) a list."""
    first, _, rest = text.partition(b"\n")
    if any(map(_is_object, rest.split(b"\n")[:_FEW_LINES])) and not _spans_lines(text):
        return False
    try:
        value = loads(first.strip())
    except ValueError:
        return True
    return is_whole_file and not rest.strip() and any(isinstance(item, dict) for item in value)


def _is_pretty_printed(text: bytes, is_whole_file: bool) -> bool:
    """Whether the first object goes over several lines, and no later line is an object by itself."""
    end = _end_of_value(text)
    if end is None:
        lines = text.split(b"\n")[:-1]
        return not is_whole_file and lines[:1] != [] and lines[0].strip() == b"{" and not any(map(_is_object, lines))
    return b"\n" in text[:end] and not any(map(_is_object, text[end:].split(b"\n")))


def _spans_lines(text: bytes) -> bool:
    end = _end_of_value(text)
    return end is not None and b"\n" in text[:end]


def _end_of_value(text: bytes) -> int | None:
    """Where the first JSON value ends; None if it is none, or is cut off."""
    try:
        decoded = text.decode("utf-8", errors="surrogateescape")
        _, end = json.JSONDecoder().raw_decode(decoded)
    except (ValueError, RecursionError):
        return None
    return len(decoded[:end].encode("utf-8", errors="surrogateescape"))


def _table(text: bytes, shown: str) -> str | None:
    """Comma- or tab-separated values: no line is JSON, and the first two have the same separator."""
    lines = [line for line in text.split(b"\n")[:_FEW_LINES] if line.strip()]
    if len(lines) < 2 or b"{" in lines[0] or any(map(_is_json, lines)):
        return None
    for separator, name, option in _SEPARATORS:
        if separator in lines[0] and separator in lines[1]:
            code = _CSV_TO_JSON.format(option)
            return (
                f"a {name} table (its first line has no brace), not one JSON object per line; convert it with "
                f'`python3 -c "{code}" < {shown} > prompts.jsonl`'
            )
    return None


def _plain_text(text: bytes, shown: str) -> str | None:
    """Text, or a table of one column: no line even begins like JSON."""
    lines = list(islice((line for line in map(_content, text.split(b"\n")) if line), _FEW_LINES))
    if not lines or any(line.startswith(_JSON_STARTS) for line in lines):
        return None
    return (
        "plain text (no line begins like JSON), not one JSON object per line; if each line is a prompt, convert it "
        f"with `jq -cR '{{prompt: .}}' {shown} > prompts.jsonl`"
    )


def _content(line: bytes) -> bytes:
    return without_marks(line).strip()


def _is_json(line: bytes) -> bool:
    try:
        loads(_content(line))
    except ValueError:
        return False
    return True


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(loads(_content(line)), dict)
    except ValueError:
        return False
