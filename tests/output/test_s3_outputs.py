"""Outputs in an object store: whole objects or nothing, few requests, and a run that goes on on another machine."""

import json
import random
import shutil
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen import pipeline
from cbgen.config import ModelConfig, OutputConfig, ReportConfig, RunConfig
from cbgen.data import files, filesystems
from cbgen.errors import CbgenError, RefusedError
from cbgen.job import Serving
from cbgen.output.encoders import ParquetEncoder
from tests.fakes import FakeEngine
from tests.helpers import BYTE_VOCAB_SIZE, EOS, ByteTokenizer, byte_ids
from tests.s3 import BUCKET, s3_server


@pytest.fixture(scope="module")
def running():
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as server:
        yield server


@pytest.fixture
def server(running, monkeypatch, tmp_path):
    running.reset()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(filesystems.time, "sleep", lambda _: None)
    return running


class Model:
    """Answers every prompt with its last two letters; counts the rows it was asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, prompt, sample):
        self.asked += 1
        return [*prompt[-2:].tolist(), EOS], "stop"

    def serving(self, config, model_files, note):
        return Serving(ByteTokenizer(), FakeEngine(self, vocab_size=BYTE_VOCAB_SIZE))


@pytest.fixture
def job(tmp_path, server):
    """Runs the input to an output; returns (exit code, rows the model was asked)."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    rows = [{"id": i, "prompt": f"row {i:03}"} for i in range(250)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(output, source="in.jsonl", limit=None, **options):
        model = Model()
        config = RunConfig(
            inputs=(source,),
            output=OutputConfig(path=output, rows_per_part=100, **options),
            model=ModelConfig(name=str(tmp_path / "model")),
            report=ReportConfig(progress="none"),
            limit=limit,
        )
        return pipeline.run(config, model.serving), model.asked

    return run


def parts(server, prefix):
    return sorted(name for name in files.list_names(server.uri(prefix)) if name.startswith("part-"))


def records(server, key):
    """Rows of one object, whatever its form."""
    data = files.read_bytes(server.uri(key))
    if key.endswith(".parquet"):
        return pq.read_table(pa.BufferReader(data)).to_pylist()
    if not key.endswith(".jsonl"):
        data = pa.CompressedInputStream(pa.BufferReader(data), "gzip" if key.endswith(".gz") else "zstd").read()
    return [orjson.loads(line) for line in data.split(b"\n")[:-1]]


def check(found, number=250):
    assert [row["id"] for row in found] == list(range(number))
    assert [row["completion"] for row in found] == [f"{i % 100:02}" for i in range(number)]


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_parts_are_whole_objects_and_take_few_requests(server, job, form):
    assert job(server.uri("run/"), format=form) == (0, 250)
    names = parts(server, "run")
    assert names == [f"part-{k:06}.{form}" for k in range(3)]
    found = [records(server, f"run/{name}") for name in names]
    assert [len(rows) for rows in found] == [100, 100, 50]
    check([row for rows in found for row in rows])
    for name in names:
        assert server.count("PUT", f"run/{name}") <= 1
        assert server.count("POST", f"run/{name}") <= 2  # of a multipart upload
        assert server.count("GET", f"run/{name}") <= 2  # by this test alone
    assert server.count("PUT", "run/_cbgen/run.json") == 1
    assert server.count("PUT", "run/_cbgen/state.json") == 3
    server.counts.clear()
    assert job(server.uri("run/"), format=form) == (0, 0)
    assert not [key for (method, key) in server.counts if method in ("PUT", "POST") and "part-" in key]


@pytest.mark.parametrize("key", ["out.jsonl", "deep/out.jsonl.gz", "out.jsonl.zst", "out.parquet"])
def test_single_object_appears_when_it_is_complete_and_grows(server, job, key):
    assert job(server.uri(key), limit=120) == (0, 120)
    check(records(server, key), 120)
    assert server.count("PUT", key) <= 1
    assert job(server.uri(key)) == (0, 130)
    check(records(server, key))
    assert job(server.uri(key)) == (0, 0)


def test_remote_parquet_becomes_remote_parquet(server, job, tmp_path):
    table = pa.table({"id": pa.array(range(250), pa.int16()), "prompt": [f"row {i:03}" for i in range(250)]})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=60)
    files.publish(server.uri("in/data.parquet"), tmp_path / "in.parquet")
    assert job(server.uri("out.parquet"), source=server.uri("in/")) == (0, 250)
    check(records(server, "out.parquet"))
    assert server.count("GET", "in/data.parquet") <= 20
    schema = pq.read_schema(pa.BufferReader(files.read_bytes(server.uri("out.parquet"))))
    assert schema.field("id").type == pa.int16()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_run_goes_on_on_a_machine_that_has_only_the_bucket(server, job, tmp_path, form):
    assert job(server.uri("run/"), format=form, limit=230) == (0, 230)
    shutil.rmtree(tmp_path / "run.cbgen")
    assert job(server.uri("run/"), format=form) == (0, 20)
    check([row for name in parts(server, "run") for row in records(server, f"run/{name}")])


def test_other_settings_and_foreign_objects_are_refused_from_the_bucket_alone(server, job, tmp_path):
    assert job(server.uri("run/"), limit=150) == (0, 150)
    shutil.rmtree(tmp_path / "run.cbgen")
    with pytest.raises(RefusedError, match=r"output\.token_ids"):
        job(server.uri("run/"), token_ids=True)
    files.write_bytes(server.uri("other/data.csv"), b"a,b\n")
    with pytest.raises(RefusedError, match="exists and was not made"):
        job(server.uri("other/"))
    assert files.read_bytes(server.uri("other/data.csv")) == b"a,b\n"


@pytest.mark.parametrize("output", ["run/", "out.parquet"])
def test_exception_while_encoding_publishes_nothing(server, job, monkeypatch, output):
    table = ParquetEncoder._table

    def fail(self, first_row, records):
        if first_row >= 100:
            raise OSError("no space left on the scratch disk")
        return table(self, first_row, records)

    with monkeypatch.context() as patch:
        patch.setattr(ParquetEncoder, "_table", fail)
        with pytest.raises(CbgenError, match="scratch disk"):
            job(server.uri(output), format="parquet")
    names = files.list_names(server.uri(""))
    assert "out.parquet" not in names
    assert parts(server, "run") == (["part-000000.parquet"] if output == "run/" else [])
    code, asked = job(server.uri(output), format="parquet")
    assert code == 0
    assert asked < 250  # the rows of the journal are there
    keys = [f"run/{name}" for name in parts(server, "run")] or ["out.parquet"]
    check([row for key in keys for row in records(server, key)])


@pytest.mark.parametrize("seed", range(6))
def test_server_failures_are_sat_out_or_end_the_run_with_whole_parts(server, job, seed):
    rng = random.Random(seed)
    uri = server.uri("run/")
    for _ in range(8):
        server.fail_next(rng.choice([2, 40]), "PUT", "POST", after=rng.randrange(6))
        said = ""
        try:
            job(uri, format="parquet")
        except CbgenError as error:
            said = str(error)
        server.fail_next(0)
        if not said:
            break
        assert "s3://" in said
        for name in parts(server, "run"):
            assert len(records(server, f"run/{name}")) in (50, 100)
    code, _ = job(uri, format="parquet")
    assert code == 0
    check([row for name in parts(server, "run") for row in records(server, f"run/{name}")])


def test_failed_rows_are_tried_again_in_place(server, job, tmp_path):
    lines = (tmp_path / "in.jsonl").read_text().splitlines()
    good = lines[130]
    lines[130] = '{"id": 130, "prompt": '
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    assert job(server.uri("run/"), format="parquet") == (3, 249)
    lines[130] = good
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    server.counts.clear()
    assert job(server.uri("run/"), format="parquet", retry_errors=True) == (0, 1)
    assert server.count("PUT", "run/part-000000.parquet") == 0
    assert byte_ids("30")
    check([row for name in parts(server, "run") for row in records(server, f"run/{name}")])


def test_no_credentials_in_the_sidecar(server, job, tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    address = server.url.removeprefix("http://")
    uri = f"s3://testing:VERYSECRET@{BUCKET}/run/?endpoint_override={address}&scheme=http"
    assert job(uri) == (0, 250)
    for path in Path(tmp_path).rglob("*"):
        if path.is_file():
            assert b"VERYSECRET" not in path.read_bytes(), path
