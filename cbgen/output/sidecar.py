"""The directory beside an output: lock, fingerprint, and how far the output is committed.

    out.jsonl                   rows 0..rows-1, then perhaps a tail that is not committed
    out.jsonl.cbgen/lock        held while a run writes here
                    run.json    written once: format version, fingerprint, settings, versions, declared columns
                    state.json  how far the output is committed; replaced atomically
                    wal-*.jsonl the journal
                    marks       safe prefixes of the tape, published: finished files and their checksums
                    summary.json

For a directory of parts it is `_cbgen` in that directory, for an object store `NAME.cbgen` in the working directory.
`Sidecar.open` locks, `check_fingerprint` refuses another job, `repair` brings the output to its committed state,
`begin` makes it ours. Nothing is written or changed before `begin`, except that repair.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from cbgen.config import OutputConfig
from cbgen.data.addresses import redact
from cbgen.data.lines import dumps, loads
from cbgen.errors import CbgenError, RefusedError, UsageError
from cbgen.output.base import Output
from cbgen.output.locks import OutputLock
from cbgen.output.outputs import make_output
from cbgen.output.state import State, verify_check, with_check
from cbgen.records import Row, Tally

FORMAT_VERSION = 2
_LOCKS = ("lock", "lease*")
_OURS = ("wal-[0-9]*.jsonl", "state.json", "run.json", "summary.json", "marks", "published", "rows.jsonl*",
         "sealed-*.parquet", "*.tmp", ".*.new", "retry")  # fmt: skip


class Sidecar:
    """The directory beside an output. Open it with `Sidecar.open`, which takes the lock."""

    def __init__(self, output: Output, lock: OutputLock, config: OutputConfig) -> None:
        self.output = output
        self.directory = output.directory
        self.lock = lock
        self._config = config

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: OutputConfig, inputs: tuple[str, ...]) -> Iterator[Sidecar]:
        """Lock the output for this run.

        Args:
            config: where it goes.
            inputs: paths that are read; none of them may be written to.

        Raises:
            UsageError: the path cannot be written.
            RefusedError: another run holds it, it is one of the inputs, or it holds something that is not ours.
        """
        output = make_output(config)
        for path in inputs:
            if output.is_input(path):
                itself = "itself, or holds it" if os.path.isdir(config.path) else "itself"
                raise RefusedError(f"-o {output.path} is the input {redact(path)} {itself}; choose another output")
        lock = OutputLock(output.directory, output.path)
        made = _make_directories(output)
        locked = False
        try:
            sidecar = cls(output, lock, config)
            sidecar.check_foreign_files()
            try:
                lock.acquire()
                locked = True
            except OSError as error:
                raise _cannot_write(output, error) from error
            if not config.overwrite:
                output.adopt()
            if not sidecar.has_begun and not config.overwrite and output.holds_something():
                raise RefusedError(
                    f"{output.path} exists and was not made by a run that can be continued; choose another -o, or use "
                    "--overwrite (the old file is kept as a backup)"
                )
            yield sidecar
        finally:
            # Refused or failed before the first row: leave no trace, but touch nothing that an earlier run left.
            unused = locked and {path.name for path in output.directory.iterdir()} <= {"lock", "lease.json"}
            lock.release(remove=unused)
            if unused or not output.is_lasting:
                shutil.rmtree(output.directory, ignore_errors=True)
                _remove_empty(made)

    @property
    def has_begun(self) -> bool:
        return (self.directory / "run.json").exists()

    @property
    def is_continued(self) -> bool:
        """Whether an earlier run is taken up again."""
        return self.has_begun and not self._config.overwrite

    def check_foreign_files(self) -> None:
        """A new run clears its directory, which must therefore hold nothing but what runs leave there.

        Raises:
            RefusedError: it does, as may happen with --state-dir.
        """
        if self.is_continued:
            return
        names = sorted(path.name for path in self.directory.iterdir() if not path.name.startswith("."))
        foreign = [name for name in names if not any(fnmatch(name, pattern) for pattern in (*_OURS, *_LOCKS))]
        if foreign:
            raise RefusedError(
                f"{self.directory} keeps the state of the run, but holds other files ({foreign[0]!r}); choose "
                "another --state-dir, or move them away"
            )

    def begin(self, fingerprint: dict[str, Any], details: dict[str, Any]) -> None:
        """Everything is checked and loaded: from here on the output is ours. When a run is continued, only columns that
        are declared anew, as may be before the first row, are noted.

        With `overwrite`, the old output becomes a backup now and not before.
        """
        if self.is_continued:
            before = self.details()
            if before.get("encoder") != details.get("encoder"):
                with named_disk_errors(self.output):
                    before.pop("check")
                    self._write_run({**before, "encoder": details.get("encoder")})
            return
        document = {"format_version": FORMAT_VERSION, "fingerprint": fingerprint, **details}
        with named_disk_errors(self.output):
            # run.json goes first: should we be killed, what is left is not taken for a run to continue.
            (self.directory / "run.json").unlink(missing_ok=True)
            if self._config.overwrite:
                self.output.back_up()
            for pattern in _OURS:
                for path in self.directory.glob(pattern):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            self._write_run(document)

    def _write_run(self, document: dict[str, Any]) -> None:
        replace_file(self.directory / "run.json", with_check(dumps(document)))
        self.output.share("run.json")

    def details(self) -> dict[str, Any]:
        """run.json of the run that is continued; empty for a new one.

        Raises:
            RefusedError: it is gone or broken.
        """
        if not self.is_continued:
            return {}
        with self._whole_file("run.json") as data:
            verify_check(data)
            return dict(loads(data))

    def check_fingerprint(self, fingerprint: dict[str, Any]) -> None:
        """Compare with the run that began this output, if one did and it is to be continued.

        Raises:
            RefusedError: settings differ; the message shows each field before and now.
        """
        if not self.is_continued:
            return
        with self._whole_file("run.json") as data:
            document = loads(data)
            if document["format_version"] == FORMAT_VERSION:
                verify_check(data)
            version, before = document["format_version"], dict(document["fingerprint"])
        if version != FORMAT_VERSION:
            raise RefusedError(
                f"{self.output.path} was begun by another version of cbgen; finish it there, or use --overwrite"
            )
        now = loads(dumps(fingerprint))
        differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if differing:
            lines = [f"  {name}: {_shown(before.get(name))} before, {_shown(now.get(name))} now" for name in differing]
            raise RefusedError(
                f"{self.output.path} was begun with other settings:\n" + "\n".join(lines) + "\n"
                "go back to those, choose another -o, or start anew with --overwrite"
            )

    def read_state(self) -> State:
        """What is committed; nothing, for a new output or one to be overwritten.

        Raises:
            RefusedError: state.json is gone or broken, so that rows could be lost by going on.
        """
        if not self.is_continued:
            return State()
        if not (self.directory / "state.json").exists() and not self.output.holds_something():
            return State()  # stopped right after run.json was written
        with self._whole_file("state.json") as data:
            state = State.from_json(data)
        if state.swap:
            with named_disk_errors(self.output):
                state = self.output.end_swap(state, self.write_state)
        return state

    @contextlib.contextmanager
    def _whole_file(self, name: str) -> Iterator[bytes]:
        """The bytes of one of our files; whatever goes wrong with them refuses the run."""
        path = self.directory / name
        try:
            yield path.read_bytes()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RefusedError(
                f"{path} is missing or damaged, so it is not known how far {self.output.path} is finished; put it "
                "back, or start anew with --overwrite (the old file is kept as a backup)"
            ) from error

    def write_state(self, state: State) -> None:
        """Make a state the committed one."""
        replace_file(self.directory / "state.json", state.to_json())

    def repair(self, state: State) -> State:
        """Bring the output to the committed state, or to the part of it that is left; `position` and the digests of
        the state that then holds are not yet moved.

        Longer is normal after a crash: the tail was never committed and is cut. Shorter means that somebody cut it:
        the rows that are whole stay, the torn one goes.

        Raises:
            RefusedError: what is there is not what was committed.
        """
        if not self.is_continued:
            return state
        with named_disk_errors(self.output):
            found = self.output.repair(state, lambda line: record_facts(line, self._config) is not None)
        if found.rows == state.rows:
            return found
        tally = Tally()
        for line in self.output.lines(found) if found.rows else ():
            tally.add(*(record_facts(line + b"\n", self._config) or (None, 0, 0)))
        return replace(found, tally=tally)


def _make_directories(output: Output) -> list[Path]:
    """Make the sidecar directory; the ones that were missing, to remove them should the run be refused."""
    directory = output.directory
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(output, error) from error
    return missing


def _cannot_write(output: Output, error: OSError) -> UsageError:
    if isinstance(error, FileExistsError):
        return UsageError(f"cannot write beside {output.path}: {error.filename} is no directory; move it away")
    return UsageError(f"cannot write beside {output.path}: {error.strerror}")


def _remove_empty(directories: list[Path]) -> None:
    for path in directories:
        with contextlib.suppress(OSError):
            path.rmdir()


def _shown(value: Any) -> str:
    text = dumps(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that a crash leaves the old one or the new one, and a power cut too."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def answers(line: bytes, row: Row, config: OutputConfig) -> bool:
    """Whether an output line is the answer to this row, judged by the columns it carries."""
    record = loads(line)
    if config.field("completion") not in record:
        return bool(record.get("custom_id") == row.columns.get("custom_id"))
    if row.error is not None:
        return record[config.field("error")] is not None
    carried = {name: value for name, value in loads(dumps(row.columns)).items() if name in record}
    if config.append_message:
        carried.pop(config.messages_column, None)
    return all(record[name] == value for name, value in carried.items())


def record_facts(line: bytes, config: OutputConfig) -> tuple[str | None, int, int] | None:
    """(error code, prompt tokens, completion tokens) of an output line; None when the line is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = loads(line)
        native = config.field("completion") in record
        error = record[config.field("error")] if native else record["error"]
        usage = record[config.field("usage")] if native else record["response"]["body"].get("usage")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    usage = usage or {}
    return error and error["code"], usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)


@contextlib.contextmanager
def named_disk_errors(output: Output) -> Iterator[None]:
    """An OSError while writing becomes a `CbgenError` that names the output and says what is safe."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(output.directory).free if output.directory.exists() else 0
        raise CbgenError(
            f"cannot write {output.path}: {error.strerror or redact(str(error))} ({free / 1e6:.0f} MB free there); "
            "every committed row is safe, and the same command continues once the cause is gone"
        ) from error
