"""JSONL as it comes: a local file that grows, or standard output."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from cbgen.config import OutputConfig
from cbgen.errors import CbgenError, UsageError
from cbgen.output.base import Output, free_backup_path, same_file
from cbgen.output.encoders import CODECS
from cbgen.output.state import State
from cbgen.output.tape import (
    Mark,
    Tape,
)


class LinesOutput(Output):
    """A local JSONL file."""

    def __init__(self, config: OutputConfig) -> None:
        path = Path(config.path)
        directory = Path(config.state_dir) if config.state_dir else path.with_name(path.name + ".cbgen")
        codec = CODECS[config.resolved_format]
        super().__init__(config, directory, Tape(path, codec, directory / "marks"))

    def holds_something(self) -> bool:
        return self.tape.path.exists() and self.tape.path.stat().st_size > 0

    def back_up(self) -> None:
        if self.tape.path.exists():
            os.replace(self.tape.path, free_backup_path(self.tape.path))

    def is_input(self, path: str) -> bool:
        return same_file(self.tape.path, path)


class StdoutOutput(Output):
    """Standard output: in order, once, and gone. The journal lives in a temporary directory."""

    is_lasting = False

    def __init__(self, config: OutputConfig) -> None:
        directory = Path(tempfile.mkdtemp(prefix="cbgen-"))
        super().__init__(config, directory, Tape(directory / "unused"))
        self.path = "stdout"
        self._pending: list[bytes] = []
        self._rows = 0

    def holds_something(self) -> bool:
        return False

    def back_up(self) -> None:
        """Nothing to keep."""

    def open(self, state: State) -> None:
        if sys.stdout is None:
            raise CbgenError("stdout is closed; name a file with -o")

    def append(self, lines: list[bytes]) -> None:
        self._pending += lines

    def sync(self) -> Mark:
        """Pass everything on.

        Raises:
            CbgenError: the reader went away.
        """
        if self._pending:
            data = b"".join([line + b"\n" for line in self._pending])
            self._rows += len(self._pending)
            self._pending = []
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                with contextlib.suppress(OSError):  # or the interpreter complains about it on its way out
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise CbgenError("the reader of stdout went away") from None
            except OSError as error:
                raise CbgenError(f"cannot write to stdout: {error.strerror}; a run to stdout starts anew") from error
        return Mark(self._rows)

    def close(self) -> None:
        """Nothing to close."""

    def verify(self, state: State) -> None:
        raise UsageError("--verify needs an output file")
