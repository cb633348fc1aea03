"""Reading from and publishing to an object store, against a server in this process that counts and fails requests."""

import gzip
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen.data import files, filesystems
from cbgen.data.expand import expand_inputs
from cbgen.data.readers import check_inputs, read_rows
from cbgen.errors import BrokenInputError, InputError
from cbgen.records import Position, Row
from tests.s3 import BUCKET, Server, s3_server

_MIB = 1 << 20


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as server:
        yield server


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(filesystems.time, "sleep", lambda _: None)
    running.reset()
    yield running
    running.reset()


def noise(num_bytes: int) -> bytes:
    return random.Random(0).randbytes(num_bytes)


def put(server: Server, key: str, data: bytes) -> str:
    files.write_bytes(server.uri(key), data)
    server.counts.clear()
    return server.uri(key)


def rows_of(*paths: str, start: Position = Position(), first_index: int = 0) -> list[Row]:
    return list(read_rows(check_inputs(paths), start, first_index))


def lines(num_bytes: int) -> bytes:
    line = b'{"prompt": "%07d", "filler": "' + b"x" * 2000 + b'"}\n'
    return b"".join(line % number for number in range(num_bytes // len(line)))


def text_table(num_rows: int, width: int) -> pa.Table:
    rng = random.Random(1)
    return pa.table({"prompt": [rng.randbytes(width // 2).hex() for _ in range(num_rows)], "n": range(num_rows)})


# -- reading ----------------------------------------------------------------------------------------------------------


def test_jsonl_takes_few_large_requests_and_equals_the_local_file(server: Server, tmp_path: Path) -> None:
    data = lines(20 * _MIB)
    local = tmp_path / "in.jsonl"
    local.write_bytes(data)

    rows = rows_of(put(server, "in.jsonl", data))

    assert rows == rows_of(str(local))
    assert server.count("GET", "in.jsonl") <= math.ceil(len(data) / files.READ_BYTES) + 1


def test_resuming_far_in_reads_only_the_rest(server: Server) -> None:
    data = lines(20 * _MIB)
    uri = put(server, "in.jsonl", data)
    sources = check_inputs((uri,))
    rows = list(read_rows(sources))
    server.counts.clear()

    rest = list(read_rows(sources, rows[-100].next_position, len(rows) - 99))

    assert rest == rows[-99:]
    assert server.count("GET", "in.jsonl") == 1


@pytest.mark.parametrize("compress", [gzip.compress, lambda data: pa.compress(data, codec="zstd", asbytes=True)])
def test_compressed_lines_equal_the_plain_ones(server: Server, compress: Any) -> None:
    data = lines(_MIB)
    packed = compress(data[: len(data) // 2]) + compress(data[len(data) // 2 :])

    rows = rows_of(put(server, "in.z", packed))

    assert [row.columns for row in rows] == [row.columns for row in rows_of(put(server, "in.jsonl", data))]
    assert server.count("GET", "in.z") <= 2


def test_torn_compressed_object_is_a_broken_input(server: Server) -> None:
    with pytest.raises(BrokenInputError, match="cannot be read past row"):
        rows_of(put(server, "in.gz", gzip.compress(lines(_MIB))[:-20]))


@pytest.mark.parametrize("group", [1000, 7])
def test_parquet_of_small_row_groups_is_fetched_in_few_requests(server: Server, tmp_path: Path, group: int) -> None:
    local = tmp_path / "in.parquet"
    pq.write_table(text_table(3000, 3000), local, row_group_size=group, compression="none")
    uri = put(server, "in.parquet", local.read_bytes())

    rows = rows_of(uri)

    assert [(row.index, row.columns, row.checksum) for row in rows] == [
        (row.index, row.columns, row.checksum) for row in rows_of(str(local))
    ]
    # The look at the head, the end for the check and for each of the two readers, and 9 MB in one piece.
    assert server.count("GET", "in.parquet") <= 12


def test_parquet_of_a_large_row_group_is_fetched_in_large_pieces(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbgen.data.parquet._COALESCED_BYTES", _MIB)
    local = tmp_path / "in.parquet"
    pq.write_table(text_table(8000, 3000), local, compression="none", use_dictionary=False)
    uri = put(server, "in.parquet", local.read_bytes())

    rows = rows_of(uri)

    assert [row.columns for row in rows] == [row.columns for row in rows_of(str(local))]
    assert server.count("GET", "in.parquet") <= math.ceil(local.stat().st_size / files.READ_BYTES) + 12


@pytest.mark.parametrize("failures", [1, 4])
@pytest.mark.parametrize("name", ["in.jsonl", "in.gz", "in.parquet"])
def test_passing_failures_do_not_show(server: Server, tmp_path: Path, name: str, failures: int) -> None:
    table = text_table(500, 4000)
    data = b"".join(b'{"prompt": "%s"}\n' % text.encode() for text in table["prompt"].to_pylist())
    if name == "in.parquet":
        pq.write_table(table, tmp_path / name)
        data = (tmp_path / name).read_bytes()
    uri = put(server, name, gzip.compress(data) if name == "in.gz" else data)
    sources = check_inputs((uri,))
    server.fail_next(failures, "GET", "HEAD")

    rows = list(read_rows(sources))

    assert [row.columns["prompt"] for row in rows] == table["prompt"].to_pylist()
    assert server.num_failed == failures


def test_lasting_failure_names_the_object_and_keeps_what_was_read(server: Server) -> None:
    sources = check_inputs((put(server, "in.jsonl", lines(20 * _MIB)),))
    rows = read_rows(sources)
    next(rows)
    server.fail_next(10_000, "GET")

    with pytest.raises(BrokenInputError, match=rf"s3://{BUCKET}/in\.jsonl: cannot be read past row \d+"):
        list(rows)


def test_missing_objects_and_buckets_are_refused_before_anything_is_read(server: Server) -> None:
    for uri in (server.uri("nowhere.jsonl"), "s3://nowhere/a.jsonl", server.uri("nowhere/*.jsonl")):
        with pytest.raises(InputError, match=r"No such file|no file matches"):
            check_inputs((uri,))


def test_secrets_of_a_uri_are_not_in_messages(server: Server) -> None:
    with pytest.raises(InputError) as raised:
        check_inputs((f"s3://KEY:SECRETWORD@{BUCKET}/nowhere.jsonl",))
    assert "SECRETWORD" not in str(raised.value)
    assert "KEY" not in str(raised.value)


def test_empty_object_is_an_empty_shard(server: Server) -> None:
    put(server, "d/a.jsonl", b"")
    put(server, "d/b.jsonl", b'{"prompt": "a"}\n')

    assert [row.place for row in rows_of(server.uri("d"))] == ["b.jsonl line 1"]


def test_endpoint_and_credentials_may_stand_in_the_uri(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    put(server, "in.jsonl", b'{"prompt": "a"}\n')
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    address = server.url.removeprefix("http://")
    uri = f"s3://KEY:SECRET@{BUCKET}/in.jsonl?endpoint_override={address}&scheme=http&region=us-east-1"

    (source,) = check_inputs((uri,))

    assert [row.columns for row in read_rows([source])] == [{"prompt": "a"}]
    assert source.name == "in.jsonl"
    assert "SECRET" not in source.shown


def test_whole_file_mistakes_are_refused_as_in_local_files(server: Server) -> None:
    with pytest.raises(InputError, match=r"s3://bucket/in\.jsonl is one JSON array"):
        check_inputs((put(server, "in.jsonl", b'[{"prompt": "a"}]'),))


def test_prefixes_and_patterns_follow_the_rules_of_directories(server: Server) -> None:
    for key in (
        "d/part-10.jsonl",
        "d/part-2.jsonl",
        "d/e/part-1.jsonl",
        "d/_SUCCESS",
        "d/.x/a.jsonl",
        "d/o.cbgen/a.pq",
    ):
        put(server, key, b"{}\n")

    def labels(uri: str) -> list[str]:
        return [file.label for file in expand_inputs((uri,), (server.uri("d/part-2.jsonl"),))]

    assert labels(server.uri("d")) == labels(server.uri("d/")) == ["e/part-1.jsonl", "part-10.jsonl"]
    assert labels(server.uri("d/*.jsonl")) == ["part-10.jsonl"]
    assert labels(server.uri("d/**/part-*")) == ["e/part-1.jsonl", "part-10.jsonl"]
    assert labels(server.uri("d/part-[0-2].jsonl?region=us-east-1".replace("part-[0-2]", "e/part-[0-2]"))) == [
        "part-1.jsonl"
    ]
    with pytest.raises(InputError, match="no file matches"):
        labels(server.uri("d/x*"))


def test_odd_names_are_found_and_opened(server: Server) -> None:
    keys = ["d/a b.jsonl", "d/ü#1.jsonl", "d/50%25.jsonl", "d/c+d.jsonl"]
    names = ["50%.jsonl", "a b.jsonl", "c+d.jsonl", "ü#1.jsonl"]
    for key in keys:
        put(server, key.replace("#", "%23"), b'{"prompt": "a"}\n')

    assert files.list_names(server.uri("d")) == names
    assert len(rows_of(server.uri("d"))) == 4


def test_signature_is_size_and_time(server: Server) -> None:
    uri = put(server, "in.jsonl", b"{}\n")
    (source,) = check_inputs((uri,))
    size, changed = source.signature()

    assert size == 3
    assert changed > 10**18
    put(server, "in.jsonl", b"{} \n")
    assert source.signature() != [size, changed]


# -- publishing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out", "out.jsonl.gz", "out.zst"])
@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 12 * _MIB + 5])
def test_published_object_is_the_file(server: Server, tmp_path: Path, num_bytes: int, name: str) -> None:
    uri = server.uri(f"d/{name}")
    (tmp_path / "made").write_bytes(noise(num_bytes))

    files.publish(uri, tmp_path / "made")

    assert files.read_bytes(uri) == noise(num_bytes)
    assert server.count("PUT", f"d/{name}") <= 2
    assert files.list_names(server.uri("d")) == [name]
    assert files.exists(uri)
    files.delete(uri)
    files.delete(uri)
    assert not files.exists(uri)


@pytest.mark.parametrize("failures", [1, 4])
@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_publish_is_tried_again_and_ends_right(server: Server, tmp_path: Path, failures: int, method: str) -> None:
    (tmp_path / "made").write_bytes(noise(12 * _MIB))
    server.fail_next(failures, method)

    files.publish(server.uri("out"), tmp_path / "made")

    assert server.num_failed == failures
    assert files.read_bytes(server.uri("out")) == noise(12 * _MIB)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_publish_that_fails_midway_leaves_nothing_or_the_old_object(
    server: Server, tmp_path: Path, method: str, after: int
) -> None:
    (tmp_path / "made").write_bytes(noise(25 * _MIB))
    put(server, "old", b"old")

    for key in ("out", "old"):
        server.fail_next(10_000, method, after=after)
        with pytest.raises(OSError, match="during"):
            files.publish(server.uri(key), tmp_path / "made")
        assert server.num_failed > 1
        server.fail_next(0)

    assert not files.exists(server.uri("out"))
    assert files.read_bytes(server.uri("old")) == b"old"


def test_interrupt_between_write_and_close_leaves_the_whole_object(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def write(self, data: Any) -> None:
            self.stream.write(data)
            raise KeyboardInterrupt

        def close(self) -> None:
            self.stream.close()

    filesystem, path = filesystems.open_filesystem(server.uri("out"))

    class Opening:
        def open_output_stream(self, name: str, **options: Any) -> Interrupting:
            return Interrupting(filesystem.open_output_stream(name, **options))

    monkeypatch.setattr(files, "open_filesystem", lambda uri: (Opening(), path))
    with pytest.raises(KeyboardInterrupt):
        files.write_bytes(server.uri("out"), noise(12 * _MIB))
    monkeypatch.undo()

    assert files.read_bytes(server.uri("out")) == noise(12 * _MIB)


def test_server_that_is_gone_ends_in_bounded_tries(server: Server) -> None:
    uri = f"s3://KEY:SECRET@{BUCKET}/x?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"

    with pytest.raises(InputError, match="cannot read"):
        check_inputs((uri,))
    with pytest.raises(OSError, match="AWS Error"):
        files.write_bytes(uri, b"a")
