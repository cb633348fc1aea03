"""What one run was asked to do: frozen values, composed, with no behaviour beyond their own checks.

`cli.py` builds a `RunConfig` from flags, environment and file; `pipeline.run` reads it. Values the run resolves later
(model defaults, memory) go into new objects, never back into these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from cbgen.errors import UsageError

OnTooLong = Literal["error", "truncate-left"]
RESULT_FIELDS = ("completion", "finish_reason", "usage", "error", "token_ids")


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
    """Limits of the engine; None is chosen from the model and the device. `kv_cache_memory` is in bytes."""

    batching: Literal["continuous", "static"] = "continuous"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_cache_memory: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.max_num_seqs and self.max_num_batched_tokens and self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}: "
                "each running row needs one token a step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """Where completions go and what a record holds."""

    path: str
    overwrite: bool = False
    token_ids: bool = False
    result_prefix: str = ""

    def field(self, name: str) -> str:
        """A result field's name in the output."""
        return self.result_prefix + name

    @property
    def result_fields(self) -> tuple[str, ...]:
        names = RESULT_FIELDS if self.token_ids else RESULT_FIELDS[:-1]
        return tuple(map(self.field, names))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything one `cbgen run` was asked for.

    Attributes:
        inputs: files in order, or `-` for stdin.
        limit: take only the first so many rows.
        sampling: sampling parameters given by flag, environment or file; the model's own defaults come beneath.
        progress_seconds: interval of progress lines where there is no terminal.
    """

    inputs: tuple[str, ...]
    output: OutputConfig
    model: ModelConfig = ModelConfig()
    prompt: PromptConfig = PromptConfig()
    engine: EngineConfig = EngineConfig()
    sampling: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    progress_seconds: float = 30.0
