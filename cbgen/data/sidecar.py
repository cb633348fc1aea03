"""The directory beside an output: lock, fingerprint, and how far the output is committed.

    out.jsonl                   rows 0..rows-1, then perhaps a tail that is not committed
    out.jsonl.cbgen/lock        held while a run writes here
                    run.json    written once: format version, fingerprint, settings, versions
                    state.json  how far the output is committed; replaced atomically
                    wal-*.jsonl the journal
                    summary.json

`Sidecar.open` locks, `check_fingerprint` refuses another job, `repair` brings the output to its committed size, `begin`
makes it ours. Nothing is written or changed before `begin`, except that repair.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from cbgen.config import OutputConfig
from cbgen.data.lines import dumps, loads
from cbgen.errors import CbgenError, RefusedError, UsageError
from cbgen.records import Position, Row, Tally

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    """How far an output is safe, as in state.json.

    Attributes:
        rows, num_bytes: the committed prefix of the output.
        position: where row number `rows` starts in the input.
        digest: chain over the checksums of the committed rows' input, see `chain`.
        signatures: size and change time of each input at the last commit.
    """

    rows: int = 0
    num_bytes: int = 0
    position: Position = Position()
    digest: str = ""
    signatures: list[Any] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    @classmethod
    def from_json(cls, data: bytes) -> State:
        value = orjson.loads(data)
        return cls(**{**value, "position": Position(**value["position"]), "tally": Tally(**value["tally"])})


def chain(digest: str, checksum: int) -> str:
    """The digest of a row sequence, one row longer. Resumable, unlike a running hash object."""
    return hashlib.blake2b(digest.encode() + checksum.to_bytes(4, "little"), digest_size=12).hexdigest()


class Sidecar:
    """The directory beside an output. Open it with `Sidecar.open`, which takes the lock."""

    def __init__(self, output: Path, directory: Path, config: OutputConfig) -> None:
        self.output = output
        self.directory = directory
        self._config = config

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: OutputConfig, inputs: tuple[str, ...]) -> Iterator[Sidecar]:
        """Lock the output for this run.

        Raises:
            UsageError: the path cannot be written.
            RefusedError: another run holds it, it is one of the inputs, or it holds something that is not ours.
        """
        output = Path(config.path)
        _check_output_path(output, inputs)
        directory = output.with_name(output.name + ".cbgen")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UsageError(f"cannot write beside {output}: {error.strerror}") from error
        sidecar = cls(output, directory, config)
        locked = False
        try:
            _take_lock(lock, output, directory / "lock")
            locked = True
            if not sidecar.has_begun and not config.overwrite and output.exists() and output.stat().st_size:
                raise RefusedError(
                    f"{output} exists and was not made by a run that can be continued; choose another -o, or use "
                    "--overwrite (the old file is kept as a backup)"
                )
            yield sidecar
        finally:
            # Refused or failed before the first row: leave no trace, but touch nothing that an earlier run left.
            if locked and [path.name for path in directory.iterdir()] == ["lock"]:
                shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)

    @property
    def has_begun(self) -> bool:
        return (self.directory / "run.json").exists()

    def begin(self, fingerprint: dict[str, Any], details: dict[str, Any]) -> None:
        """Everything is checked and loaded: from here on the output is ours. Does nothing when a run is continued.

        With `overwrite`, the old output becomes a backup now and not before.
        """
        with named_disk_errors(self.output):
            if self._config.overwrite:
                # run.json goes first: should we be killed, what is left is not taken for a run to continue.
                (self.directory / "run.json").unlink(missing_ok=True)
                if self.output.exists():
                    os.replace(self.output, _free_backup_path(self.output))
            if not self.has_begun:
                for path in self.directory.iterdir():
                    if path.name != "lock":
                        path.unlink()
                document = {"format_version": FORMAT_VERSION, "fingerprint": fingerprint, **details}
                replace_file(self.directory / "run.json", orjson.dumps(document, option=orjson.OPT_INDENT_2))

    def check_fingerprint(self, fingerprint: dict[str, Any]) -> None:
        """Compare with the run that began this output, if one did and it is to be continued.

        Raises:
            RefusedError: settings differ; the message shows each field before and now.
        """
        if not self.has_begun or self._config.overwrite:
            return
        with self._whole_file("run.json") as data:
            document = loads(data)
            version, before = document["format_version"], dict(document["fingerprint"])
        if version != FORMAT_VERSION:
            raise RefusedError(
                f"{self.output} was begun by another version of cbgen; finish it there, or use --overwrite"
            )
        now = orjson.loads(orjson.dumps(fingerprint))
        differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if differing:
            lines = [f"  {name}: {_shown(before.get(name))} before, {_shown(now.get(name))} now" for name in differing]
            raise RefusedError(
                f"{self.output} was begun with other settings:\n" + "\n".join(lines) + "\n"
                "go back to those, choose another -o, or start anew with --overwrite"
            )

    def read_state(self) -> State:
        """What is committed; nothing, for a new output or one to be overwritten.

        Raises:
            RefusedError: state.json is gone or broken, so that rows could be lost by going on.
        """
        if not self.has_begun or self._config.overwrite:
            return State()
        if not (self.directory / "state.json").exists() and not self._output_size():
            return State()  # stopped right after run.json was written
        with self._whole_file("state.json") as data:
            return State.from_json(data)

    def _check_line_end(self, num_bytes: int) -> None:
        """Committed bytes end with a line; when they do not, somebody edited the output, and cutting would tear a row.

        Raises:
            RefusedError: they do not.
        """
        if num_bytes:
            with self.output.open("rb") as file:
                file.seek(num_bytes - 1)
                if file.read(1) != b"\n":
                    raise edited_output(self.output)

    @contextlib.contextmanager
    def _whole_file(self, name: str) -> Iterator[bytes]:
        """The bytes of one of our files; whatever goes wrong with them refuses the run."""
        path = self.directory / name
        try:
            yield path.read_bytes()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RefusedError(
                f"{path} is missing or damaged, so it is not known how far {self.output} is finished; put it back, or "
                "start anew with --overwrite (the old file is kept as a backup)"
            ) from error

    def _output_size(self) -> int:
        return self.output.stat().st_size if self.output.exists() else 0

    def write_state(self, state: State) -> None:
        replace_file(self.directory / "state.json", orjson.dumps(asdict(state)))

    def repair(self, state: State) -> State:
        """Bring the output to the committed size; the state that then holds, with `position` and `digest` not yet
        moved.

        Longer is normal after a crash: the tail was never committed and is cut. Shorter means that somebody cut it:
        the rows that are whole stay, the torn one goes. The size is looked at before any truncate, which could also
        extend.
        """
        if not self.has_begun or self._config.overwrite:
            return state
        size = self._output_size()
        if size >= state.num_bytes:
            self._check_line_end(state.num_bytes)
            if size > state.num_bytes:
                os.truncate(self.output, state.num_bytes)
            return state
        tally, num_bytes = Tally(), 0
        if size:
            with self.output.open("rb") as file:
                for line in file:
                    facts = _record_facts(line, self._config)
                    if facts is None:
                        break
                    tally.add(*facts)
                    num_bytes += len(line)
            os.truncate(self.output, num_bytes)
        return replace(state, rows=tally.rows, num_bytes=num_bytes, tally=tally)


def _free_backup_path(output: Path) -> Path:
    """A name for the old output that no other file has."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{output.name}.backup-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 10_000))))
    return next(path for path in map(output.with_name, names) if not path.exists())


def _check_output_path(output: Path, inputs: tuple[str, ...]) -> None:
    if str(output) == "-" or (output.exists() and not output.is_file() and not output.is_dir()):
        raise UsageError(f"-o {output} is no regular file, so a stopped run could not be continued; name a .jsonl file")
    if output.is_dir():
        raise UsageError(f"-o {output} is a directory; name a file in it, such as {output / 'out.jsonl'}")
    if output.suffix in (".parquet", ".gz", ".zst", ".csv"):
        raise UsageError(f"-o {output}: the output is written as plain JSONL; give it a name that ends in .jsonl")
    for path in inputs:
        if output.exists() and os.path.exists(path) and os.path.samefile(output, path):
            raise RefusedError(f"-o {output} is the input {path} itself; choose another output")


def _take_lock(lock: int, output: Path, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or not os.path.samestat(os.fstat(lock), path.stat()):
            raise BlockingIOError  # its holder failed just now and removed it: what we hold guards nothing
    except BlockingIOError as error:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "unknown"
        raise RefusedError(f"another run is writing {output} ({holder}); wait for it, or choose another -o") from error
    os.truncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
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


def edited_output(output: Path) -> RefusedError:
    """The refusal for an output whose lines are no longer the ones that were committed."""
    return RefusedError(
        f"{output} was edited since it was written, so its lines no longer answer the rows they stand for; put it "
        "back, choose another -o, or start anew with --overwrite (the old file is kept as a backup)"
    )


def answers(line: bytes, row: Row, config: OutputConfig) -> bool:
    """Whether an output line is the answer to this row, judged by the columns it carries."""
    record = loads(line)
    if config.field("completion") not in record:
        return bool(record.get("custom_id") == row.columns.get("custom_id"))
    if row.error is not None:
        return record[config.field("error")] is not None
    carried = loads(dumps(row.columns))
    return all(name in record and record[name] == value for name, value in carried.items())


def _record_facts(line: bytes, config: OutputConfig) -> tuple[str | None, int, int] | None:
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
def named_disk_errors(output: Path) -> Iterator[None]:
    """An OSError while writing becomes a `CbgenError` that names the output and says what is safe."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(output.parent).free
        raise CbgenError(
            f"cannot write {output}: {error.strerror} ({free / 1e6:.0f} MB free there); every committed row is "
            "safe, and the same command continues once the cause is gone"
        ) from error
