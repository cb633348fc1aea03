"""Where rows end up: one class for each kind of output, all fed with lines in input order.

    LinesOutput    a JSONL file, plain or compressed; the tape is the file itself
    PartsOutput    a directory (local or remote) of immutable part files over fixed row ranges
    FileOutput     one file that can only be written whole: Parquet, or any object of an object store
    StdoutOutput   a pipe; nothing can be continued there

Enters: lines from `OrderedWriter`, a `State` to go on from. Leaves: files under the user's path. Only committed rows
are ever taken back from here: `repair` brings what a crash or a user left behind to a state that holds, or refuses.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from cbgen.config import OutputConfig
from cbgen.data import files
from cbgen.data.encoders import CODECS, Encoder, JsonlEncoder
from cbgen.data.places import Place, move, split_path, sync_directory, sync_file
from cbgen.data.state import State
from cbgen.data.tape import Codec, Mark, Tape, checksum, is_intact, last_intact_mark, read_lines, size_without_zeros
from cbgen.errors import CbgenError, RefusedError, UsageError

_UNSUPPORTED = (".csv", ".tsv", ".xlsx", ".txt.gz", ".bz2", ".xz", ".zip")
IsWhole = Callable[[bytes], bool]


def make_output(config: OutputConfig) -> Output:
    """The output that a path and a format stand for.

    Raises:
        UsageError: the path cannot be one; says what can.
    """
    local = files.local_path(config.path)
    if local is not None and files.is_uri(config.path):  # file://
        config = replace(config, path=str(local) + ("/" if config.path.endswith("/") else ""))
    path, form = config.path, config.resolved_format
    if path == "-":
        if form != "jsonl":
            raise UsageError(f"-o - writes plain JSONL; name a file for --format {form}")
        return StdoutOutput(config)
    if path.lower().endswith(_UNSUPPORTED):
        raise UsageError(
            f"-o {path}: the output can be .jsonl, .jsonl.gz, .jsonl.zst, .parquet, or a directory of those"
        )
    remote = files.is_uri(path)
    if remote and urlsplit(path).scheme not in files.SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in files.SCHEMES)
        raise UsageError(f"-o {files.redact(path)}: {urlsplit(path).scheme}:// is not known; known are {known}")
    if remote and not urlsplit(path).netloc:
        raise UsageError(f"-o {path} names no bucket; write it as s3://bucket/directory/")
    if not remote:
        _check_reachable(path)
    if path.endswith("/") or (not remote and os.path.isdir(path)):
        return PartsOutput(config)
    if not remote and os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"-o {path} is no regular file, so a stopped run could not be continued; name a .jsonl file")
    return FileOutput(config) if remote or form == "parquet" else LinesOutput(config)


def _check_reachable(path: str) -> None:
    """Whether there could be a file with this path.

    Raises:
        UsageError: there could not, as when it is too long, or a link in a circle.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UsageError(f"-o {path}: {error.strerror}") from error
    target = os.path.realpath(path)
    if os.path.islink(path) and (os.path.islink(target) or not os.path.isdir(os.path.dirname(target))):
        raise UsageError(f"-o {path} is a link that leads nowhere; name a file")


class Output(ABC):
    """What `OrderedWriter` and `Sidecar` know of an output.

    Attributes:
        path: as messages name it.
        directory: the sidecar directory.
        tape: where lines go first.
        encoder: turns them into the output's own form.
        rows_per_part: rows after which the tape is sealed, or None.
        is_lasting: whether a later run can go on here.
    """

    rows_per_part: int | None = None
    is_lasting = True

    def __init__(self, config: OutputConfig, directory: Path, tape: Tape) -> None:
        self.config = config
        self.path = files.redact(config.path)
        self.directory = directory
        self.tape = tape
        self.encoder: Encoder = JsonlEncoder(CODECS[config.resolved_format])

    # -- before a run -------------------------------------------------------------------------------------------------

    @abstractmethod
    def holds_something(self) -> bool:
        """Whether there is anything that a new run would destroy."""

    @abstractmethod
    def back_up(self) -> None:
        """Give what is there another name.

        Raises:
            RefusedError: that cannot be done.
        """

    def is_input(self, path: str) -> bool:
        """Whether writing here would write to this input."""
        return False

    def prepare(self, encoder: Encoder) -> None:
        """Take what turns lines into the output's own form; before anything is sealed or read back."""
        self.encoder = encoder

    def repair(self, state: State, is_whole: IsWhole) -> State:
        """Bring the tape to `state`, or to the longest earlier state that holds.

        Args:
            state: as last committed.
            is_whole: whether a line is a whole record; what was cut short is judged by it.

        Raises:
            RefusedError: rows that were committed are no longer what they were.
        """
        tape = self.tape
        size = tape.path.stat().st_size if tape.path.exists() else 0
        if size >= state.num_bytes:
            if not size or is_intact(tape.path, state.mark):
                if size > state.num_bytes:
                    os.truncate(tape.path, state.num_bytes)
                return state
            size = size_without_zeros(tape.path)
            if size >= state.num_bytes:
                raise edited(self.path)
        kept = self._cut(size, is_whole)
        return replace(
            state,
            rows=state.base_rows + kept.rows,
            num_bytes=kept.num_bytes,
            crc=kept.crc,
            mtime_ns=kept.mtime_ns,
        )

    def _cut(self, size: int, is_whole: IsWhole) -> Mark:
        """Cut a tape that lost its end after the last whole line or frame; what is left."""
        path = self.tape.path
        if not path.exists():
            return Mark()
        known = last_intact_mark(path, self.marks, size)
        # Lines that do not hold their row's columns cannot show which row they answer.
        only_known = self.tape.codec is not None or self.encoder.takes_from_input
        kept = known if only_known else _whole_lines(path, known, size, is_whole)
        os.truncate(path, kept.num_bytes)
        return kept

    @property
    def marks(self) -> Path:
        """The list of the tape's safe prefixes."""
        return self.directory / "marks"

    def adopt(self) -> None:
        """Fetch the state of a run that was begun on another machine, if the output itself keeps one."""
        return

    def share(self, *names: str) -> None:
        """Keep these files of the sidecar directory with the output, for a run on another machine."""
        return

    # -- during a run -------------------------------------------------------------------------------------------------

    def open(self, state: State) -> None:
        """Go on behind `state`."""
        self.tape.open(state.mark)

    def append(self, lines: list[bytes]) -> None:
        self.tape.append(lines)

    def sync(self) -> Mark:
        """Make everything appended survive a power cut."""
        return self.tape.sync()

    def seal(self, base_rows: int) -> None:
        """Turn the whole tape, rows from `base_rows` on, into a part. Doing it twice does no harm."""
        return

    def finish(self, base_rows: int) -> None:
        """Bring the output into its final form; the run is complete, and everything is synced."""
        return

    def close(self) -> None:
        self.tape.close()

    # -- after a run --------------------------------------------------------------------------------------------------

    def lines(self, state: State) -> Iterator[bytes]:
        """The committed rows' lines, in order, as they were appended."""
        return read_lines(self.tape.path, self.tape.codec, state.rows)

    def rewrite(self, state: State, lines: Mapping[int, bytes], commit: Callable[[State], None]) -> State:
        """Replace some rows' lines; a crash leaves the old or the new.

        Args:
            state: committed.
            lines: by row index.
            commit: makes a state durable.
        """
        temporary = self.swap_path
        temporary.unlink(missing_ok=True)
        mark = _write_tape(temporary, self.tape.codec, _replaced(self.lines(state), lines))
        new = replace(state, base_rows=0, num_bytes=mark.num_bytes, crc=mark.crc, mtime_ns=mark.mtime_ns, swap=True)
        commit(new)
        return self.end_swap(new, commit)

    @property
    def swap_path(self) -> Path:
        """Where `rewrite` puts the tape's successor, on the same filesystem."""
        return self.tape.path.with_name(f".{self.tape.path.name}.new")

    def end_swap(self, state: State, commit: Callable[[State], None]) -> State:
        """Put the successor that a state announces in the tape's place, unless that has happened already."""
        self._put_successor()
        self.marks.unlink(missing_ok=True)
        state = replace(state, swap=False)
        commit(state)
        return state

    def _put_successor(self) -> None:
        if self.swap_path.exists():
            os.replace(self.swap_path, self.tape.path)
            sync_directory(self.tape.path.parent)

    def verify(self, state: State) -> None:
        """Compare everything with what was committed.

        Raises:
            RefusedError: it differs.
        """
        path = self.tape.path
        if not path.exists() and state.num_bytes:
            raise RefusedError(f"{self.path} is gone")
        size = path.stat().st_size if path.exists() else 0
        if size < state.num_bytes:
            raise RefusedError(
                f"{self.path} is shorter ({size:,} bytes) than what was committed ({state.num_bytes:,}); run the same "
                "command without --verify to repair it"
            )
        if state.num_bytes and checksum(path, state.num_bytes) != state.crc:
            raise edited(self.path)


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
        return Mark(self._rows)

    def close(self) -> None:
        """Nothing to close."""

    def verify(self, state: State) -> None:
        raise UsageError("--verify needs an output file")


@dataclass(frozen=True, slots=True)
class Published:
    """A finished file, as noted when it was published; moving it keeps the time of its last change."""

    rows: int
    size: int
    crc: int
    mtime_ns: int = 0

    @classmethod
    def of(cls, path: Path, rows: int) -> Published:
        """The note of a local file."""
        stat = path.stat()
        return cls(rows, stat.st_size, checksum(path, stat.st_size), stat.st_mtime_ns)


class _StagedOutput(Output):
    """Common to outputs whose tape stands in the sidecar directory and becomes files later."""

    def __init__(self, config: OutputConfig, root: Place, directory: Path, codec: Codec | None = None) -> None:
        super().__init__(config, directory, Tape(directory / "rows.jsonl", codec, directory / "marks"))
        self.form = config.resolved_format
        self.root = root
        self.published: dict[str, list[Published]] = {}

    def open(self, state: State) -> None:
        self.published = self._read_published()
        super().open(state)

    def _tape_lines(self) -> Iterator[bytes]:
        return read_lines(self.tape.path, self.tape.codec, self.tape.mark.rows)

    def _is_published(self, name: str, rows: int, sizes: Mapping[str, int]) -> bool:
        """Whether the file with so many rows is in place; one that was noted and never arrived is not."""
        noted = self.published.get(name)
        return noted is not None and (noted[-1].rows, noted[-1].size) == (rows, sizes.get(name))

    def _is_known(self, name: str, size: int) -> bool:
        """Whether a file is one of ours; a local one that was touched since is read for it, of a remote one the size
        has to do. Nothing is known of one that was never noted.

        A crash between note and publication leaves the one before the last.
        """
        alike = [noted for noted in self.published.get(name, [])[-2:] if noted.size == size]
        if not alike or self.root.is_remote:
            return bool(alike) or not self.published.get(name)
        return _is_one_of(alike, Path(self.root.root) / name)

    def _verify_file(self, name: str, root: Place, sizes: Mapping[str, int]) -> None:
        if name not in sizes:
            raise RefusedError(f"{name} is gone from {files.redact(root.root)}")
        with root.fetched(name, self.directory) as local:
            size = local.stat().st_size
            known = [(noted.size, noted.crc) for noted in self.published.get(name, [])[-2:]]
            if known and (size, checksum(local, size)) not in known:
                raise edited(f"{files.redact(root.root)}: {name}")

    def _note(self, name: str, rows: int, local: Path) -> None:
        """Remember what is about to be published, for `verify` and for a later run. What is in place until then always
        is the note before it, however many publications a crash has prevented since.
        """
        in_place = self._in_place(name)
        if in_place is not None and in_place != self.published[name][-1]:
            self._write_note(name, in_place)
        self._write_note(name, Published.of(local, rows))

    def _in_place(self, name: str) -> Published | None:
        """The note of the file that is there now, judged by its size."""
        noted = self.published.get(name)
        size = self.root.sizes().get(name) if noted else None
        return next((entry for entry in reversed(noted or ()) if entry.size == size), None)

    def _write_note(self, name: str, published: Published) -> None:
        record = {"name": name, **asdict(published)}
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(log, b"\n" + orjson.dumps(record) + b"\n")  # the one before may be torn
            os.fsync(log)
        finally:
            os.close(log)
        self.published.setdefault(name, []).append(published)

    def _read_published(self) -> dict[str, list[Published]]:
        published: dict[str, list[Published]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in self._log.read_bytes().split(b"\n"):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn last line
                    record = orjson.loads(line)
                    published.setdefault(record.pop("name"), []).append(Published(**record))
        return published

    @property
    def _log(self) -> Path:
        return self.directory / "published"


class PartsOutput(_StagedOutput):
    """A directory of parts: part k holds rows k*S .. (k+1)*S - 1 and is never changed once it is full."""

    def __init__(self, config: OutputConfig) -> None:
        root = Place(config.path)
        default = Path(split_path(config.path)[1] + ".cbgen") if root.is_remote else Path(config.path) / "_cbgen"
        super().__init__(config, root, Path(config.state_dir) if config.state_dir else default)
        self.rows_per_part = config.rows_per_part

    def part_name(self, base_rows: int) -> str:
        """The file of the part that begins with this row."""
        return f"part-{base_rows // self.config.rows_per_part:06d}.{self.form}"

    def holds_something(self) -> bool:
        return any(name != "_cbgen" for name in self.root.names())

    def back_up(self) -> None:
        if self.root.is_remote:
            if self.holds_something():
                raise RefusedError(f"{self.path} is not empty, and objects cannot be renamed; choose another -o")
            return
        names = [name for name in self.root.names() if name != "_cbgen"]
        if names:
            path = Path(self.config.path)
            backup = free_backup_path(path.parent / path.resolve().name)
            backup.mkdir()
            for name in names:
                os.replace(path / name, backup / name)

    def is_input(self, path: str) -> bool:
        """Also when the input lies in the directory: --overwrite would move it away."""
        if self.root.is_remote or not os.path.exists(path):
            return False
        directory, place = Path(self.config.path).resolve(), Path(path).resolve()
        return directory == place or directory in place.parents

    def adopt(self) -> None:
        if not self.root.is_remote or (self.directory / "run.json").exists():
            return
        for name in ("state.json", "run.json"):  # in this order: what has no run.json has not begun
            uri = self.root.uri(f"_cbgen/{name}")
            if not files.exists(uri):
                return
            (self.directory / name).write_bytes(files.read_bytes(uri))

    def share(self, *names: str) -> None:
        for name in names if self.root.is_remote else ():
            files.write_bytes(self.root.uri(f"_cbgen/{name}"), (self.directory / name).read_bytes())

    def repair(self, state: State, is_whole: IsWhole) -> State:
        self.published = self._read_published()
        sizes = self.root.sizes() if state.rows else {}
        for base_rows in range(0, state.rows, self.config.rows_per_part):
            name = self.part_name(base_rows)
            # The last one may be missing: its rows are on the tape, too.
            is_right = self._is_known(name, sizes[name]) if name in sizes else base_rows == state.base_rows
            if not is_right:
                what = "is gone from" if name not in sizes else "was changed in"
                raise RefusedError(
                    f"{name} {what} {self.path} since it was written; put it back, choose another -o, or start anew "
                    "with --overwrite"
                )
        if state.num_bytes and not self.tape.path.exists() and self.part_name(state.base_rows) in sizes:
            state = self._with_tape_restored(state)
        return super().repair(state, is_whole)

    def _with_tape_restored(self, state: State) -> State:
        """The last, unfinished part holds the rows of a tape that stayed on another machine."""
        lines = itertools.islice(self._part_lines(state.base_rows), state.rows - state.base_rows)
        mark = _write_tape(self.tape.path, None, lines)
        state = replace(state, rows=state.base_rows + mark.rows, num_bytes=mark.num_bytes, crc=mark.crc)
        return replace(state, mtime_ns=mark.mtime_ns)

    def seal(self, base_rows: int) -> None:
        self._publish(base_rows, self._tape_lines(), self.tape.mark.rows)

    def finish(self, base_rows: int) -> None:
        """Publish the last, shorter part; its rows stay on the tape too, in case the input grows."""
        rows = self.tape.mark.rows
        if rows and not self._is_published(self.part_name(base_rows), rows, self.root.sizes()):
            self._publish(base_rows, self._tape_lines(), rows)

    def _publish(self, base_rows: int, lines: Iterable[bytes], rows: int) -> None:
        name = self.part_name(base_rows)
        local = self.directory / f"{name}.tmp"
        self.encoder.encode(base_rows, lines, local)
        self._note(name, rows, local)
        self.root.put(local, name)

    def lines(self, state: State) -> Iterator[bytes]:
        for base_rows in range(0, state.base_rows, self.config.rows_per_part):
            yield from self._part_lines(base_rows)
        yield from read_lines(self.tape.path, self.tape.codec, state.rows - state.base_rows)

    def _part_lines(self, base_rows: int) -> Iterator[bytes]:
        with self.root.fetched(self.part_name(base_rows), self.directory) as local:
            yield from self.encoder.decode(base_rows, local)

    def rewrite(self, state: State, lines: Mapping[int, bytes], commit: Callable[[State], None]) -> State:
        """Make every part with replaced rows anew, and the tape; with one commit all of them count."""
        for left in (self.swap_path, *self._rewritten()):
            left.unlink(missing_ok=True)
        size, sizes = self.config.rows_per_part, self.root.sizes()
        for base_rows in sorted({index // size * size for index in lines}):
            name = self.part_name(base_rows)
            if name in sizes:
                path = self.directory / f".{name}.new"
                self.encoder.encode(base_rows, _replaced(self._known_lines(state, base_rows), lines, base_rows), path)
                sync_file(path)
        new = replace(state, swap=True)
        if any(index >= state.base_rows for index in lines):
            on_tape = _replaced(self._known_lines(state, state.base_rows), lines, state.base_rows)
            mark = _write_tape(self.swap_path, None, on_tape)
            new = replace(new, num_bytes=mark.num_bytes, crc=mark.crc, mtime_ns=mark.mtime_ns)
        commit(new)
        return self.end_swap(new, commit)

    def _known_lines(self, state: State, base_rows: int) -> Iterator[bytes]:
        """The committed lines of one part, from its file or from the tape."""
        if base_rows < state.base_rows:
            return self._part_lines(base_rows)
        return read_lines(self.tape.path, None, state.rows - state.base_rows)

    def _rewritten(self) -> list[Path]:
        """Parts that `rewrite` made, and that are not yet in place."""
        return sorted(self.directory.glob(".part-*.new"))

    def end_swap(self, state: State, commit: Callable[[State], None]) -> State:
        self.published = self._read_published()
        for path in self._rewritten():
            name = path.name.removeprefix(".").removesuffix(".new")
            base_rows = int(name.removeprefix("part-").partition(".")[0]) * self.config.rows_per_part
            self._note(name, min(self.config.rows_per_part, state.rows - base_rows), path)
            self.root.put(path, name)
        return super().end_swap(state, commit)

    def verify(self, state: State) -> None:
        super().verify(state)
        self.published = self._read_published()
        sizes = self.root.sizes()
        for base_rows in range(0, state.rows, self.config.rows_per_part):
            name = self.part_name(base_rows)
            if name in self.published or base_rows < state.base_rows:
                self._verify_file(name, self.root, sizes)


class FileOutput(_StagedOutput):
    """One file that appears when it is complete. Parquet is sealed in pieces meanwhile, which are joined at the end."""

    def __init__(self, config: OutputConfig) -> None:
        parent, name = split_path(config.path)
        root = Place(parent)
        self.name = name
        default = Path(name + ".cbgen") if root.is_remote else Path(parent) / f"{name}.cbgen"
        codec = CODECS[config.resolved_format]
        super().__init__(config, root, Path(config.state_dir) if config.state_dir else default, codec)
        self.rows_per_part = config.rows_per_part if self.form == "parquet" else None

    def holds_something(self) -> bool:
        return bool(self.root.sizes().get(self.name))

    def back_up(self) -> None:
        if self.holds_something():
            self.root.rename(self.name, _free_name(self.name, set(self.root.sizes())))

    def is_input(self, path: str) -> bool:
        return path == self.config.path or (not self.root.is_remote and same_file(Path(self.config.path), path))

    def repair(self, state: State, is_whole: IsWhole) -> State:
        self.published, sizes = self._read_published(), self.root.sizes()
        first = self._first_held(state.base_rows)
        if first and self.name not in sizes:  # its rows were nowhere else: begin again
            self._drop_sealed()
            return super().repair(State(), is_whole)
        if self.name in sizes and not self._is_known(self.name, sizes[self.name]):
            raise edited(self.path)
        for _, _, path in self._pieces(state.base_rows):
            noted = self.published.get(path.name)
            if noted and not _is_one_of(noted[-2:], path):
                raise edited(str(path))
        noted = self.published.get(self.name)
        if noted and first > max(published.rows for published in noted):
            raise RefusedError(
                f"a file sealed-*.parquet with rows before {first:,} is gone from {self.directory}; put it back, or "
                "start anew with --overwrite (the old file is kept as a backup)"
            )
        return super().repair(state, is_whole)

    def _sealed(self) -> dict[int, tuple[int, Path]]:
        """Sealed pieces: the row after the last one -> (first row, file)."""
        found = {}
        for path in self.directory.glob("sealed-*.parquet"):
            first, end = (int(number) for number in path.stem.split("-")[1:])
            found[end] = first, path
        return found

    def _pieces(self, base_rows: int) -> list[tuple[int, int, Path]]:
        """(first row, number of rows, file) of the sealed pieces that lead up to the tape, in order."""
        sealed, pieces = self._sealed(), []
        while base_rows in sealed:
            first, path = sealed[base_rows]
            pieces.append((first, base_rows - first, path))
            base_rows = first
        return pieces[::-1]

    def _first_held(self, base_rows: int) -> int:
        """The first row that is still in a piece or on the tape; those before it are only in the output."""
        pieces = self._pieces(base_rows)
        return pieces[0][0] if pieces else base_rows

    def seal(self, base_rows: int) -> None:
        path = self.directory / f"sealed-{base_rows}-{base_rows + self.tape.mark.rows}.parquet"
        local = path.with_suffix(".tmp")
        self.encoder.encode(base_rows, self._tape_lines(), local)
        self._write_note(path.name, Published.of(local, self.tape.mark.rows))
        move(local, path)

    def finish(self, base_rows: int) -> None:
        rows = base_rows + self.tape.mark.rows
        if not self._is_published(self.name, rows, self.root.sizes()):
            local = self.directory / f"{self.name}.tmp"
            if self.form == "parquet":
                self._assemble(base_rows, local)
            else:
                shutil.copyfile(self.tape.path, local)
            self._note(self.name, rows, local)
            self.root.put(local, self.name)
        self._drop_sealed()

    def _assemble(self, base_rows: int, local: Path) -> None:
        last = self.directory / "last.tmp"
        self.encoder.encode(base_rows, self._tape_lines(), last)
        first = self._first_held(base_rows)
        with contextlib.ExitStack() as stack:
            old = [(stack.enter_context(self.root.fetched(self.name, self.directory)), first)] if first else []
            pieces = [(path, num_rows) for _, num_rows, path in self._pieces(base_rows)]
            self.encoder.join([*old, *pieces], last, local)
        last.unlink()

    def _drop_sealed(self) -> None:
        """From the front: what is left always leads up to the tape."""
        for _, (_, path) in sorted(self._sealed().items()):
            path.unlink()

    def lines(self, state: State) -> Iterator[bytes]:
        if self.form != "parquet":
            yield from super().lines(state)
            return
        first = self._first_held(state.base_rows)
        if first:
            with self.root.fetched(self.name, self.directory) as local:
                yield from itertools.islice(self.encoder.decode(0, local), first)
        for base_rows, _, path in self._pieces(state.base_rows):
            yield from self.encoder.decode(base_rows, path)
        yield from read_lines(self.tape.path, None, state.rows - state.base_rows)

    def end_swap(self, state: State, commit: Callable[[State], None]) -> State:
        """After `rewrite` all rows are on one tape, and the file is made anew from it."""
        self._put_successor()
        self._drop_sealed()  # while the state still announces the swap: later, a new piece may end where an old one did
        self.published = self._read_published()
        in_place = self._in_place(self.name)
        if in_place is not None:
            self._write_note(self.name, replace(in_place, rows=0))  # known, but not what the rows are now
        return super().end_swap(state, commit)

    def verify(self, state: State) -> None:
        super().verify(state)
        self.published = self._read_published()
        for _, num_rows, path in self._pieces(state.base_rows):
            noted = self.published.get(path.name)
            now = Published.of(path, num_rows)
            if noted and (now.size, now.crc) not in [(entry.size, entry.crc) for entry in noted[-2:]]:
                raise edited(str(path))
        if self.name in self.published or self._first_held(state.base_rows):
            self._verify_file(self.name, self.root, self.root.sizes())


# -- helpers ----------------------------------------------------------------------------------------------------------


def edited(output: str) -> RefusedError:
    """The refusal of an output whose lines are no longer the ones that were committed."""
    return RefusedError(
        f"{output} was edited since it was written, so its rows may no longer answer the rows they stand for; put it "
        "back, choose another -o, or start anew with --overwrite (the old file is kept as a backup)"
    )


def _is_one_of(noted: list[Published], path: Path) -> bool:
    """Whether a local file is what one of these notes says; it is read only if it was touched since."""
    stat = path.stat()
    if any((entry.size, entry.mtime_ns) == (stat.st_size, stat.st_mtime_ns) for entry in noted):
        return True
    alike = {entry.crc for entry in noted if entry.size == stat.st_size}
    return bool(alike) and checksum(path, stat.st_size) in alike


def same_file(output: Path, path: str) -> bool:
    """Whether both paths lead to one file or directory, also through links."""
    return os.path.exists(path) and output.exists() and os.path.samefile(output, path)


def free_backup_path(path: Path) -> Path:
    """A name for the old output that no other file has."""
    return path.with_name(_free_name(path.name, {entry.name for entry in path.parent.iterdir()}))


def _free_name(name: str, taken: set[str]) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{name}.backup-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 10_000))))
    return next(name for name in names if name not in taken)


def _whole_lines(path: Path, known: Mark, size: int, is_whole: IsWhole) -> Mark:
    """The longest prefix of whole records, of which `known` needs no second look."""
    rows, num_bytes, crc = known.rows, known.num_bytes, known.crc
    with path.open("rb") as file:
        file.seek(num_bytes)
        for line in file:
            if num_bytes + len(line) > size or not line.endswith(b"\n") or not is_whole(line):
                break
            rows, num_bytes, crc = rows + 1, num_bytes + len(line), zlib.crc32(line, crc)
    return Mark(rows, num_bytes, crc)


def _replaced(lines: Iterable[bytes], new: Mapping[int, bytes], first: int = 0) -> Iterator[bytes]:
    for index, line in enumerate(lines, first):
        yield new.get(index, line)


def _write_tape(path: Path, codec: Codec | None, lines: Iterable[bytes]) -> Mark:
    path.unlink(missing_ok=True)
    tape = Tape(path, codec)
    tape.open(Mark())
    try:
        batch: list[bytes] = []
        for line in lines:
            batch.append(line)
            if len(batch) == 1024:
                tape.append(batch)
                batch = []
        tape.append(batch)
        return tape.sync()
    finally:
        tape.close()
