"""Outputs end to end, of every form: which columns they hold, in which types, and how they go on when more comes."""

import gzip
import itertools
import json
from datetime import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.quick import Quick, strict_lines

FORMS = ("out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "out.parquet", "parts/")
TABLES = ("out.jsonl", "out.parquet")


@pytest.fixture
def quick(tmp_path):
    return Quick(tmp_path)


def read(path):
    """The rows of an output of any form, with nothing but gzip and pyarrow."""
    if path.is_dir():
        return [row for part in sorted(path.glob("part-*")) for row in read(part)]
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".zst":
        data = pa.input_stream(pa.BufferReader(data), compression="zstd").read() if data else b""
    return list(strict_lines(data.decode()))


def results(row, prefix=""):
    """Completion, finish reason and error code."""
    error = row[f"{prefix}error"]
    return row[f"{prefix}completion"], row[f"{prefix}finish_reason"], error and error["code"]


def chat(*contents, roles=("user", "assistant")):
    return [{"role": role, "content": text} for role, text in zip(itertools.cycle(roles), contents, strict=False)]


# -- which columns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", FORMS)
def test_kept_columns_are_in_every_record_in_the_order_asked_for(quick, output):
    quick.write([{"id": 1, "x": 5, "prompt": "a"}, {"id": 2, "prompt": "b"}, "{cut", {"id": 4, "x": 7}])
    outcome = quick.run("--keep", "x,zz", "--keep", "id", output=output)
    rows = read(quick.path(output))
    assert outcome.code == 3
    assert [list(row)[:3] for row in rows] == [["x", "zz", "id"]] * 4
    assert [(row["x"], row["zz"], row["id"]) for row in rows] == [
        (5, None, 1),
        (None, None, 2),
        (None, None, None),
        (7, None, 4),
    ]
    assert "--keep names 'zz', which none of the first rows has; rows without it hold null" in outcome.stderr
    assert [results(row) for row in rows[:2]] == [("re:a", "stop", None), ("re:b", "stop", None)]
    assert [results(row)[2] for row in rows[2:]] == ["invalid_json", "missing_prompt"]


def test_kept_columns_of_parquet_are_all_there_and_typed_when_no_input_has_them(quick):
    pq.write_table(pa.table({"prompt": ["a"], "x": pa.array([5], pa.int8())}), quick.path("in.parquet"))
    quick.run(quick.path("in.parquet"), "--keep", "zz,x", output="out.parquet")
    schema = pq.read_schema(quick.path("out.parquet"))
    assert (schema.names[:2], schema.types[:2]) == (["zz", "x"], [pa.string(), pa.int8()])
    assert read(quick.path("out.parquet"))[0]["x"] == 5


def test_no_column_may_be_kept(quick):
    quick.write([{"prompt": "a"}])
    assert quick.run("--keep", "").code == 0
    assert list(quick.records()[0]) == ["completion", "finish_reason", "usage", "error"]


@pytest.mark.parametrize("output", TABLES)
def test_a_prefix_makes_room_for_columns_with_our_names(quick, output):
    quick.write([{"prompt": "a", "error": "mine", "usage": 3}, {"prompt": "b", "completion": "c"}])
    refused = quick.run(output=output)
    assert (refused.code, "'usage'" in refused.message, "--result-prefix" in refused.message) == (2, True, True)
    assert not quick.path(output).exists()
    assert quick.run("--result-prefix", "gen_", "--source", output=output).code == 0
    first, second = read(quick.path(output))
    assert (first["error"], first["usage"], second["completion"]) == ("mine", 3, "c")
    assert results(first, "gen_") == ("re:a", "stop", None)
    assert second["gen_source"] == {"file": "in.jsonl", "line": 2}


@pytest.mark.parametrize("output", TABLES)
def test_the_source_is_the_file_and_its_physical_line(quick, output):
    one = quick.write(["", {"prompt": "a"}, "", "{cut"], "a/in.jsonl")
    two = quick.write([{"prompt": "b"}], "b/in.jsonl")
    three = quick.path("c line 3 row.gz")
    three.write_bytes(gzip.compress(b'\n\n{"prompt": "c"}\n'))
    quick.run(one, two, three, "--source", output=output)
    sources = [(row["source"]["file"], row["source"]["line"]) for row in read(quick.path(output))]
    assert sources == [(str(one), 2), (str(one), 4), (str(two), 1), ("c line 3 row.gz", 3)]


def test_the_source_of_parquet_is_the_row_and_of_a_pipe_its_line(quick):
    pq.write_table(pa.table({"prompt": ["a", "b", "c"]}), quick.path("in.parquet"), row_group_size=2)
    quick.run(quick.path("in.parquet"), "--source")
    assert [row["source"] for row in quick.records()] == [{"file": "in.parquet", "line": n} for n in (1, 2, 3)]
    quick.run("-", "--source", output="piped.jsonl", stdin=b'\n{"prompt": "a"}\n')
    assert quick.records("piped.jsonl")[0]["source"] == {"file": "stdin", "line": 2}


def test_the_source_shows_no_credentials(quick):
    path = quick.write([{"prompt": "a"}], "a/in.jsonl")
    other = quick.write([{"prompt": "a"}], "b/in.jsonl")
    quick.run(f"file://{path}?token=verysecret", other, "--source")
    assert "verysecret" not in quick.path("out.jsonl").read_text()
    assert len({row["source"]["file"] for row in quick.records()}) == 2


# -- chats that go on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", TABLES)
@pytest.mark.parametrize("keep", [(), ("--keep", "id")])
def test_the_answer_is_added_to_the_chat(quick, output, keep):
    rows = [
        {"id": 1, "messages": chat("hi")},
        {"id": 2, "prompt": "text"},
        {"id": 3, "messages": chat("hi", "so", "~")},
        {"id": 4, "messages": []},
        "{cut",
    ]
    quick.write(rows)
    assert quick.run("--append-message", *keep, output=output).code == 3
    records = read(quick.path(output))
    assert [record.get("messages") for record in records] == [
        [*chat("hi"), {"role": "assistant", "content": "re:hi"}],
        None,
        chat("hi", "so", "~"),
        [],
        None,
    ]
    assert [results(record)[0] for record in records] == ["re:hi", "re:text", None, None, None]
    if keep:
        assert {tuple(record)[:2] for record in records} == {("id", "messages")}


@pytest.mark.parametrize("output", TABLES)
def test_the_answer_goes_to_the_column_that_the_chat_came_from(quick, output):
    quick.write([{"id": 1, "chat": chat("hi"), "messages": "mine"}])
    options = ("--append-message", "--messages-column", "chat", "--keep", "id")
    assert quick.run(*options, output=output).code == 0
    (record,) = read(quick.path(output))
    assert record["chat"] == chat("hi", "re:hi")
    assert "messages" not in record


def test_an_output_with_answers_in_another_column_is_repaired(quick):
    quick.write([{"chat": chat(f"hi {number}")} for number in range(6)])
    options = ("--append-message", "--messages-column", "chat")
    quick.run(*options)
    whole = quick.path("out.jsonl").read_bytes()
    quick.path("out.jsonl").write_bytes(whole[: len(whole) // 2])
    assert quick.run(*options).code == 0
    assert quick.path("out.jsonl").read_bytes() == whole


@pytest.mark.parametrize("output", TABLES)
def test_a_final_message_is_continued_in_place(quick, output):
    quick.write([{"messages": chat("q", "so ")}, {"messages": chat("q")}])
    assert quick.run("--append-message", "--continue-final-message", output=output).code == 3
    first, second = read(quick.path(output))
    assert first["messages"] == chat("q", "so re:so ")
    assert results(first)[0] == "re:so "
    assert (second["messages"], results(second)[2]) == (chat("q"), "invalid_messages")


def test_the_answer_has_the_form_of_the_chats_contents(quick):
    parts = [{"type": "text", "text": "hi"}]
    quick.write([{"messages": chat(parts)}, {"messages": chat(["hi"])}, {"messages": chat([])}])
    quick.run("--append-message")
    assert [row["messages"][-1] for row in quick.records()] == [
        {"role": "assistant", "content": [{"type": "text", "text": "re:hi"}]},
        {"role": "assistant", "content": ["re:hi"]},
        {"role": "assistant", "content": [{"type": "text", "text": "re:"}]},
    ]
    quick.write([{"messages": chat(parts, parts)}, {"messages": chat(parts, ["a", "b"])}], "more.jsonl")
    quick.run(quick.path("more.jsonl"), "--append-message", "--continue-final-message", output="more-out.jsonl")
    assert [row["messages"][-1]["content"] for row in quick.records("more-out.jsonl")] == [
        [{"type": "text", "text": "hire:hi"}],
        ["a", "bre:a\nb"],
    ]


def test_a_chat_that_is_none_is_left_alone_by_templates(quick):
    values = [["text"], "text", [], [None], [{"content": 3}]]
    quick.write([{"q": "a", "messages": value} for value in values])
    assert quick.run("--append-message", "--template", "{{ q }}").code == 0
    assert [row["messages"] for row in quick.records()][:4] == values[:4]


MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
PARTS = pa.list_(pa.struct([("type", pa.string()), ("text", pa.string())]))
DICTIONARY = pa.dictionary(pa.int8(), pa.string())


@pytest.mark.parametrize(
    ("kind", "message", "answer"),
    [
        (MESSAGE, {"role": "user", "content": "hi"}, "re:hi"),
        (
            pa.struct([("content", pa.large_string()), ("name", pa.string()), ("role", DICTIONARY)]),
            {"role": "user", "content": "hi", "name": "Ada"},
            "re:hi",
        ),
        (
            pa.struct([("role", pa.string()), ("content", PARTS), ("weight", pa.float32())]),
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "weight": 0.1},
            [{"type": "text", "text": "re:hi"}],
        ),
    ],
    ids=["text", "more fields", "parts"],
)
@pytest.mark.parametrize("list_of", [pa.list_, pa.large_list])
def test_the_answer_is_added_to_chats_of_parquet_in_their_own_type(quick, kind, message, answer, list_of):
    messages = pa.array([[message], None, [message]], list_of(kind))
    pq.write_table(pa.table({"messages": messages, "prompt": [None, "p", None]}), quick.path("in.parquet"))
    assert quick.run(quick.path("in.parquet"), "--append-message", output="out.parquet").code == 0
    table = pq.read_table(quick.path("out.parquet"))
    assert table.schema.field("messages").type == pq.read_schema(quick.path("in.parquet")).field("messages").type
    first, second, third = table.to_pylist()
    before, added = first["messages"]
    assert before == messages.to_pylist()[0][0]
    assert (added["role"], added["content"]) == ("assistant", answer)
    assert {added[name] for name in added if name not in ("role", "content")} <= {None}
    assert second["messages"] is None
    assert third["messages"] == first["messages"]


@pytest.mark.parametrize(
    "field", [pa.field("x", pa.timestamp("ns")), pa.field("x", pa.binary()), None], ids=["time", "bytes", "no content"]
)
def test_chats_of_parquet_that_cannot_take_an_answer_are_refused_before_the_model_loads(quick, field):
    kind = pa.struct([*MESSAGE, field]) if field else pa.struct([("role", pa.string()), ("tool_calls", pa.string())])
    pq.write_table(pa.table({"messages": pa.array([None], pa.list_(kind))}), quick.path("in.parquet"))
    quick.make_engine = lambda: pytest.fail("the model was loaded")
    outcome = quick.run(quick.path("in.parquet"), "--append-message", output="out.parquet")
    assert outcome.code == 2
    assert outcome.message.startswith("--append-message cannot add an answer to column 'messages', whose type is list<")
    assert outcome.message.endswith("write JSONL instead of Parquet")
    assert not quick.path("out.parquet.cbgen").exists()


@pytest.mark.parametrize("output", ["out.parquet", "parts/"])
def test_failed_chats_of_parquet_are_tried_again_and_columns_stay_exact(quick, output):
    times = pa.array([1700000000123456789 + number for number in range(9)], pa.timestamp("ns"))
    chats = [chat(f"q{number}~" if number % 4 == 0 else f"q{number}") for number in range(9)]
    pq.write_table(pa.table({"messages": chats, "time": times}), quick.path("in.parquet"))
    options = (quick.path("in.parquet"), "--append-message", "--format", "parquet", "--rows-per-part", "2")
    assert quick.run(*options, output=output).code == 3
    before = pq.read_table(quick.path(output))
    pq.write_table(pa.table({"messages": [chat(f"q{n}") for n in range(9)], "time": times}), quick.path("in.parquet"))
    assert quick.run(*options, "--retry-errors", output=output).code == 0
    assert sorted(quick.asked) == [f"[user]q{number}>" for number in (0, 4, 8)]
    after = pq.read_table(quick.path(output))
    assert after.schema.equals(before.schema)
    assert after.column("time").combine_chunks().equals(times)
    assert after.column("messages").to_pylist() == [chat(f"q{number}", f"re:q{number}") for number in range(9)]


def test_answers_are_not_added_where_there_are_several(quick):
    quick.write([{"messages": chat("hi")}])
    outcome = quick.run("--append-message", "--n", "2")
    assert (outcome.code, "does not go with --n" in outcome.message) == (2, True)


# -- samples and Batch lines ------------------------------------------------------------------------------------------


def test_rows_of_several_samples_hold_lists(quick):
    quick.write([{"prompt": p, "sampling_params": {"n": n}} for p, n in (("a", None), ("b", 1), ("c", 3))])
    assert quick.run("--token-ids").code == 0
    one, plain, three = quick.records()
    assert (results(one)[0], results(plain)[0]) == ("re:a", "re:b")
    assert results(three) == (["re:c", "re:c#1", "re:c#2"], ["stop"] * 3, None)
    assert [len(ids) for ids in three["token_ids"]] == [5, 7, 7]
    assert three["usage"]["completion_tokens"] == 19
    assert isinstance(one["token_ids"][0], int)


def test_a_table_of_several_samples_holds_lists_in_every_row(quick):
    rows = [{"prompt": p, "sampling_params": {"n": n}} for p, n in (("a", None), ("b", 1), ("c", 3))]
    quick.write([*rows, {"prompt": "~"}])
    assert quick.run("--token-ids", "--n", "2", output="out.parquet").code == 3
    records = read(quick.path("out.parquet"))
    assert [row["completion"] for row in records] == [
        ["re:a", "re:a#1"],
        ["re:b"],
        ["re:c", "re:c#1", "re:c#2"],
        None,
    ]
    assert [row["token_ids"] and list(map(len, row["token_ids"])) for row in records] == [[5, 7], [5], [5, 7, 7], None]
    assert [row["finish_reason"] for row in records] == [["stop"] * 2, ["stop"], ["stop"] * 3, None]


def test_a_table_of_single_samples_refuses_rows_of_more(quick):
    quick.write([{"prompt": "a"}, {"prompt": "c", "sampling_params": {"n": 3}}])
    assert quick.run(output="out.parquet").code == 3
    good, bad = read(quick.path("out.parquet"))
    assert results(good) == ("re:a", "stop", None)
    assert bad["error"]["code"] == "invalid_params"
    assert bad["error"]["message"] == "in.jsonl line 2: n=3 in a row needs --n above 1, or JSONL output"


BATCH = [
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1", "n": 2}},
    {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": chat("hi")}},
    {"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}},
    {"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "~"}},
]


@pytest.mark.parametrize("output", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "parts/"])
def test_batch_lines_are_answered_in_batch_form(quick, output):
    quick.write(BATCH)
    assert quick.run("--keep", "nothing", "--result-prefix", "x_", output=output).code == 3
    records = read(quick.path(output))
    assert [record["custom_id"] for record in records] == ["a", "b", "c", "d"]
    assert [choice["text"] for choice in records[0]["response"]["body"]["choices"]] == ["re:1", "re:1#1"]
    assert records[1]["response"]["body"]["choices"][0]["message"] == {"role": "assistant", "content": "re:hi"}
    assert [(r["response"]["status_code"], r["error"] and r["error"]["code"]) for r in records] == [
        (200, None),
        (200, None),
        (400, "invalid_request"),
        (500, "nan_logits"),
    ]


BROKEN_BATCH = [
    BATCH[0],
    "{cut",
    [1],
    {"custom_id": "only"},
    {**BATCH[1], "custom_id": None},
    {"method": "POST", "url": "/v1/completions", "body": {"prompt": "2"}},
    BATCH[1],
]


def is_batch_answer(record):
    return list(record) == ["id", "custom_id", "response", "error"] and "body" in record["response"]


def test_every_broken_line_of_a_batch_file_is_answered_in_batch_form(quick):
    quick.write(BROKEN_BATCH)
    with quick.path("in.jsonl").open("ab") as file:
        file.write(b'{"custom_id": "\xff"}\n')
    assert quick.run().code == 3
    records = quick.records()
    assert all(map(is_batch_answer, records))
    assert [(r["custom_id"], r["error"] and r["error"]["code"]) for r in records] == [
        ("a", None),
        (None, "invalid_json"),
        (None, "not_an_object"),
        ("only", "missing_prompt"),
        (None, "invalid_request"),
        (None, "invalid_request"),
        ("b", None),
        (None, "invalid_utf8"),
    ]


def test_a_batch_file_is_known_again_when_its_first_rows_are_behind(quick):
    quick.write([BATCH[0], *["{cut"] * 150])
    assert quick.run("--limit", "1").code == 0
    assert quick.run("--limit", "60").code == 3
    with quick.path("out.jsonl").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 5)
    assert quick.run().code == 3
    records = quick.records()
    assert len(records) == 151
    assert all(map(is_batch_answer, records))
    assert quick.run("--verify").code == 0


def test_a_trial_of_no_rows_knows_a_batch_file(quick):
    quick.write(["{cut", BATCH[0]])
    assert quick.run("--limit", "0").code == 0
    assert quick.run().code == 3
    assert all(map(is_batch_answer, quick.records()))


def test_broken_lines_of_a_batch_file_are_tried_again(quick):
    quick.write(["{cut", BATCH[1], {"custom_id": "only"}])
    assert quick.run().code == 3
    quick.write([BATCH[0], BATCH[1], {"custom_id": "only"}])
    assert quick.run("--retry-errors").code == 3
    records = quick.records()
    assert all(map(is_batch_answer, records))
    assert [(r["custom_id"], r["error"] and r["error"]["code"]) for r in records] == [
        ("a", None),
        ("b", None),
        ("only", "missing_prompt"),
    ]


def test_a_file_of_requests_without_custom_id_is_answered_in_batch_form(quick):
    quick.write([{name: value for name, value in line.items() if name != "custom_id"} for line in BATCH])
    assert quick.run().code == 3
    records = quick.records()
    assert all(map(is_batch_answer, records))
    assert {record["error"]["code"] for record in records} == {"invalid_request"}
    assert "custom_id is missing" in records[0]["error"]["message"]


def test_a_batch_line_far_behind_rows_of_another_form_does_not_change_theirs(quick):
    quick.write([*[{"prompt": "x"}] * 100, BATCH[0], "{cut"])
    assert quick.run().code == 3
    records = quick.records()
    assert is_batch_answer(records[100])
    assert records[101]["completion"] is None
    assert records[101]["error"]["code"] == "invalid_json"


def test_batch_lines_are_answered_flat_in_a_table(quick):
    quick.write(BATCH)
    assert quick.run("--n", "2", "--keep", "custom_id", output="out.parquet").code == 3
    records = read(quick.path("out.parquet"))
    assert [(record["custom_id"], *results(record)) for record in records] == [
        ("a", ["re:1", "re:1#1"], ["stop", "stop"], None),
        ("b", ["re:hi", "re:hi#1"], ["stop", "stop"], None),
        ("c", None, None, "invalid_request"),
        ("d", None, None, "nan_logits"),
    ]


def test_keys_that_arrow_adds_to_objects_of_a_batch_file_ask_for_nothing(quick):
    """Every object of a column has every key that one of them has; the others hold null."""
    bodies = [
        {"prompt": "1", "logit_bias": {"5": 1.0}, "response_format": {"type": "text"}},
        {"prompt": "2", "logit_bias": {"7": 1.0}, "n": 1},
        {"prompt": "3", "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"messages": chat("4"), "modalities": ["text"]},
    ]
    rows = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions" if "prompt" in body else "/v1/chat/completions",
            "body": body,
        }
        for number, body in enumerate(bodies)
    ]
    pq.write_table(pa.Table.from_pylist(rows), quick.path("in.parquet"))
    assert quick.run(quick.path("in.parquet")).code == 3
    records = quick.records()
    assert [(r["custom_id"], r["error"] and r["error"]["code"]) for r in records] == [
        ("0", None),
        ("1", None),
        ("2", "invalid_request"),
        ("3", None),
    ]
    assert sorted(quick.asked) == ["1", "2", "[user]4>"]


# -- Parquet to Parquet -----------------------------------------------------------------------------------------------

NUM_ROWS = 10
NESTED = pa.struct(
    [
        ("a", pa.list_(pa.struct([("b", pa.uint8()), ("t", pa.timestamp("ns", "UTC"))]))),
        ("n", pa.null()),
    ]
)
COLUMNS = {
    "int8": pa.array(range(NUM_ROWS), pa.int8()),
    "uint64": pa.array([2**64 - 1 - i for i in range(NUM_ROWS)], pa.uint64()),
    "float16": pa.array(np.arange(NUM_ROWS, dtype=np.float16)),
    "float32": pa.array([0.1 * i for i in range(NUM_ROWS)], pa.float32()),
    "nan": pa.array([float("nan"), float("inf"), -0.0, None] + [1.5] * 6),
    "timestamp ns": pa.array([1700000000123456789 + i for i in range(NUM_ROWS)], pa.timestamp("ns")),
    "timestamp ns UTC": pa.array([1700000000123456789 + i for i in range(NUM_ROWS)], pa.timestamp("ns", "UTC")),
    "timestamp us Berlin": pa.array(range(NUM_ROWS), pa.timestamp("us", "Europe/Berlin")),
    "timestamp far": pa.array([2**60 + i for i in range(NUM_ROWS)], pa.timestamp("us", "+01:30")),
    "date32": pa.array(range(NUM_ROWS), pa.date32()),
    "time64": pa.array(range(NUM_ROWS), pa.time64("ns")),
    "duration": pa.array(range(NUM_ROWS), pa.duration("ns")),
    "decimal128": pa.array([Decimal("12345678901234567890.123456789")] * NUM_ROWS, pa.decimal128(38, 9)),
    "decimal256": pa.array([Decimal("1" * 60)] * NUM_ROWS, pa.decimal256(76, 0)),
    "binary": pa.array([b"\x00\xff"] * NUM_ROWS),
    "fixed binary": pa.array([b"ab"] * NUM_ROWS, pa.binary(2)),
    "large binary": pa.array([b"\xff"] * NUM_ROWS, pa.large_binary()),
    "large string": pa.array(["x"] * NUM_ROWS, pa.large_string()),
    "bool": pa.array([True, None] * 5),
    "nested": pa.array([{"a": [{"b": 1, "t": datetime(2020, 1, 1)}], "n": None}, None] * 5, NESTED),
    "list of dictionaries": pa.array([["a"], ["b", None]] * 5, pa.list_(DICTIONARY)),
    "fixed list": pa.array([[1.0, 2.0]] * NUM_ROWS, pa.list_(pa.float32(), 2)),
    "large list": pa.array([[1], [], None, [2, 3], [None]] * 2, pa.large_list(pa.int16())),
    "map with a key twice": pa.array([[("k", 1), ("k", 2)]] * NUM_ROWS, pa.map_(pa.string(), pa.int32())),
    "map of numbers": pa.array([[(3, None)]] * NUM_ROWS, pa.map_(pa.int32(), pa.string())),
    "empty lists": pa.array([[]] * NUM_ROWS, pa.list_(pa.int64())),
    "uuid": pa.array([b"0123456789abcdef"] * NUM_ROWS, pa.uuid()),
}
VIEWS_IN_MAPS = pa.map_(pa.string_view(), pa.binary_view())
ONCE_PLAIN = {
    "dictionary": (pa.array(["a", "b"] * 5).dictionary_encode(), pa.string()),
    "string view": (pa.array(["x", None] * 5, pa.string_view()), pa.string()),
    "binary view": (pa.array([b"x", None] * 5, pa.binary_view()), pa.binary()),
    "list of views": (pa.array([["x", None], None] * 5, pa.list_(pa.string_view())), pa.list_(pa.string())),
    "views in maps": (pa.array([[("a", b"x")]] * 10, VIEWS_IN_MAPS), pa.map_(pa.string(), pa.binary())),
    "null": (pa.nulls(NUM_ROWS), pa.string()),
    "list view": (pa.array([[1], [2, 3], None, [], [4]] * 2, pa.list_view(pa.int32())), pa.list_(pa.int32())),
}


def write_table(quick, column, name="in.parquet", row_group_size=3):
    prompts = [f"p{number}" for number in range(len(column))]
    pq.write_table(pa.table({"x": column, "prompt": prompts}), quick.path(name), row_group_size=row_group_size)


@pytest.mark.parametrize("output", ["out.parquet", "parts/"])
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_parquet_keep_type_and_values_to_the_bit(quick, name, output):
    write_table(quick, COLUMNS[name])
    options = ("--format", "parquet", "--rows-per-part", "4")
    assert quick.run(quick.path("in.parquet"), *options, "--limit", "5", output=output).code == 0
    assert quick.run(quick.path("in.parquet"), *options, output=output).code == 0
    before, after = pq.read_table(quick.path("in.parquet")), pq.read_table(quick.path(output))
    assert after.schema.field("x").type == before.schema.field("x").type
    assert to_bytes(after.column("x")) == to_bytes(before.column("x"))
    assert after.column("completion").to_pylist() == [f"re:p{number}" for number in range(NUM_ROWS)]


@pytest.mark.parametrize("name", ONCE_PLAIN)
def test_ways_to_store_values_become_the_plain_type(quick, name):
    column, kind = ONCE_PLAIN[name]
    write_table(quick, column)
    assert quick.run(quick.path("in.parquet"), "--rows-per-part", "4", output="out.parquet").code == 0
    after = pq.read_table(quick.path("out.parquet")).column("x")
    assert after.type == kind
    assert after.to_pylist() == column.to_pylist()


def to_bytes(column):
    """Equal for equal values only, NaN and -0.0 included."""
    plain = pa.concat_arrays(column.chunks) if column.num_chunks else column
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": plain}), sink, compression="none", store_schema=False)
    return sink.getvalue().to_pybytes()


def test_shards_with_other_columns_in_another_order_share_one_schema(quick):
    one, two = quick.path("1.parquet"), quick.path("2.parquet")
    pq.write_table(pa.table({"prompt": ["a"], "x": pa.array([1], pa.int8()), "y": ["u"]}), one)
    second = {"y": pa.array(["v"], pa.large_string()), "x": pa.array([1000], pa.int32()), "prompt": ["b"], "z": [1.5]}
    pq.write_table(pa.table(second), two)
    assert quick.run(one, two, output="out.parquet").code == 0
    table = pq.read_table(quick.path("out.parquet"))
    assert table.schema.names[:4] == ["prompt", "x", "y", "z"]
    assert table.schema.types[:4] == [pa.string(), pa.int32(), pa.large_string(), pa.float64()]
    assert [tuple(row.values())[:5] for row in table.to_pylist()] == [
        ("a", 1, "u", None, "re:a"),
        ("b", 1000, "v", 1.5, "re:b"),
    ]


def test_types_that_cannot_share_a_column_are_refused_with_the_way_out(quick):
    one, two = quick.path("1.parquet"), quick.path("2.parquet")
    pq.write_table(pa.table({"prompt": ["a"], "x": [1]}), one)
    pq.write_table(pa.table({"prompt": ["b"], "x": ["text"]}), two)
    refused = quick.run(one, two, output="out.parquet")
    assert refused.code == 2
    assert "types that cannot share one Parquet column" in refused.message
    assert refused.message.endswith("leave it out with --keep, or write JSONL")
    assert quick.run(one, two, "--keep", "prompt", output="out.parquet").code == 0
    assert quick.run(one, two, output="out.jsonl").code == 0
    assert [row["x"] for row in quick.records()] == [1, "text"]


# -- JSONL to Parquet -------------------------------------------------------------------------------------------------


def test_what_later_rows_hold_beyond_the_declared_types_is_not_lost(quick):
    plain = {"x": 1, "l": [], "s": {}, "n": None, "big": 3, "f": 1.5, "m": {"a": 1}}
    rows = [{"prompt": f"p{number}", **plain} for number in range(150)]
    rows[120] |= {
        "x": "text",
        "l": [1],
        "s": {"a": 1},
        "n": 5,
        "big": 2**70,
        "f": 2**60 + 1,
        "m": {"b": 2},
        "new": [{}],
    }
    rows[121] |= {"x": None, "l": ["a", None], "n": "text", "f": 2, "m": {}, "extra_columns": "mine"}
    quick.write(rows)
    assert quick.run("--rows-per-part", "40", output="out.parquet").code == 0
    table = pq.read_table(quick.path("out.parquet"))
    assert {name: str(table.schema.field(name).type).replace(" ", "") for name in ("x", "l", "n", "f", "m")} == {
        "x": "int64",
        "l": "list<element:string>",
        "n": "string",
        "f": "double",
        "m": "struct<a:int64>",
    }
    assert [row_as_written(row, rows[number]) for number, row in enumerate(table.to_pylist())] == rows
    assert table.column("extra_columns")[119].as_py() == '{"s":{}}'


def row_as_written(record, row):
    """The input's row again: a table knows no missing keys, so those that were missing are taken out."""
    extras = json.loads(record.pop("extra_columns") or "{}")
    found = {**record, **extras}
    found = {name: found[name] for name in row}
    return {**found, "m": {key: found["m"][key] for key in row["m"]}}


def test_a_column_that_the_extras_need_is_refused_with_the_way_out(quick):
    quick.write([{"prompt": "a", "extra_columns": 1}])
    outcome = quick.run(output="out.parquet")
    assert (outcome.code, "rename it, or leave it out with --keep" in outcome.message) == (2, True)
    assert quick.run("--keep", "prompt", output="out.parquet").code == 0
    assert quick.run(output="out.jsonl").code == 0


def test_whole_numbers_of_any_size_survive(quick):
    quick.write([f'{{"prompt": "a", "x": {x}}}' for x in (2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, "-0.0")])
    for output in TABLES:
        assert quick.run(output=output).code == 0
    assert [row["x"] for row in quick.records()] == [2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, -0.0]
    extras = [json.loads(row["extra_columns"])["x"] for row in read(quick.path("out.parquet"))]
    assert extras == [2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, -0.0]


# -- more rows later --------------------------------------------------------------------------------------------------


def ids(rows):
    return [row["id"] for row in rows]


@pytest.mark.parametrize("output", FORMS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_input_without_rows_gives_an_output_without_rows(quick, output, kind):
    path = quick.write([])
    if kind == "parquet":
        path = quick.path("in.parquet")
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    for _ in range(2):
        outcome = quick.run(path, output=output)
        assert outcome.code == 0
        assert "the input holds no rows" in outcome.stderr
        assert read(quick.path(output)) == []
    if output.endswith(".parquet"):
        assert "completion" in pq.read_schema(quick.path(output)).names


@pytest.mark.parametrize("output", FORMS)
@pytest.mark.parametrize("limits", [(3, 7, 7, 8, None), (5, 2, None), (0, 12, 4)])
def test_a_higher_limit_goes_on_and_a_lower_one_changes_nothing(quick, output, limits):
    quick.write([{"prompt": f"p{number}", "id": number} for number in range(12)])
    done = 0
    for limit in limits:
        options = () if limit is None else ("--limit", limit)
        assert quick.run(*options, "--rows-per-part", "4", output=output).code == 0
        fresh = max(0, (12 if limit is None else limit) - done)
        assert len(quick.asked) == fresh
        done += fresh
        if done:
            assert ids(read(quick.path(output))) == list(range(done))


@pytest.mark.parametrize("output", FORMS)
def test_an_input_that_grows_is_continued(quick, output):
    for size, fresh in itertools.pairwise((0, 0, 3, 4, 5, 9, 9, 17)):
        quick.write([{"prompt": f"p{number}", "id": number} for number in range(1, fresh + 1)])
        assert quick.run("--rows-per-part", "4", output=output).code == 0
        assert len(quick.asked) == fresh - size
        rows = read(quick.path(output))
        assert [row["completion"] for row in rows] == [f"re:p{number}" for number in range(1, fresh + 1)]
        assert ids(rows) == list(range(1, fresh + 1))


def test_columns_are_declared_from_rows_beyond_the_limit(quick):
    quick.write([{"prompt": "a", "x": None}, {"prompt": "b"}, {"prompt": "c", "x": 1, "y": [1.5]}])
    for limit in (0, 1, 3):
        assert quick.run("--limit", limit, output="out.parquet").code == 0
        schema = pq.read_schema(quick.path("out.parquet"))
        assert [(name, str(schema.field(name).type)) for name in schema.names[:3]] == [
            ("prompt", "string"),
            ("x", "int64"),
            ("y", "list<element: double>"),
        ]


def test_parts_hold_fixed_row_ranges_and_full_ones_never_change(quick):
    parts = quick.path("parts")
    quick.write([{"prompt": f"p{number}", "id": number} for number in range(6)])
    quick.run("--rows-per-part", "4", output="parts/")
    assert sorted(path.name for path in parts.glob("part-*")) == ["part-000000.jsonl", "part-000001.jsonl"]
    first = identity(parts / "part-000000.jsonl")
    quick.write([{"prompt": f"p{number}", "id": number} for number in range(9)])
    quick.run("--rows-per-part", "4", output="parts/")
    assert [ids(read(path)) for path in sorted(parts.glob("part-*"))] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert identity(parts / "part-000000.jsonl") == first


def identity(path):
    """What writing changes; reading changes the time of access alone."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize("output", FORMS[:4])
def test_a_file_may_go_on_with_another_number_of_rows_per_part(quick, output):
    for num_rows, per_part in ((6, 4), (8, 3), (12, 100), (13, 1), (20, 4)):
        quick.write([{"prompt": f"p{number}", "id": number} for number in range(num_rows)])
        assert quick.run("--rows-per-part", per_part, output=output).code == 0
        assert ids(read(quick.path(output))) == list(range(num_rows))


def test_a_directory_may_not(quick):
    quick.write([{"prompt": "p"}] * 6)
    quick.run("--rows-per-part", "4", output="parts/")
    outcome = quick.run("--rows-per-part", "3", output="parts/")
    assert outcome.code == 4
    assert "output.rows_per_part: 4 before, 3 now" in outcome.message


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "output", "code", "says"),
    [
        ((), "out.csv", 2, "the output can be .jsonl, .jsonl.gz, .jsonl.zst, .parquet, or a directory of those"),
        ((), "out.jsonl.bz2", 2, "the output can be .jsonl"),
        (("--format", "parquet"), "-", 2, "-o - writes plain JSONL; name a file for --format parquet"),
        (("--format", "csv"), "out", 2, "'csv' is not one of 'jsonl', 'jsonl.gz', 'jsonl.zst', 'parquet'"),
        (("--rows-per-part", "0"), "parts/", 2, "0 is not in the range x>=1"),
        (("--verify",), "-", 2, "--verify does not go with -o -"),
        (("--retry-errors",), "-", 2, "--retry-errors does not go with -o -"),
        (("--overwrite",), "-", 2, "--overwrite does not go with -o -"),
        (("--json",), "-", 2, "--json does not go with -o -"),
        (("--verify",), "out.jsonl", 4, "was not written by cbgen"),
        ((), "in.jsonl", 4, "in.jsonl itself; choose another output"),
        ((), "in.jsonl/out.jsonl", 2, "Not a directory"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence_and_leaves_nothing_behind(quick, options, output, code, says):
    quick.write([{"prompt": "a"}])
    before = sorted(quick.directory.rglob("*"))
    outcome = quick.run(*options, output=output)
    assert (outcome.code, outcome.stdout) == (code, "")
    assert says in outcome.message
    assert "\n" not in outcome.message
    assert sorted(quick.directory.rglob("*")) == before


# -- parts of every form ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_parts_of_every_form(quick, form):
    quick.write([{"prompt": f"p{number}", "id": number} for number in range(7)])
    assert quick.run("--format", form, "--rows-per-part", "3", output="parts/").code == 0
    parts = sorted(quick.path("parts").glob("part-*"))
    assert [path.name for path in parts] == [f"part-{number:06d}.{form}" for number in range(3)]
    assert [ids(read(path)) for path in parts] == [[0, 1, 2], [3, 4, 5], [6]]
    assert quick.run("--format", form, "--rows-per-part", "3", "--verify", output="parts/").code == 0
