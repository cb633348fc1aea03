"""Everything that can go wrong, in one tree.

Two kinds. *Exceptions* end the run; each class carries the exit code the command returns. *Row errors* end one row;
they are data (`RowError`), written in the row's place, and never raised past the stage that found them.

    CbgenError          1   failed, resumable: I/O, a dead thread, an internal fault
      UsageError        2   option or setting out of range
      InputError        2   the input as a whole cannot be used
        BrokenInputError  1   it broke off in the middle; what was read is finished and kept
      RefusedError      4   settings or input changed, output locked or not ours
      ModelError        5   model not found, not supported, does not fit
      Stopped          75   stopped by a signal; running the same command again continues
"""

from __future__ import annotations

from dataclasses import dataclass

EXIT_OK = 0
EXIT_ROW_ERRORS = 3
EXIT_SECOND_SIGNAL = 130


class CbgenError(Exception):
    """Base: the message says what happened and what to do next."""

    exit_code = 1


class UsageError(CbgenError):
    """An option or setting is out of range, or two of them exclude each other."""

    exit_code = 2


class InputError(CbgenError):
    """The input as a whole cannot be used (missing, wrong form, clashing column names)."""

    exit_code = 2


class BrokenInputError(InputError):
    """The input cannot be read to its end; rows before the break are finished, and a whole file continues."""

    exit_code = 1


class RefusedError(CbgenError):
    """Going on would mix two jobs in one output, or destroy something."""

    exit_code = 4


class ModelError(CbgenError):
    """The model cannot be found, is not supported, or does not fit."""

    exit_code = 5


class Stopped(CbgenError):
    """A signal or a limit asked the run to stop; what is finished is committed."""

    exit_code = 75

    def __init__(self, message: str, exit_code: int = 75) -> None:
        super().__init__(message)
        self.exit_code = exit_code


ROW_ERROR_CODES = {
    "invalid_json": "the line is not valid JSON",
    "invalid_utf8": "the line, or a text in it, is not valid UTF-8",
    "line_too_long": "the line has more than 64 MiB",
    "not_an_object": "the line is valid JSON but not an object",
    "missing_prompt": "the row has no column to take a prompt from",
    "wrong_type": "a column has a type that cannot be a prompt",
    "column_clash": "the row has a column with the name of a result field",
    "invalid_messages": "`messages` is not a list of {role, content} objects",
    "invalid_params": "a sampling parameter of the row is unknown or out of range",
    "invalid_request": "an OpenAI Batch line is incomplete or names an unknown url",
    "no_chat_template": "the row is a chat and the tokenizer has no chat template",
    "template_error": "the template raised an error for this row",
    "tokenizer_error": "the tokenizer failed on this row",
    "token_out_of_range": "a token id lies outside the model's vocabulary",
    "empty_prompt": "the prompt has no tokens",
    "prompt_too_long": "the prompt leaves no room to generate in the context",
    "kv_never_fits": "the row needs more KV cache than there is in all",
    "nan_logits": "the model produced NaN or infinite logits for this row",
    "out_of_memory": "the row does not fit into memory, even alone",
    "engine_error": "the model failed on this row, and only on it",
}
"""The closed list of row error codes, with what each means. The README's table is tested against it."""


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one row has no completion. `code` is a key of `ROW_ERROR_CODES`; `message` names the place and the fix."""

    code: str
    message: str

    def __post_init__(self) -> None:
        assert self.code in ROW_ERROR_CODES, f"unknown row error code {self.code!r}"


class RowFailure(Exception):
    """Carries a `RowError` out of nested parsing code; caught where the row is handled, never shown to users."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = RowError(code, message)


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
