"""A job in miniature: what `pipeline.run` does with an output, without a model, for every kind of output."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen import pipeline
from cbgen.config import ModelConfig, OutputConfig, ReportConfig, RunConfig
from cbgen.data.lines import dumps, loads
from cbgen.data.readers import check_inputs, read_rows
from cbgen.data.sources import Source
from cbgen.errors import RowError
from cbgen.job import Serving
from cbgen.output.encoders import CODECS, Encoder, declare_encoder, restore_encoder
from cbgen.output.formats import RecordFormat
from cbgen.output.journal import Record
from cbgen.output.retry import RetryWriter
from cbgen.output.sidecar import Sidecar
from cbgen.output.state import State
from cbgen.output.tape import all_lines
from cbgen.output.writers import OrderedWriter
from cbgen.records import Completion, Row
from tests.fakes import FakeEngine
from tests.helpers import BYTE_VOCAB_SIZE, EOS, ByteTokenizer, byte_ids, make_row

FINGERPRINT = {"model": "m", "temperature": 0.5}
SIGNATURES = [[1, 2]]

Answer = Callable[[Row], Completion | RowError]


def answer(row: Row) -> Completion | RowError:
    if row.index % 5 == 3:
        return RowError("empty_prompt", f"row {row.index}: nothing")
    return Completion(f"answer {row.index} " + "x" * (row.index % 7), "stop", row.index, 2, [1, 2])


def long_answer(row: Row) -> Completion:
    return Completion("redone and longer than it was before " * 3, "stop", 1, 1, [1])


def mended_answer(row: Row) -> Completion | RowError:
    """Of a second try: some rows that failed are good now."""
    return answer(row) if row.index % 2 else Completion(f"mended {row.index}", "stop", 1, 3, [7])


def rows_of(count: int, **columns: Any) -> list[Row]:
    return [make_row(index, prompt=f"p{index}", **columns) for index in range(count)]


def config_for(directory: Path, name: str = "out.jsonl", **options: Any) -> OutputConfig:
    return OutputConfig(path=f"{directory}/{name}", **options)


def sidecar_of(config: OutputConfig) -> Path:
    return Path(config.path) / "_cbgen" if config.path.endswith("/") else Path(config.path + ".cbgen")


def saved_state(config: OutputConfig) -> State:
    return State.from_json((sidecar_of(config) / "state.json").read_bytes())


def read(config: OutputConfig) -> bytes:
    return Path(config.path).read_bytes()


def record_format(config: OutputConfig, encoder: Encoder | None = None) -> RecordFormat:
    return RecordFormat(
        config,
        "m",
        is_table=config.resolved_format == "parquet",
        carries_columns=encoder is None or not encoder.takes_from_input,
    )


def record_of(row: Row, config: OutputConfig, give: Answer = answer, encoder: Encoder | None = None) -> Record:
    return record_format(config, encoder).record(row, give(row))


def output_of(rows: list[Row], config: OutputConfig, give: Answer = answer) -> bytes:
    return b"".join(record_of(row, config, give).payload + b"\n" for row in rows)


# -- kinds of outputs -------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "jsonl": {"name": "out.jsonl"},
    "gzip": {"name": "out.jsonl.gz"},
    "zstd": {"name": "out.jsonl.zst"},
    "parquet": {"name": "out.parquet", "rows_per_part": 3},
    "carried": {"name": "out.parquet", "rows_per_part": 3},
    "jsonl-parts": {"name": "out/", "rows_per_part": 3},
    "zstd-parts": {"name": "out/", "rows_per_part": 3, "format": "jsonl.zst"},
    "parquet-parts": {"name": "out/", "rows_per_part": 3, "format": "parquet"},
    "carried-parts": {"name": "out/", "rows_per_part": 3, "format": "parquet"},
}
"""Every kind of local output; "carried" has Parquet input, whose columns are taken over."""


class Mini:
    """Rows, the sources they come from (none, or one Parquet file), and an output of some kind."""

    def __init__(self, directory: Path, kind: str, num_rows: int) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.config = config_for(directory, **KINDS[kind])
        self.sources: list[Source] = []
        self.all_rows = rows_of(num_rows, n=7)
        if kind.startswith("carried"):
            path = directory / "in.parquet"
            columns = {"prompt": [f"p{i}" for i in range(num_rows)], "when": pa.array(range(num_rows), pa.date32())}
            pq.write_table(pa.table(columns), path, row_group_size=4)
            self.sources = check_inputs((str(path),))
            self.all_rows = list(read_rows(self.sources))

    def rows(self, count: int | None = None) -> list[Row]:
        return self.all_rows[:count]

    def prepared(self, sidecar: Sidecar) -> Encoder:
        """The output's encoder, declared or restored."""
        description = sidecar.details().get("encoder")
        if description is not None:
            encoder = restore_encoder(self.config, self.sources, description)
        else:
            encoder = declare_encoder(self.config, self.sources, [row.columns for row in self.all_rows[:3]], 1)
        sidecar.output.prepare(encoder)
        return encoder

    def work(
        self,
        *,
        count: int | None = None,
        seed: int = 0,
        give: Answer = answer,
        generated: list[int] | None = None,
        stop_after: int | None = None,
        commit_share: float = 0.4,
    ) -> list[int]:
        """See the function `work`."""
        generated = [] if generated is None else generated
        rng = random.Random(seed)
        with Sidecar.open(self.config, ()) as sidecar:
            sidecar.check_fingerprint(FINGERPRINT)
            encoder = self.prepared(sidecar)
            state = sidecar.repair(sidecar.read_state())
            sidecar.begin(FINGERPRINT, {"encoder": encoder.describe()})
            with OrderedWriter(sidecar, state, SIGNATURES) as writer:
                missing = [row for row in self.rows(count)[state.rows :] if not writer.recovered(row)]
                rng.shuffle(missing)
                put_all(
                    writer,
                    missing[:stop_after],
                    lambda row: record_of(row, self.config, give, encoder),
                    generated,
                    rng,
                    commit_share,
                )
                if stop_after is None:
                    writer.finish()
        return generated

    def retry(
        self, give: Answer = mended_answer, *, seed: int = 0, generated: list[int] | None = None, goes_on: bool = True
    ) -> list[int]:
        """Generate the rows anew that are errors, as `--retry-errors` does, and go on with what follows."""
        generated = [] if generated is None else generated
        rng = random.Random(seed)
        with Sidecar.open(self.config, ()) as sidecar:
            encoder = self.prepared(sidecar)
            state = sidecar.repair(sidecar.read_state())
            failed = frozenset(
                index for index, line in enumerate(sidecar.output.lines(state)) if loads(line)["error"] is not None
            )
            with RetryWriter(sidecar, state, failed) as writer:
                missing = [row for row in self.rows() if row.index in failed and not writer.recovered(row)]
                rng.shuffle(missing)
                put_all(writer, missing, lambda row: record_of(row, self.config, give, encoder), generated, rng, 0.5)
                state = writer.finish()
            if not goes_on:
                return generated
            with OrderedWriter(sidecar, state, SIGNATURES) as ordered:
                ordered.finish()
        return generated

    def decoded(self) -> list[dict[str, Any]]:
        """Every row of the output, in the order of its files."""
        return decoded(self.config)


def decoded(config: OutputConfig) -> list[dict[str, Any]]:
    """Every row of a finished output."""
    path = Path(config.path)
    files = sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]
    if config.resolved_format == "parquet":
        return [row for file in files for row in pq.read_table(file).to_pylist()]
    codec = CODECS[config.resolved_format]
    return [loads(line) for file in files for line in all_lines(file, codec)]


def work(
    config: OutputConfig,
    rows: list[Row],
    *,
    seed: int = 0,
    give: Answer = answer,
    generated: list[int] | None = None,
    fingerprint: dict[str, Any] = FINGERPRINT,
    stop_after: int | None = None,
    commit_share: float = 0.4,
) -> list[int]:
    """What `pipeline.run` does with a JSONL output: recover it, generate what is missing in some order, commit now and
    then. Returns (and fills in as it goes) the indices of the rows that were generated and flushed.
    """
    generated = [] if generated is None else generated
    rng = random.Random(seed)
    with Sidecar.open(config, ()) as sidecar:
        sidecar.check_fingerprint(fingerprint)
        state = sidecar.repair(sidecar.read_state())
        sidecar.begin(fingerprint, {})
        with OrderedWriter(sidecar, state, SIGNATURES) as writer:
            missing = [row for row in rows[state.rows :] if not writer.recovered(row)]
            rng.shuffle(missing)
            put_all(
                writer, missing[:stop_after], lambda row: record_of(row, config, give), generated, rng, commit_share
            )
            if stop_after is None:
                writer.finish()
    return generated


def put_all(
    writer: OrderedWriter | RetryWriter,
    rows: list[Row],
    record: Callable[[Row], Record],
    generated: list[int],
    rng: random.Random,
    commit_share: float,
) -> None:
    """Give every row to the writer, note it as generated, and commit after some."""
    for row in rows:
        writer.put(row, record(row))
        writer.flush()
        generated.append(row.index)
        if rng.random() < commit_share:
            writer.commit()


@contextlib.contextmanager
def opened(config: OutputConfig, state: State = State()) -> Iterator[OrderedWriter]:
    """A writer of a new output."""
    with Sidecar.open(config, ()) as sidecar:
        sidecar.begin(FINGERPRINT, {})
        with OrderedWriter(sidecar, state, SIGNATURES) as writer:
            yield writer


class Command:
    """`pipeline.run` on the rows and outputs of a `Mini`, with an engine that answers "re:" and the prompt; prompts
    with a `~` fail.

    Attributes:
        asked: prompts that the last run asked the engine.
        fails: whether prompts with a `~` do.
    """

    def __init__(self, directory: Path, kind: str, prompts: list[str]) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "model").mkdir(exist_ok=True)
        (directory / "model" / "config.json").write_text("{}")
        self.directory = directory
        self.kind = kind
        self.asked: list[str] = []
        self.fails = True
        self.input = directory / ("in.parquet" if kind.startswith("carried") else "in.jsonl")
        self.write(prompts)

    def write(self, prompts: list[str]) -> None:
        """The input."""
        if self.input.suffix == ".parquet":
            ids = pa.array(range(len(prompts)), pa.int16())
            pq.write_table(pa.table({"id": ids, "prompt": prompts}), self.input, row_group_size=4)
        else:
            self.input.write_bytes(b"".join(dumps({"id": i, "prompt": p}) + b"\n" for i, p in enumerate(prompts)))

    @property
    def output(self) -> OutputConfig:
        return config_for(self.directory, **KINDS[self.kind])

    @property
    def files(self) -> list[Path]:
        """Everything the run wrote."""
        paths = [*self.directory.glob("out*"), *self.directory.glob("out*/**/*"), *self.directory.glob(".out*")]
        return sorted({path for path in paths if path.is_file() and path.name != "lock"})

    def run(self, *, verify: bool = False, limit: int | None = None, **options: Any) -> int:
        """The exit code.

        Raises:
            CbgenError: what the command would have told.
        """
        self.asked = []
        config = RunConfig(
            inputs=(options.pop("source", str(self.input)),),
            output=replace(self.output, **options),
            model=ModelConfig(name=str(self.directory / "model")),
            report=ReportConfig(progress="none"),
            limit=limit,
            verify=verify,
        )
        return pipeline.run(config, self._serving)

    def _serving(self, *_: Any) -> Serving:
        return Serving(ByteTokenizer(), FakeEngine(self._answer, vocab_size=BYTE_VOCAB_SIZE))  # type: ignore[arg-type]

    def _answer(self, prompt_token_ids: Any, sample: int) -> tuple[list[int], str]:
        prompt = ByteTokenizer().decode([int(token_id) for token_id in prompt_token_ids])
        self.asked.append(prompt)
        if "~" in prompt and self.fails:
            return [], "nan_logits"
        return [*byte_ids(f"re:{prompt}"), EOS], "stop"

    def decoded(self) -> list[dict[str, Any]]:
        """Every row of the output; messages without the directory."""
        rows = decoded(self.output)
        for row in rows:
            if row["error"] is not None:
                row["error"]["message"] = row["error"]["message"].replace(str(self.directory), "")
        return rows
