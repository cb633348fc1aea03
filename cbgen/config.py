"""What one run was asked to do: frozen values, composed, with no behaviour beyond their own checks.

`cli.py` builds a `RunConfig` from flags, environment and file; `pipeline.run` reads it. Values the run resolves later
(model defaults, memory) go into new objects, never back into these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from cbgen.errors import UsageError

OnTooLong = Literal["error", "truncate-left"]
OutputFormat = Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]
Order = Literal["file", "longest", "auto"]
OPTIMIZATIONS = {
    "native": "operators compiled for this CPU; without it plain torch",
    "fusion": "projections, norms and activations of a layer joined",
    "packing": "weights kept in the layout that the matrix product reads",
    "triton": "CUDA: kernels of our own; without them plain torch",
    "graphs": "CUDA: decode steps replayed as graphs; without it each operator is launched",
    "mixed": "prompts read in the steps in which other rows decode; without it one or the other",
    "prefix-cache": "prompts that begin alike are read once",
    "prediction": "rows admitted by the length they will have, not by the longest they could have",
}
OPTIMIZED_DEVICES = {"native": "cpu", "packing": "cpu", "triton": "cuda", "graphs": "cuda"}
"""Names of `OPTIMIZATIONS` that matter on one kind of device only."""
_FORMATS_BY_SUFFIX: dict[str, OutputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".gz": "jsonl.gz",
    ".zst": "jsonl.zst",
    ".zstd": "jsonl.zst",
}
RESULT_FIELDS = ("completion", "finish_reason", "usage", "error", "token_ids", "source")


@dataclass(frozen=True, slots=True)
class ErrorAllowance:
    """How many rows may be errors: a count, or a fraction of all rows.

    >>> ErrorAllowance.parse("10")
    ErrorAllowance(count=10, fraction=None)
    >>> ErrorAllowance.parse("1%")
    ErrorAllowance(count=0, fraction=0.01)
    """

    count: int = 0
    fraction: float | None = None

    @classmethod
    def parse(cls, text: str) -> ErrorAllowance:
        """A whole number is a count; a number with a point or a percent sign is a fraction.

        Raises:
            ValueError: neither.
        """
        text = text.strip()
        try:
            if not text.endswith("%") and "." not in text:
                value = cls(int(text))
            else:
                value = cls(0, float(text[:-1]) / 100 if text.endswith("%") else float(text))
        except ValueError:
            value = cls(-1)
        if not 0 <= value.count < 2**63 or not 0 <= (value.fraction or 0) <= 1:
            raise ValueError(f"{text!r} is neither a count such as 10 nor a fraction such as 0.01 or 1%")
        return value

    def allows(self, num_errors: int, num_rows: int) -> bool:
        """Whether so many errors among so many rows are fine."""
        limit = self.count if self.fraction is None else self.fraction * num_rows
        return num_errors <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    name: str = "demo"
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig:
    """How a row becomes a prompt. Templates are the text, not the path."""

    template: str | None = None
    prompt_column: str = "prompt"
    messages_column: str = "messages"
    system: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    on_too_long: OnTooLong = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of the engine; None is chosen from the model and the device. `kv_cache_memory` is in bytes.

    Attributes:
        order: in which rows are admitted; rows come out in input order whatever it is.
        disabled: names out of `OPTIMIZATIONS` that are switched off, to compare or to work around a fault.
        decode_steps: how many decode steps may be launched before the host has seen what came of them. 0 looks at
            each step before it schedules the next, with no state on the device. None is chosen by the device.
    """

    order: Order = "auto"
    disabled: frozenset[str] = frozenset()
    batching: Literal["continuous", "static"] = "continuous"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_cache_memory: int | None = None
    decode_steps: int | None = None

    def __post_init__(self) -> None:
        unknown = sorted(self.disabled - OPTIMIZATIONS.keys())
        if unknown:
            raise UsageError(f"--disable {unknown[0]}: no such optimization; there are {', '.join(OPTIMIZATIONS)}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.decode_steps is not None and not 0 <= self.decode_steps <= 64:
            raise UsageError(f"--decode-steps must be between 0 and 64, not {self.decode_steps}")
        if self.max_num_seqs and self.max_num_batched_tokens and self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}: "
                "each running row needs one token a step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """Where completions go and what a record holds.

    Attributes:
        path: a file, `-` for stdout, a directory (of parts), or the URI of one.
        format: of the file or the parts; None is told from the name, and JSONL parts in a directory.
        rows_per_part: of a directory of parts.
        state_dir: where the sidecar is; None is beside the output, or in the working directory for an object store.
        retry_errors: generate the rows again that are errors in the output.
        keep: columns of the input that are carried through; None for all.
        append_message: add the answer to the row's own chat, as a message of the assistant.
        messages_column: where that chat is.
        source: add the file and the line that a row came from.
    """

    path: str
    format: OutputFormat | None = None
    rows_per_part: int = 10_000
    state_dir: str | None = None
    overwrite: bool = False
    retry_errors: bool = False
    keep: tuple[str, ...] | None = None
    append_message: bool = False
    messages_column: str = "messages"
    source: bool = False
    token_ids: bool = False
    result_prefix: str = ""

    def __post_init__(self) -> None:
        if self.rows_per_part < 1:
            raise UsageError(f"--rows-per-part must be at least 1, not {self.rows_per_part}")
        clash = next((name for name in self.keep or () if name in self.result_fields), None)
        if clash is not None:
            raise UsageError(
                f"--keep {clash}: the output has a result field of this name; set --result-prefix so that result "
                "fields get other names"
            )
        if self.retry_errors and self.overwrite:
            raise UsageError("--retry-errors and --overwrite exclude each other")

    @property
    def resolved_format(self) -> OutputFormat:
        """The format asked for, or the one that the name tells; JSONL for stdout and directories."""
        if self.format is not None:
            return self.format
        name = self.path.lower()
        return next((form for suffix, form in _FORMATS_BY_SUFFIX.items() if name.endswith(suffix)), "jsonl")

    @property
    def carried(self) -> tuple[str, ...] | None:
        """Columns that are carried through, None for all: those of `keep`, and the chat that an answer is added to."""
        if self.keep is None or not self.append_message or self.messages_column in self.keep:
            return self.keep
        return (*self.keep, self.messages_column)

    def field(self, name: str) -> str:
        """A result field's name in the output."""
        return self.result_prefix + name

    @property
    def result_fields(self) -> tuple[str, ...]:
        """Names of all result fields in the output, in order."""
        asked = {"token_ids": self.token_ids, "source": self.source}
        return tuple(self.field(name) for name in RESULT_FIELDS if asked.get(name, True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConfig:
    """When a run ends before its input does.

    Attributes:
        max_seconds: of wall time, loading included.
        max_output_tokens: generated by this run.
        grace_seconds: after a first signal, or at a limit, rows in flight may still finish for so long.
        fail_fast: stop as soon as more rows are errors than allowed.
        fail_on_error: how many rows may be errors in a run that counts as good.
    """

    max_seconds: float | None = None
    max_output_tokens: int | None = None
    grace_seconds: float = 5.0
    fail_fast: bool = False
    fail_on_error: ErrorAllowance = ErrorAllowance()

    def __post_init__(self) -> None:
        if self.fail_fast and self.fail_on_error.fraction is not None:
            raise UsageError("--fail-fast stops at a number of errors; give --fail-on-error as a count with it")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """How a run tells about itself.

    Attributes:
        progress: `auto` is a live line on a terminal and plain lines elsewhere.
        progress_seconds: interval of plain lines.
        json: records on stdout, one line each.
        github: step summary and annotations; None is when GitHub Actions runs this.
    """

    progress: Literal["auto", "bar", "plain", "none"] = "auto"
    progress_seconds: float = 30.0
    json: bool = False
    github: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything one `cbgen run` was asked for.

    Attributes:
        inputs: files in order, or `-` for stdin.
        limit: take only the first so many rows.
        verify: only compare the output with its state.
        sampling: sampling parameters given by flag, environment or file; the model's own defaults come beneath.
    """

    inputs: tuple[str, ...]
    output: OutputConfig
    model: ModelConfig = ModelConfig()
    prompt: PromptConfig = PromptConfig()
    engine: EngineConfig = EngineConfig()
    sampling: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    verify: bool = False
    stop: StopConfig = StopConfig()
    report: ReportConfig = ReportConfig()
