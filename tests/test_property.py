"""Whatever bytes come in: one clean refusal and no output, or one strict JSON line per row, in order, for good.

Examples are made by hypothesis: 2,000 of them, the same each time, or as many new ones as CBGEN_EXAMPLES says
(`make fuzz`). The rows of an input are counted here once more, in the plainest way.
"""

import base64
import contextlib
import gzip
import io
import json
import math
import os
import sys
import tempfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen import cli, pipeline
from cbgen.config import ModelConfig, OutputConfig, PromptConfig, ReportConfig, RunConfig
from cbgen.errors import ROW_ERROR_CODES, BrokenInputError, CbgenError
from cbgen.job import Serving
from tests.fakes import FakeEngine
from tests.fuzzing import fuzz
from tests.helpers import BYTE_VOCAB_SIZE, EOS, ByteTokenizer

SHARED_MEMORY = "/dev/shm"
BOM = b"\xef\xbb\xbf"
BAD_LINES = ("invalid_json", "invalid_utf8", "not_an_object", "line_too_long")
FORMS = ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "out.parquet", "parts/", "parquet-parts/"]
RESULTS = ("completion", "finish_reason", "usage", "error")
EXIT_CODES = (0, 1, 2, 3, 4, 5, 75, 130)


# -- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputFile:
    """`text` is what the file holds once decompressed, as far as that is certain; `rows` the rows of Parquet.
    Of a `sound` file nothing may be refused.
    """

    data: bytes
    text: bytes | None = None
    rows: int | None = None
    sound: bool = False

    def expected_ids(self) -> list[object] | None:
        """One item per row: its id, or None where it has none. None when nobody can say."""
        if self.text is None:
            return None if self.rows is None else [None] * self.rows
        lines = [_without_boms(line) for line in self.text.split(b"\n")]
        return [_row_id(line) for line in lines if line.strip(b" \t\r\v\f")]


def _without_boms(line):
    while line.startswith(BOM):
        line = line.removeprefix(BOM)
    return line


def _row_id(line):
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value.get("id") if isinstance(value, dict) else None


@dataclass(frozen=True)
class Example:
    files: list[InputFile]
    output: dict
    prompt: dict
    limit: int | None = None
    by_command: bool = False
    from_stdin: bool = False
    break_at: int | None = None  # the step in which the engine of a first run fails
    cut_at: int | None = None  # where the output is cut off in the end, and has to be made whole again
    retry: bool = False  # rows that failed are generated again in the end, and fail again
    form: str = "out.jsonl"

    def expected_ids(self):
        ids = []
        for file in self.files:
            expected = file.expected_ids()
            if expected is None:
                return None
            ids += expected
        return ids if self.limit is None else ids[: self.limit]


NUMBERS = [0, -1, 1.5, math.nan, math.inf, -math.inf, 2**63, 2**64, -(2**63) - 1, 10**30, 1e308, 5e-324, -0.0, 10**400]
TEXTS = [
    "",
    " ",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "é",
    "\u2028",
    "\x85",
    "😀",
    "\ufeff",
    "\r",
    "x" * 70,
    "</s>",
    "{{ id }}",
]
COLUMNS = ["prompt", "messages", "sampling_params", "completion", "error", "usage", "custom_id", "body", "url", "x", ""]
PARAMS = [
    "max_tokens",
    "temperature",
    "n",
    "stop",
    "seed",
    "top_k",
    "top_p",
    "min_tokens",
    "logit_bias",
    "logprobs",
    "x",
]
URLS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]

text = st.one_of(st.text(max_size=8), st.sampled_from(TEXTS))
scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 300), st.sampled_from(NUMBERS), text)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=4
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": text}), max_size=3
)
params = st.dictionaries(
    st.sampled_from(PARAMS), st.integers(0, 5) | values | st.just({"5": -100, "70": 3}), max_size=3
)
prompts = st.one_of(text, text, st.lists(st.integers(-1, 280), max_size=5), values)
native_rows = st.one_of(
    st.fixed_dictionaries({"prompt": prompts}),
    st.fixed_dictionaries({"messages": messages | values}),
    st.fixed_dictionaries({"prompt": text, "sampling_params": params | values}),
    st.dictionaries(st.sampled_from(COLUMNS), values, max_size=3),
)
bodies = st.one_of(
    st.builds(lambda source, more: {**source, **more}, st.fixed_dictionaries({"messages": messages}), params),
    st.builds(lambda source, more: {**source, **more}, st.fixed_dictionaries({"prompt": prompts}), params),
    values,
)
batch_rows = st.fixed_dictionaries(
    {"custom_id": text | values, "url": st.sampled_from(URLS) | values, "body": bodies},
    optional={"method": st.just("POST") | values},
)
good_rows = st.one_of(
    st.fixed_dictionaries({"prompt": st.text(st.characters(codec="utf-8"), min_size=1, max_size=10)}),
    st.fixed_dictionaries(
        {"prompt": st.sampled_from(["a", "b c"]), "sampling_params": st.just({"max_tokens": 3, "n": 2})}
    ),
)


def as_line(row, *, ascii_only):
    return json.dumps(row, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass").replace(b"\n", b"")


def corrupt(line, position, how, byte):
    position %= len(line) + 1
    if how == "cut":
        return line[:position]
    if how == "insert":
        return line[:position] + byte + line[position:]
    return line[:position] + byte + line[position + 1 :]


rows = st.one_of(native_rows, native_rows, native_rows, batch_rows, values)
row_lines = st.builds(lambda row, ascii_only: (row, ascii_only), rows, st.booleans())
raw_lines = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(
        [b"", b" ", b"\t\x0b", b"\0", b'{"prompt": 1e400}', b'{"prompt": "a", "x": -}', b'{"prompt": "a"}}']
    ),
    st.builds(lambda depth: b'{"x": ' + b"[" * depth + b"]" * depth + b"}", st.sampled_from([200, 300, 1100, 20_000])),
    st.builds(lambda depth: b'{"a":' * depth + b"1" + b"}" * depth, st.sampled_from([249, 250, 251, 1030])),
    st.builds(lambda digits: b'{"prompt": "a", "x": ' + b"7" * digits + b"}", st.sampled_from([19, 20, 400, 5000])),
)
corruptions = st.tuples(
    st.integers(0, 300), st.sampled_from(["cut", "insert", "replace"]), st.binary(min_size=1, max_size=2)
)
line_ends = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b" \n", b"\r\r\n", b"\n \r\n"])


@st.composite
def jsonl(draw, kinds=("row", "row", "row", "corrupt", "raw")):
    parts = []
    for number in range(draw(st.integers(0, 7))):
        kind = draw(st.sampled_from(kinds))
        if kind == "raw":
            line = draw(raw_lines)
        else:
            row, ascii_only = draw(row_lines if kind != "good" else st.tuples(good_rows, st.booleans()))
            line = as_line({**row, "id": number} if isinstance(row, dict) else row, ascii_only=ascii_only)
            if kind == "corrupt":
                line = corrupt(line, *draw(corruptions))
        parts += (line, draw(line_ends))
    if parts and draw(st.booleans()):
        parts.pop()
    return draw(st.sampled_from([b"", b"", b"", BOM])) + b"".join(parts)


def damaged(data, damage):
    """(data, whether it is still whole)"""
    how, position, byte = damage
    position %= max(len(data), 1)
    if how == "cut":
        return data[:position]
    if how == "zeros":
        return data[:position] + bytes(len(data) - position)
    if how == "garbage":
        return data + byte
    return data[:position] + byte + data[position + 1 :]


damages = st.tuples(
    st.sampled_from(["cut", "zeros", "garbage", "flip"]), st.integers(0, 5000), st.binary(min_size=1, max_size=3)
)


@st.composite
def compressed(draw):
    content = draw(jsonl())
    cut = draw(st.integers(0, len(content))) if draw(st.booleans()) else len(content)
    pack = draw(st.sampled_from([lambda data: gzip.compress(data, 1, mtime=0), zstd]))
    data = pack(content[:cut]) + (pack(content[cut:]) if cut < len(content) else b"")
    if draw(st.booleans()):
        return InputFile(damaged(data, draw(damages)))
    return InputFile(data, content)


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


parquet_columns = st.sampled_from(
    [
        (pa.string(), st.text(st.characters(codec="utf-8"), max_size=6)),
        (pa.large_string(), st.just("b")),
        (pa.binary(), st.binary(max_size=5)),
        (pa.list_(pa.int64()), st.lists(st.integers(-1, 300), max_size=4)),
        (
            pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
            st.just([{"role": "user", "content": "q"}]),
        ),
        (pa.float64(), st.floats(width=64)),
        (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
        (pa.timestamp("ns"), st.integers(-(2**63), 2**63 - 1)),
        (pa.map_(pa.string(), pa.int32()), st.just([("k", 1)])),
    ]
)


@st.composite
def parquet(draw):
    size = draw(st.integers(0, 5))
    names = draw(st.lists(st.sampled_from([*COLUMNS[:5], "x"]), max_size=3, unique=True))
    columns = {}
    for name in ["prompt", *names]:
        kind, items = draw(parquet_columns)
        columns[name] = pa.array(draw(st.lists(st.none() | items, min_size=size, max_size=size)), kind)
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, row_group_size=draw(st.sampled_from([1, 3, 100])))
    if draw(st.integers(0, 3)) == 0:
        return InputFile(damaged(sink.getvalue(), draw(damages)))
    return InputFile(sink.getvalue(), rows=size)


def plain(data, *, sound=False):
    """A file of this text; what begins like something else is of no certain content."""
    return InputFile(data, None if data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1")) else data, sound=sound)


files = st.one_of(
    jsonl().map(plain),
    jsonl().map(plain),
    jsonl(kinds=("good",)).map(lambda data: plain(data, sound=True)),
    jsonl(kinds=("good", "good", "good", "row", "corrupt")).map(plain),
    st.binary(max_size=60).map(plain),
    st.lists(native_rows, max_size=3).map(lambda items: plain(json.dumps(items).encode("utf-8", "surrogatepass"))),
    st.tuples(jsonl(kinds=("good",)), st.sampled_from(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-7"])).map(
        lambda pair: plain(pair[0].decode("utf-8-sig").encode(pair[1]))
    ),
    compressed(),
    parquet(),
)
outputs = st.fixed_dictionaries(
    {},
    optional={
        "result_prefix": st.sampled_from(["x_", "", "prompt"]),
        "keep": st.sampled_from([("id",), ("id", "x"), ("id", "nothing")]),
        "token_ids": st.just(True),
        "source": st.just(True),
        "append_message": st.just(True),
    },
)
prompt_settings = st.one_of(
    st.just({}),
    st.just({}),
    st.just({}),
    st.sampled_from(
        [
            {"template": "{{ prompt }}"},
            {"template": "{{ x.y[0] }} {{ prompt * 99999999 }}"},
            {"on_too_long": "truncate-left"},
            {"prompt_column": "x"},
            {"messages_column": "prompt", "continue_final_message": True},
            {"system": "be brief"},
        ]
    ),
)
examples = st.builds(
    Example,
    st.one_of(st.tuples(files), st.tuples(files), st.tuples(files, files), st.tuples(files, files, files)).map(list),
    outputs,
    prompt_settings,
    st.one_of(st.none(), st.none(), st.integers(0, 6)),
    st.integers(0, 7).map(lambda number: number == 5),
    st.booleans(),
    st.one_of(st.none(), st.none(), st.integers(1, 6)),
    st.one_of(st.none(), st.none(), st.integers(0, 2000)),
    st.integers(0, 5).map(lambda number: number == 5),
    st.sampled_from([FORMS[0]] * 6 + FORMS),
)


# -- runs -------------------------------------------------------------------------------------------------------------


def answer(prompt_token_ids, sample):
    """Some bytes of the prompt, in another order: half characters, specials and all. Now and then, a failure."""
    last = int(prompt_token_ids[-1])
    if last % 37 == 5:
        return [], "nan_logits"
    token_ids = [int(token_id) for token_id in prompt_token_ids[::-2][: last % 5]]
    return ([*token_ids, EOS], "stop") if (last + sample) % 2 else (token_ids or [last], "length")


def make_serving(config, files, note):
    return Serving(ByteTokenizer(bos=True), FakeEngine(answer, vocab_size=BYTE_VOCAB_SIZE, slots=3))


class EngineFailure(CbgenError):
    pass


class BreakingEngine(FakeEngine):
    """Fails in its step number `num_steps_left`."""

    num_steps_left = 0

    def step(self):
        self.num_steps_left -= 1
        if self.num_steps_left == 0:
            raise EngineFailure("the engine failed, as it was told to")
        return super().step()


def breaking_serving(num_steps):
    engine = BreakingEngine(answer, vocab_size=BYTE_VOCAB_SIZE, slots=3)
    engine.num_steps_left = num_steps
    return lambda config, files, note: Serving(ByteTokenizer(bos=True), engine)


class Folder:
    """A directory for one example."""

    def __init__(self, path, example):
        self.example = example
        self.output = str(path / example.form) + "/" * example.form.endswith("/")
        self.model = path / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.inputs = [path / f"in-{number}.jsonl" for number in range(len(example.files))]
        for target, file in zip(self.inputs, example.files, strict=True):
            target.write_bytes(file.data)

    def config(self, *, retry):
        example = self.example
        return RunConfig(
            inputs=tuple(map(str, self.inputs)),
            output=OutputConfig(
                path=self.output,
                format="parquet" if "parquet" in example.form else None,
                rows_per_part=3,
                retry_errors=retry,
                **example.output,
            ),
            model=ModelConfig(name=str(self.model)),
            prompt=PromptConfig(**example.prompt),
            limit=example.limit,
            report=ReportConfig(progress="none"),
        )

    def run(self, serving=make_serving, *, retry=False):
        """(exit code, error or None)"""
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                return pipeline.run(self.config(retry=retry), serving), None
            except CbgenError as error:
                return error.exit_code, error

    def command(self):
        """(exit code, stderr) of the same as a command line"""
        example = self.example
        inputs = ["-"] if example.from_stdin and len(self.inputs) == 1 else [str(path) for path in self.inputs]
        arguments = ["run", *inputs, "-o", self.output, "--model", str(self.model)]
        arguments += ["--rows-per-part", "3", *(["--format", "parquet"] if "parquet" in example.form else [])]
        for name, value in {**example.output, **example.prompt, "limit": example.limit}.items():
            if value is not None:
                option = "--" + name.replace("_", "-")
                text_value = ",".join(value) if isinstance(value, tuple) else str(value)
                arguments += [option] if value is True else [option, text_value]
        errors, records = io.StringIO(), io.StringIO()
        with (
            self.inputs[0].open() as stdin,
            mock.patch.object(sys, "stdin", stdin),
            mock.patch.object(pipeline, "_load", make_serving),
            contextlib.redirect_stderr(errors),
            contextlib.redirect_stdout(records),
            pytest.raises(SystemExit) as exit_,
        ):
            cli.main(arguments)
        assert records.getvalue() == ""
        return exit_.value.code, errors.getvalue()

    def written(self):
        """The output, file by file; None when there is none."""
        path = Path(self.output)
        if self.output.endswith("/"):
            return {item.name: item.read_bytes() for item in path.glob("part-*")} or None
        return {path.name: path.read_bytes()} if path.exists() else None


def contents(written):
    """What is the same whenever a run was broken off: JSONL lines decompressed, result columns of Parquet."""
    parts = []
    for name in sorted(written or {}):
        data = written[name]
        if data[:4] == b"PAR1":
            table = pq.ParquetFile(io.BytesIO(data)).read()
            assert len(set(table.column_names)) == table.num_columns, f"columns twice in {table.column_names}"
            ends = ((end, column) for column in table.column_names for end in RESULTS if column.endswith(end))
            names = list(dict(ends).values())  # the last one of each: ours come behind the input's own
            parts += [list(row.values()) for row in table.select(names).to_pylist()]
        else:
            parts += unpacked(name, data).split(b"\n")[:-1]
    return parts


def unpacked(name, data):
    if name.endswith(".gz"):
        return gzip.decompress(data)
    return pa.input_stream(io.BytesIO(data), compression="zstd").read() if name.endswith(".zst") else data


@contextlib.contextmanager
def folder(example):
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None) as name:
        yield Folder(Path(name), example)


def check(example):
    """The property itself; returns how the run ended."""
    with folder(example) as place:
        if example.by_command:
            return check_command(example, place)
        code, error = place.run()
        written = place.written()
        check_outcome(example, code, error, written)
        assert (place.run()[0], place.written()) == (code, written), "the second run differs"
        if written:
            check_repair(place, code, written)
            check_broken_run(place, code, written)
        return type(error).__name__ if error else ("rows" if contents(written) else "nothing")


def check_outcome(example, code, error, written):
    if error is not None:
        assert_sentence(str(error))
        assert not must_run(example), error
    if error is not None and not isinstance(error, BrokenInputError):
        assert code in (2, 4), error
        assert written is None, f"refused with {error}, but wrote an output"
    elif error is None:
        check_records(example, written, whole=True)
    elif written is not None:
        check_records(example, written, whole=False)


def check_repair(place, code, written):
    """Rows that failed are tried again; an output that was cut off is made whole. Both end in what was there before."""
    example = place.example
    if example.retry:
        assert place.run(retry=True)[0] == code
        assert contents(place.written()) == contents(written), "trying failed rows again changed the output"
        written = place.written()
    data = written.get(example.form)
    if data and example.cut_at is not None and "jsonl" in example.form:
        Path(place.output).write_bytes(data[: example.cut_at % len(data)])
        assert place.run()[0] == code
        assert contents(place.written()) == contents(written), "an output that was cut off is not repaired"


def check_broken_run(place, code, written):
    if place.example.break_at is None:
        return
    place.output = place.output.replace(place.example.form, f"broken-{place.example.form}")
    broken, error = place.run(breaking_serving(place.example.break_at))
    assert isinstance(error, EngineFailure) or broken == code
    assert place.run()[0] == code
    assert contents(place.written()) == contents(written), "a run that was broken off ends in another output"


def check_command(example, place):
    code, errors = place.command()
    written = place.written()
    assert code in EXIT_CODES
    assert "Traceback" not in errors
    assert code in (0, 3) or not must_run(example), errors
    assert code in (0, 1, 3) or written is None, errors
    if written is not None:
        check_records(example, written, whole=code != 1)
    again, errors = place.command()
    assert (again, place.written()) == (code, written), f"the second run differs: {errors}"
    return f"command {code}"


def must_run(example):
    return all(file.sound for file in example.files) and not example.prompt and "keep" not in example.output


def assert_sentence(message):
    assert message.strip()
    assert "\n" not in message
    assert len(message) < 1500


def check_records(example, written, *, whole):
    ids = example.expected_ids()
    lines = contents(written)
    if whole and ids is not None:
        assert len(lines) == len(ids)
    if "parquet" in example.form:
        return
    records = [json.loads(line.decode("utf-8"), parse_constant=refuse_constant) for line in lines]
    prefix = example.output.get("result_prefix", "")
    for number, record in enumerate(records):
        error = record["error"] if "response" in record else record[f"{prefix}error"]
        assert error is None or (error["code"] in ROW_ERROR_CODES and error["message"])
        if "response" not in record and ids is not None and whole:
            check_columns(record, ids[number], error)


def check_columns(record, row_id, error):
    """A row that could be read has its own id, so it stands where it belongs."""
    if type(row_id) is int and (error is None or error["code"] not in BAD_LINES):
        assert record.get("id") == row_id


def refuse_constant(name):
    raise AssertionError(f"bare {name} in the output")


def test_any_input_gives_a_refusal_or_a_record_for_each_row():
    seen = Counter()

    @fuzz(2000, report_multiple_bugs=False)
    @given(examples)
    def run_examples(example):
        seen[check(example)] += 1

    run_examples()
    total = seen.total()
    assert seen["rows"] > total / 4
    assert seen["command 0"] + seen["command 3"] > 0
    assert seen["BrokenInputError"] > 0
    assert seen["InputError"] > 0


def line_file(*lines):
    return plain(b"".join(line + b"\n" for line in lines))


def parquet_bytes():
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["a", "b"]}), sink)
    return sink.getvalue()


PARQUET = parquet_bytes()


def table_bytes(table):
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


# Two row groups, one of which gives no row although the footer counts one.
MISCOUNTED = zlib.decompress(
    base64.b85decode(
        "c-nQ6K}!Nb7>2)@Vlr4lrCDZR4|{3opq7<F(dAn)jEYo{=qQU=2itA6>?EDSpV2?)*6-"
        "_^Rg<z_*xliM=Y8fI*e15ia$PzydnvhuJb>8dU?oB3rCT63D}@wZ6?Q35^yG3BZ~Ar{XN&{&w`6|N-"
        "%xAtAHXJQyo%6;3MerQ?|Or-"
        "B*WR^O2kPth)3X3syzctI=TWPs~3snE_YwtS7we(=I4aEKx2U=0iDm`lpsPIut!pbn+(;!QoTQ^6ZegoPiCg<_u#8!u_RB3JZ01+"
        "v~sZBzP>q`T}r*PJ*z{sYT-;5h+_=;c!t==T0ixI0P)H$YKZ5lvHX(i_SKoMI<`mshUKK(U{1z*J>40Mze_XSre-"
        ")e9)*q8qLSvI{J5JuKJ`Y$Fpi7eB#FlUb1xa*M-To%wX|O<YtN%=elUP0{W)Jjx?l|"
    )
)

FOUND = {
    "failed rows tried again, with a broken file behind --limit": Example(
        [line_file(b"{"), InputFile(b"\x1f\x8b")], {}, {}, limit=1, retry=True
    ),
    "a column nested deeper than a schema of Parquet may be": Example(
        [line_file(b'{"prompt": "a", "x": ' + b"[" * 120 + b"]" * 120 + b"}")], {}, {}, form="out.parquet"
    ),
    "a result field to keep from an input that has no such column": Example(
        [line_file(b'{"prompt": "a"}')], {"keep": ("error",)}, {}, form="out.parquet"
    ),
    "a finished output of gzip members, run again": Example(
        [line_file(b'{"prompt": "a"}')], {}, {}, form="out.jsonl.gz"
    ),
    "a finished output of zstd frames, run again": Example(
        [line_file(b'{"prompt": "a"}')], {}, {}, form="out.jsonl.zst"
    ),
    "a setting with half a character, as from a command line that is not UTF-8": Example(
        [line_file(b'{"prompt": "a"}')], {}, {"system": "be \udc80 brief"}
    ),
    "pages of Parquet zeroed: Arrow's message has several lines": Example(
        [InputFile(PARQUET[:4] + bytes(30) + PARQUET[34:])], {}, {}
    ),
    "a table without rows that has a result field's column": Example(
        [
            InputFile(
                table_bytes(pa.table({"prompt": pa.array([], pa.string()), "completion": pa.array([], pa.int8())}))
            )
        ],
        {},
        {},
        form="out.parquet",
    ),
    "a request with a result field's column": Example(
        [
            line_file(
                b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}, "error": 1}'
            )
        ],
        {},
        {},
        form="out.parquet",
    ),
    "a byte order mark that is a whole line": Example([line_file(b'{"prompt": "a", "id": 0}', BOM)], {}, {}),
    "a row group with fewer rows than its footer counts": Example([InputFile(MISCOUNTED)], {}, {}),
    "a column of Parquet with a name that is not UTF-8": Example(
        [InputFile(PARQUET.replace(b"prompt", b"\x80rompt"))], {}, {}
    ),
}
"""Examples that once broke the property."""


@pytest.mark.parametrize("example", FOUND.values(), ids=FOUND)
def test_what_was_found_before(example):
    check(example)
