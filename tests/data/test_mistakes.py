"""Whole-file mistakes are refused in one sentence with the way out; files with some bad rows are not."""

import csv
import gzip
import io
import json
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen.data.readers import check_inputs, read_rows
from cbgen.errors import InputError

ROWS = [{"prompt": f"row {number}", "tags": ["a", {"b": None}]} for number in range(3)]
JSONL = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def refusal(tmp_path: Path, data: bytes) -> str:
    (tmp_path / "in.jsonl").write_bytes(data)
    with pytest.raises(InputError) as raised:
        check_inputs((str(tmp_path / "in.jsonl"),))
    message = str(raised.value)
    assert message.startswith(f"{tmp_path}/in.jsonl is ")
    assert "\n" not in message
    return message


def num_rows(tmp_path: Path, data: bytes) -> int:
    (tmp_path / "in.jsonl").write_bytes(data)
    return len(list(read_rows(check_inputs((str(tmp_path / "in.jsonl"),)))))


def archive(kind: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("a.jsonl", JSONL)
    else:
        with tarfile.open(fileobj=buffer, mode="w") as file:
            info = tarfile.TarInfo("a.jsonl")
            info.size = len(JSONL)
            file.addfile(info, io.BytesIO(JSONL))
    return buffer.getvalue()


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (archive("zip"), "a zip archive"),
        (archive("tar"), "a tar archive"),
        (gzip.compress(archive("tar")), "a tar archive"),
        (b"BZh91AY&SY" + bytes(range(200)), "compressed with bzip2"),
        (b"\xfd7zXZ\x00\x00\x04", "compressed with xz"),
        (pa.compress(JSONL, codec="lz4", asbytes=True), "compressed with lz4"),
        (b"%PDF-1.7\n%...", "a PDF document"),
        (b"ARROW1\0\0" + bytes(20), "an Arrow IPC file"),
        (b"<!DOCTYPE html>\n<html><body>404</body></html>", "an HTML page"),
        (b"\n <HTML>", "an HTML page"),
        (b'<?xml version="1.0"?><a/>', "an XML file"),
        (bytes(4096), "zero bytes only"),
        (b"\0", "zero bytes only"),
        (gzip.compress(gzip.compress(JSONL)), "compressed twice"),
        (_POINTER, "a Git LFS pointer, not the file that it stands for; run `git lfs pull`"),
        (b"\x28\xb5\x2f\xfd\x00\xa8\x19\0\0{}\n", "compressed with a window that is too large"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refusal(tmp_path, data)


def test_database_is_named(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "db") as connection:
        connection.execute("create table a (b)")
    connection.close()

    assert "an SQLite database" in refusal(tmp_path, (tmp_path / "db").read_bytes())


@pytest.mark.parametrize("mark", [True, False])
@pytest.mark.parametrize("name", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", [JSONL.decode(), '{"prompt": "什么是机器学习"}\n' * 3, '["a"]', "{"])
def test_wide_encodings_are_named_with_the_right_command(tmp_path: Path, name: str, mark: bool, text: str) -> None:
    data = (("\ufeff" if mark else "") + text).encode(name)

    message = refusal(tmp_path, data)

    encoding = message.split("iconv -f ")[1].split(" ")[0]
    assert data.decode(encoding).removeprefix("\ufeff") == text


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize("indent", [None, 2, 0])
def test_json_array_is_refused(tmp_path: Path, indent: int | None, compress: Any) -> None:
    assert "one JSON array" in refusal(tmp_path, compress(json.dumps(ROWS, indent=indent).encode()))


@pytest.mark.parametrize("form", ["indented", "one per line", "one line"])
def test_long_json_array_is_refused(tmp_path: Path, form: str) -> None:
    rows = [{"prompt": "x" * 100, "messages": [{"role": "user"}]}] * 3000
    text = json.dumps(rows, indent=1 if form == "indented" else None)
    if form == "one per line":
        text = text.replace("}, {", "},\n{")

    assert "one JSON array" in refusal(tmp_path, text.encode())


@pytest.mark.parametrize("count", [1, 2, 1000])
@pytest.mark.parametrize("indent", [0, 2, "\t"])
def test_pretty_printed_objects_are_refused(tmp_path: Path, indent: int | str, count: int) -> None:
    text = "\n".join(json.dumps(row, indent=indent) for row in ROWS[:1] * count)

    assert "JSON spread over several lines" in refusal(tmp_path, text.encode())


def test_one_pretty_printed_object_that_is_long_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"data": ROWS * 1000}, indent=2)

    assert "JSON spread over several lines" in refusal(tmp_path, text.encode())


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_tables_are_refused_with_a_command_that_works(tmp_path: Path, separator: str) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=separator)
    writer.writerows([["id", "prompt"], ["1", 'say "hi", {now}; ok'], ["2", "b\nc"]])
    data = buffer.getvalue().encode()

    message = refusal(tmp_path, data)

    assert "table (its first line has no brace)" in message
    code = message.split('python3 -c "')[1].split('" <')[0]
    result = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == ['say "hi", {now}; ok', "b\nc"]


@pytest.mark.parametrize("name", ["b.parquet", "b.jsonl.gz"])
def test_pointer_is_named_whatever_it_stands_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (tmp_path / name).write_bytes(_POINTER)

    with pytest.raises(InputError, match=rf"/{name} is a Git LFS pointer"):
        check_inputs((str(tmp_path),))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize("data", [b'{"a": 1}\r{"a": 2}\r', b'\xef\xbb\xbf{"a": 1}\r\r {"a": 2', b'{"a": 1}\r' * 20_000])
def test_lines_that_end_at_cr_are_refused_with_a_command_that_works(tmp_path: Path, data: bytes, compress: Any) -> None:
    message = refusal(tmp_path, compress(data))

    assert "text whose lines end at CR, not at LF; convert it with `tr '\\r' '\\n' < " in message
    result = subprocess.run(["tr", "\\r", "\\n"], input=data, capture_output=True, check=True)
    assert num_rows(tmp_path, result.stdout) == data.count(b"{")


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize(
    "data",
    [
        b"hello, world\n",
        b"Say hello.\n\n\tSay goodbye.\n",
        b"prompt\nSay hello.\nSay goodbye.\n",
        b"hello\n" * 50 + JSONL,
        b"x" * 100_000,
    ],
)
def test_plain_text_is_refused(tmp_path: Path, data: bytes, compress: Any) -> None:
    assert "plain text (no line begins like JSON)" in refusal(tmp_path, compress(data))


@pytest.mark.parametrize("lost", [4, 100, 70_000])
def test_parquet_that_lost_its_start_is_named(tmp_path: Path, lost: int) -> None:
    data = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": [f"{number} of many rows" for number in range(20_000)]}), data)
    whole = data.getvalue().to_pybytes()

    assert "a damaged Parquet file: it begins with zero bytes" in refusal(tmp_path, bytes(lost) + whole[lost:])


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"{oops}\n" + JSONL, 4),
        (b"id,prompt\n1,2\n" + JSONL, 5),
        (b"[\n" + JSONL, 4),
        (b"[1]\n" + JSONL, 4),
        (b"[1,\n" + JSONL, 4),
        (b"{\n" + JSONL, 4),
        (b'{"a":\n1}\n' + JSONL, 5),
        (b"{oops}\n", 1),
        (b"{", 1),
        (b'{"prompt": "a', 1),
        (b"3\nnull\n", 2),
        (b"1,2\n", 1),
        (b"hello\n" * 49 + b"[1]\n", 50),
        (b"\n" * 60 + b"-\n", 1),
        (b"null\nhello\n", 2),
        (b'"a"\n', 1),
        (b'{"a": 1}\r', 1),
        (b'{"a": 1}\r\n{"a": 2}', 2),
        (b'{"a": 1,\r"b": 2}', 1),
        (b'"a, b"\n"c, d"\n', 2),
        (b"ORC is fine\n" + JSONL, 4),
        (b'{"prompt": "a\\u0000"}\n' + JSONL, 4),
        (b'{"prompt": "a\0"}\n' + JSONL, 4),
        (b"<oops>\n" + JSONL, 4),
        (b"\xff\n" + JSONL, 4),
        (b"", 0),
    ],
)
def test_bad_rows_do_not_make_a_bad_file(tmp_path: Path, data: bytes, count: int) -> None:
    assert num_rows(tmp_path, data) == count
