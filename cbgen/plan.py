"""What a run amounts to before its model is loaded: inputs, model files, parameters, fingerprint. `Plan` is all of it.

Enters: a `RunConfig`. Leaves: a `Plan`, or the first thing that cannot be right. No torch, nothing written.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import asdict, dataclass
from typing import Any

from cbgen.config import RunConfig
from cbgen.data.addresses import redact
from cbgen.data.openai import is_batch_line
from cbgen.data.readers import Source, check_inputs, read_rows
from cbgen.data.rendering import check_prompt_config
from cbgen.engine.model_files import ModelFiles, find_model, model_identity, sampling_defaults
from cbgen.errors import ModelError, UsageError
from cbgen.output.encoders import Encoder, declare_encoder, restore_encoder
from cbgen.output.formats import RecordFormat
from cbgen.output.resume import PEEK_ROWS
from cbgen.params import SamplingParams, merge_params
from cbgen.records import Row

# Not every name with "token" in it: templates have an `eos_token`.
_SECRET_NAME = re.compile(
    r"(?:api|access|secret|private)[_-]?key|(?:auth|access|api|bearer|hf)[_-]?token|^token$|password|passwd|credential"
    r"|secret",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run's resolved facts."""

    config: RunConfig
    sources: list[Source]
    files: ModelFiles
    params: SamplingParams
    fingerprint: dict[str, Any]

    def signatures(self) -> list[Any]:
        """What tells at a glance whether the inputs are the same files as before."""
        return [source.signature() for source in self.sources]

    @property
    def is_table(self) -> bool:
        """Whether the output has columns of fixed types."""
        return self.config.output.resolved_format == "parquet"

    def encoder(self, first_rows: list[Row]) -> Encoder:
        """What turns lines into the output's form, declared from the input or its first rows.

        Raises:
            InputError: the columns of the input cannot be declared.
        """
        columns = [row.columns for row in self._whole(first_rows) if row.error is None]
        return declare_encoder(self.config.output, self.sources, columns, self.params.n)

    def is_batch_file(self, first_rows: list[Row]) -> bool:
        """Whether the input is an OpenAI Batch file: some of its first rows is a request."""
        return any(is_batch_line(row.columns) for row in self._whole(first_rows))

    def _whole(self, first_rows: list[Row]) -> list[Row]:
        """A trial of a few rows, or of none, is to decide what the whole run would."""
        if self.config.limit is None or any(source.is_stream for source in self.sources):
            return first_rows
        return list(itertools.islice(read_rows(self.sources), PEEK_ROWS))

    def unknown_columns(self, first_rows: list[Row]) -> list[str]:
        """Columns to be kept that none of these rows has."""
        known = {name for row in first_rows for name in row.columns}
        return [name for name in self.config.output.keep or () if name not in known] if first_rows else []

    def restored_encoder(self, description: dict[str, Any]) -> Encoder:
        """The encoder of the run that is continued."""
        return restore_encoder(self.config.output, self.sources, description)

    def record_format(self, encoder: Encoder, *, is_batch_file: bool) -> RecordFormat:
        """How records of this run look."""
        return RecordFormat(
            self.config.output,
            self.files.description,
            continues_message=self.config.prompt.continue_final_message,
            is_table=self.is_table,
            is_batch_file=is_batch_file,
            num_samples=self.params.n,
            carries_columns=not encoder.takes_from_input,
        )

    def settings(self) -> dict[str, Any]:
        """What was asked for and resolved so far, for people and for the summary."""
        config = self.config
        return {
            "inputs": list(config.inputs),
            "output": config.output.path,
            "limit": config.limit,
            "model": {**asdict(config.model), "path": str(self.files.directory)},
            "prompt": asdict(config.prompt),
            "sampling": self.params.as_dict(),
            "engine": asdict(config.engine) | {"disabled": sorted(config.engine.disabled)},
            "output_options": asdict(config.output),
            "stop": asdict(config.stop),
        }


def make_plan(config: RunConfig) -> Plan:
    """Resolve what can be resolved without the model.

    Raises:
        UsageError, InputError, ModelError: what is wrong with options, inputs or the model's files.
    """
    if config.output.append_message and config.sampling.get("n", 1) != 1:
        raise UsageError("--append-message adds one answer to each chat; it does not go with --n")
    check_prompt_config(config.prompt)
    sources = check_inputs(config.inputs, exclude=(config.output.path,))
    try:
        files = find_model(config.model.name, config.model.revision)
    except OSError as error:
        raise ModelError(f"--model {config.model.name}: {error.strerror or error}") from error
    params = resolve_params(config.sampling, sampling_defaults(files))
    return Plan(config, sources, files, params, _fingerprint(config, params, files))


def resolve_params(given: dict[str, Any], model_defaults: dict[str, Any]) -> SamplingParams:
    """The run's sampling parameters: what was given, over what the model asks for, over our defaults.

    Raises:
        UsageError: a value is out of range.
    """
    try:
        return merge_params(SamplingParams(), {**model_defaults, **given})
    except ValueError as error:
        raise UsageError(str(error)) from error


def _fingerprint(config: RunConfig, params: SamplingParams, files: ModelFiles) -> dict[str, Any]:
    """Every setting that decides what the output is. What only decides how fast it comes, is not in it."""
    fields = {"model": model_identity(files), "dtype": config.model.dtype, "max_model_len": config.engine.max_model_len}
    fields |= {f"prompt.{name}": value for name, value in asdict(config.prompt).items()}
    fields |= {f"sampling.{name}": value for name, value in params.as_dict().items()}
    output = config.output
    fields |= {
        f"output.{name}": getattr(output, name)
        for name in ("token_ids", "result_prefix", "keep", "append_message", "source")
    }
    fields["output.format"] = output.resolved_format
    if output.path.endswith("/"):
        fields["output.rows_per_part"] = output.rows_per_part
    return dict(redacted(fields))


def redacted(value: Any) -> Any:
    """A JSON value without credentials in any of its texts, and with bytes that are no UTF-8 spelled out."""
    if isinstance(value, str):
        return redact(value.encode("utf-8", "backslashreplace").decode())
    if isinstance(value, dict):
        return {
            redacted(key): "***" if isinstance(item, str) and _SECRET_NAME.search(str(key)) else redacted(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return value
