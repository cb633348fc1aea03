"""Kills, power cuts, full disks, signals and rivals, at random moments of real runs: `python -m tests.chaos [--short]`.

Jobs on a small model with known answers, one kind of output after the other. Each run of a job suffers one mishap and
the next run goes on, until the output is finished; then it is compared with that of a run to which nothing happened:
JSONL byte by byte, everything else row by row, in order; only `usage.cached_tokens` may differ. Rows whose flush had
returned may never be generated again; after a power cut, those whose commit had returned. Prints one table; exits with
1 on any difference.

Processes are forks of this one, which has imported everything; some are real `python -m tests.crash_driver`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pyarrow as pa
import pyarrow.parquet as pq

from cbgen.output.tape import Codec, all_lines
from tests import crash_driver

REPOSITORY = Path(__file__).parent.parent
SECONDS = 60.0  # no run takes longer
PHASES = ("start", "rows", "mid", "seal", "finish")
_LOG_BYTES = 1 << 20  # of one run, at most
_ATTEMPTS = 30  # to place the same mishap
_MOUNTED = ("mount", "namespace")


@dataclass(frozen=True, slots=True)
class Kind:
    """An output that is tormented."""

    name: str
    output: str
    codec: Codec | None = None
    arguments: tuple[str, ...] = ()
    source: str = "in.jsonl"

    @property
    def has_parts(self) -> bool:
        return self.output.endswith("/") or self.output.endswith(".parquet")


KINDS = (
    Kind("jsonl", "out.jsonl"),
    Kind("jsonl.zst", "out.jsonl.zst", "zstd"),
    Kind("parquet", "out.parquet", None, ("--rows-per-part", "70")),
    Kind("parquet parts", "out/", None, ("--format", "parquet", "--rows-per-part", "90"), "in.parquet"),
    Kind("jsonl.gz parts", "out/", "gzip", ("--format", "jsonl.gz", "--rows-per-part", "110")),
)


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much happens to each kind of output."""

    rows: int
    kills: int
    power_cuts: int
    rivals: int
    signals: int
    full_disks: int
    retries: int
    real: int

    def events(self, rng: random.Random) -> list[str]:
        """Everything that is to happen, in some order."""
        phases = [f"kill {phase}" for phase in PHASES]
        events = [phases[number % len(phases)] for number in range(self.kills)]
        events += [f"power {PHASES[number % len(PHASES)]}" for number in range(self.power_cuts)]
        events += ["rival", "twins"] * self.rivals + ["SIGTERM", "SIGUSR1"] * self.signals
        events += ["disk"] * self.full_disks + ["retry"] * self.retries + ["real"] * self.real
        rng.shuffle(events)
        return events


FULL = Amounts(rows=600, kills=40, power_cuts=20, rivals=6, signals=6, full_disks=8, retries=4, real=3)
SHORT = Amounts(rows=200, kills=5, power_cuts=2, rivals=1, signals=1, full_disks=1, retries=1, real=0)


def make_inputs(directory: Path, num_rows: int) -> None:
    """Rows of different lengths, some of which fail, and some of which begin alike for more than a block."""
    rng = random.Random(0)
    rows = []
    for index in range(num_rows):
        trigger = "~" if index % 29 == 5 else rng.choice("12355")
        length = {"max_tokens": rng.randint(1, 40)}
        begin = "what many rows begin with, " if index % 3 == 0 else ""
        rows.append({"id": index, "prompt": f"{begin}row {index} {trigger}", "sampling_params": length})
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pq.write_table(pa.table({**columns, "day": pa.array(range(num_rows), pa.date32())}), directory / "in.parquet")


# -- processes --------------------------------------------------------------------------------------------------------


class Process:
    """One run, in a fork of this process."""

    def __init__(self, job: Job, arguments: list[str], file_size: int | None = None) -> None:
        self.code: int | None = None
        self.stderr = job.log.with_suffix(".stderr")
        self._log = job.log
        self.pid = os.fork()
        if self.pid == 0:
            _become(job, arguments, self.stderr, file_size)

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self) -> int:
        """Until it ends; its exit code."""
        deadline = time.monotonic() + SECONDS
        while not self.poll():
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise Difference(f"a run did not end within {SECONDS:.0f} s")
            time.sleep(0.001)
        assert self.code is not None
        return self.code

    def send(self, number: int) -> None:
        if not self.poll():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def errors(self) -> str:
        return self.stderr.read_text("utf-8", "replace")


class RealProcess(Process):
    """One run, in a process that was begun from nothing."""

    def __init__(self, job: Job, arguments: list[str]) -> None:
        self.code = None
        self.stderr = job.log.with_suffix(".stderr")
        self._log = job.log
        with self.stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash_driver", str(job.log), *arguments],
                cwd=job.directory,
                env={**os.environ, **job.environment, "PYTHONPATH": str(REPOSITORY)},
                stderr=stderr,
            )
        self.pid = self._process.pid

    def poll(self) -> bool:
        self.code = self._process.poll()
        return self.code is not None


def _become(job: Job, arguments: list[str], stderr: Path, file_size: int | None) -> None:
    """In the fork: `python -m tests.crash_driver LOG ARGUMENTS`."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        errors = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for number, stream in enumerate((null, null, errors)):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace")  # noqa: SIM115
        os.chdir(job.directory)
        os.environ.update(job.environment)
        if file_size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
        crash_driver.run(str(job.log), arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


# -- a job ------------------------------------------------------------------------------------------------------------


class Difference(Exception):
    """Something is not as it must be."""


@dataclass(slots=True)
class Job:
    """One output, from its first run to its last.

    Attributes:
        directory: the output, the inputs and the log; on a filesystem of its own when the disk is to run full.
        safe: rows that may never be generated again.
        generated: how often each row was.
    """

    kind: Kind
    directory: Path
    model: Path
    rng: random.Random
    counts: Counter[str]
    environment: dict[str, str] = field(default_factory=dict)
    safe: set[int] = field(default_factory=set)
    generated: Counter[int] = field(default_factory=Counter)
    is_done: bool = False
    process: Process | None = None
    _reader: int = -1
    _rest: bytes = b""
    _synced: dict[int, int] = field(default_factory=dict)
    _committed: set[int] = field(default_factory=set)
    _phases: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log.unlink(missing_ok=True)
        os.mkfifo(self.log)  # no limit on file sizes holds for it
        self._reader = os.open(self.log, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(self._reader, fcntl.F_SETPIPE_SZ, _LOG_BYTES)

    @property
    def log(self) -> Path:
        return self.directory.parent / f"{self.directory.name}.log"

    def close(self) -> None:
        """Leave no process behind."""
        if self.process is not None:
            self.process.kill()
        os.close(self._reader)

    def arguments(self, *more: str) -> list[str]:
        """Of the command."""
        slots = self.rng.choice(["7", "16", "33"])  # may differ from run to run
        options = ["--model", str(self.model), "--dtype", "float32", "--max-num-seqs", slots, "--progress", "none"]
        return ["run", self.kind.source, "-o", self.kind.output, *options, *self.kind.arguments, *more]

    def start(self, *more: str, **options: Any) -> Process:
        self._phases.clear()
        self.process = Process(self, self.arguments(*more), **options)
        return self.process

    # -- what it does ----------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Read the news from the log, and see that nothing was done twice."""
        with contextlib.suppress(BlockingIOError):
            while news := os.read(self._reader, 1 << 20):
                *lines, self._rest = (self._rest + news).split(b"\n")
                for line in lines:
                    self._take(line.decode())

    def _take(self, line: str) -> None:
        word, *rest = line.split(" ")
        if word == "p":
            index = int(rest[0])
            if index in self.safe:
                raise Difference(f"row {index} was finished, and was generated again")
            self.generated[index] += 1
        elif word == "f":
            self.safe.update(map(int, rest))
        elif word == "c":
            self._committed = set(self.safe)
        elif word == "s":
            self._synced[int(rest[0])] = int(rest[1])
        elif word.startswith("@"):
            self._phases.append(word[1:])

    def wait_for(self, process: Process, phase: str) -> bool:
        """Until the run is in this phase; False when it ended before."""
        target = len(self.safe) + self.rng.randint(1, 150) if phase == "mid" else 0
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            ended = process.poll()
            self.follow()
            if len(self.safe) >= target if phase == "mid" else phase in self._phases:
                return not ended
            if ended:
                return False
            time.sleep(0.0005)
        raise Difference(f"phase {phase} did not come within {SECONDS:.0f} s")

    def end(self, process: Process, *codes: int) -> int:
        """Wait for the end, which must be one of these."""
        code = process.wait()
        self.follow()
        errors = process.errors()
        if code not in codes or "Traceback" in errors:
            raise Difference(f"exit code {code} instead of {' or '.join(map(str, codes))}: {errors.strip()[-2000:]}")
        return code

    # -- what happens to it ----------------------------------------------------------------------------------------

    def suffer(self, event: str) -> bool:
        """Run once, with this mishap; False when it found no place and the run simply ended."""
        name, _, phase = event.partition(" ")
        mishaps = {"kill": self._kill, "power": self._cut_power}
        if name in mishaps:
            happened = mishaps[name]("rows" if phase == "seal" and not self.kind.has_parts else phase)
        else:
            happened = {
                "rival": self._rival,
                "twins": self._twins,
                "SIGTERM": self._terminate,
                "SIGUSR1": self._commit_and_kill,
                "disk": self._fill_disk,
                "retry": self._kill_retry,
                "real": self._kill_real,
            }[name]()
        if happened:
            self.counts.update({name, event})
        return happened

    def _kill(self, phase: str) -> bool:
        process = self.start()
        if not self.wait_for(process, phase):
            return self._ended(process)
        spans = {"start": 0.3, "finish": 0.02, "seal": 0.02}
        time.sleep(self.rng.random() ** 2 * spans.get(phase, 0.06))
        if process.poll():
            return self._ended(process)
        process.kill()
        self.follow()
        return True

    def _ended(self, process: Process) -> bool:
        self.end(process, 3)
        self.is_done = True
        return False

    def _cut_power(self, phase: str) -> bool:
        """Harsher than a real one: of what was not synced nothing, or any part, or zeros are left."""
        if not self._kill(phase):
            return False
        for path in self._files():
            size, synced = path.stat().st_size, self._synced.get(path.stat().st_ino, 0)
            if synced < size:
                kept = self.rng.choice([synced, self.rng.randint(synced, size)])
                os.truncate(path, kept)
                if self.rng.random() < 0.4:
                    os.truncate(path, size)
                self.counts["torn files"] += 1
        self.safe = set(self._committed)
        return True

    def _files(self) -> list[Path]:
        name = self.kind.output.rstrip("/")
        roots = [self.directory / name, self.directory / f"{name}.cbgen"]
        files = [path for root in roots for path in (root.rglob("*") if root.is_dir() else [root])]
        return [path for path in files if path.is_file() and path.name not in ("lock", "lease.json")]

    def _rival(self) -> bool:
        process = self.start()
        if not self.wait_for(process, "rows"):
            return self._ended(process)
        process.send(signal.SIGSTOP)  # so that it is there for as long as the rival needs to see it
        stderr, phases = process.stderr, list(self._phases)
        beside = self._beside()
        rival = Process(beside, self.arguments())
        code, errors = rival.wait(), rival.errors()
        beside.close()
        if code != 4 or "another run is writing" not in errors:
            raise Difference(f"a second run ended with {code}: {errors[-500:]}")
        process.stderr, self._phases = stderr, phases
        process.send(signal.SIGCONT)
        time.sleep(self.rng.random() * 0.02)
        process.kill()
        self.follow()
        return True

    def _twins(self) -> bool:
        """Two that begin at the same time: one of them writes, the other one is refused."""
        process = self.start()
        time.sleep(self.rng.random() * 0.05)
        stderr = process.stderr
        twin = self._beside()
        other = Process(twin, self.arguments())
        codes = sorted((process.wait(), other.wait()))
        self.follow()
        twin.safe = self.safe
        twin.follow()
        twin.close()
        if codes not in ([3, 4], [3, 3]):  # the second when the first had ended before
            raise Difference(f"two runs at once ended with {codes}: {stderr.read_text()} {other.errors()}")
        self.is_done = True
        return True

    def _beside(self) -> Job:
        """The same output, with a log of its own."""
        return Rival(self.kind, self.directory, self.model, self.rng, self.counts, self.environment)

    def _terminate(self) -> bool:
        process = self.start("--grace", "0.01")
        if not self.wait_for(process, self.rng.choice(["rows", "mid"])):
            return self._ended(process)
        process.send(signal.SIGTERM)
        self.is_done = self.end(process, 75, 3) == 3  # it may have come to its end first
        return not self.is_done

    def _commit_and_kill(self) -> bool:
        """SIGUSR1 makes everything finished survive a power cut, without an end."""
        process = self.start()
        if not self.wait_for(process, "rows"):
            return self._ended(process)
        for _ in range(self.rng.randint(1, 4)):
            process.send(signal.SIGUSR1)
            time.sleep(0.005)
        time.sleep(self.rng.random() * 0.02)
        process.kill()
        self.follow()
        return True

    def _kill_real(self) -> bool:
        self._phases.clear()
        process = self.process = RealProcess(self, self.arguments())
        if not self.wait_for(process, "mid"):
            return self._ended(process)
        process.kill()
        self.follow()
        return True

    def _kill_retry(self) -> bool:
        """Of failed rows only, which fail again: the output is the same, whether or not the retry came to its end."""
        process = self.start("--retry-errors")
        found = self.wait_for(process, "retry")
        time.sleep(self.rng.random() * 0.03)
        process.kill() if found and not process.poll() else self.end(process, 3)
        self.follow()
        return True

    def _fill_disk(self) -> bool:
        """The disk runs full at some point, and has room again afterwards."""
        room = self.rng.choice([0, 4096, 8192, 20_000, 50_000])
        ballast = self.directory / "ballast"
        if os.path.ismount(self.directory):
            free = shutil.disk_usage(self.directory).free
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                file.write(bytes(max(0, free - room)))
            process = self.start()
        else:
            process = self.start(file_size=max(room, 1024))
        code = self.end(process, 1, 2, 3)
        ballast.unlink(missing_ok=True)
        self.is_done = code == 3
        errors = process.errors().strip()
        if code != 3 and ("cannot write" not in errors or len(errors.splitlines()[-1]) > 500):
            raise Difference(f"a full disk was told as: {errors[-500:]}")
        return code != 3

    # -- its end ---------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """The last runs, to which nothing happens, and one that checks."""
        self.end(self.start(), 3)
        if any(path.parent.name == "retry" for path in self._files()):
            self.end(self.start("--retry-errors"), 3)
        self.end(self.start("--verify"), 0)
        left = [path.name for path in self._files() if path.name.startswith(("wal-", "retry", "sealed-"))]
        if left or any(path.suffix == ".tmp" for path in self._files()):
            raise Difference(f"left over: {left or [path.name for path in self._files()]}")

    def content(self) -> Any:
        """Bytes of plain JSONL; otherwise rows, in the order of the files."""
        path = self.directory / self.kind.output
        if self.kind.output == "out.jsonl":
            return path.read_bytes()
        files = sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]
        if "parquet" in self.kind.name:
            return pa.concat_tables(
                [pq.read_table(pa.BufferReader(file.read_bytes())) for file in files]
            ).combine_chunks()
        return [(file.name, list(all_lines(file, self.kind.codec))) for file in files]


class Rival(Job):
    """A run beside another one."""

    @property
    def log(self) -> Path:
        return self.directory.parent / f"{self.directory.name}-rival.log"


# -- everything -------------------------------------------------------------------------------------------------------


class Chaos:
    """Torments one kind of output after the other."""

    def __init__(self, directory: Path, model: Path, amounts: Amounts, seed: int, disk: str) -> None:
        self._directory = directory
        self._model = model
        self._amounts = amounts
        self._rng = random.Random(seed)
        self._disk = disk
        self._missed: Counter[str] = Counter()
        self.results: dict[str, Counter[str]] = {}

    def torment(self, kind: Kind) -> list[str]:
        """Everything that is to happen to a kind; what was wrong."""
        counts = self.results[kind.name] = Counter()
        self._missed.clear()
        with self._job(kind, counts, "unbroken") as job:
            job.complete()
            expected = job.content()
        events = self._amounts.events(self._rng)
        problems: list[str] = []
        while events and len(problems) < 3:
            counts["jobs"] += 1
            with self._job(kind, counts, "job") as job:
                if counts["jobs"] % 4 == 2:
                    job.environment["CHAOS_NO_FLOCK"] = "1"
                    counts["jobs on leases"] += 1
                happened: list[str] = []
                try:
                    self._live(job, events, happened)
                    job.complete()
                    if not _same(job.content(), expected):
                        raise Difference("the output is not that of an unbroken run")
                except Difference as difference:
                    problems.append(f"{kind.name}, job {counts['jobs']}, after {', '.join(happened)}: {difference}")
                counts["rows"] += len(job.generated)
                counts["again"] += sum(job.generated.values()) - len(job.generated)
        counts["differences"] = len(problems)
        return problems

    def _live(self, job: Job, events: list[str], happened: list[str]) -> None:
        """One mishap after the other, until the job is done; one that found no place waits for the next job."""
        missed: list[str] = []
        while events and not job.is_done:
            event = events.pop()
            happened.append(event)
            if not job.suffer(event):
                missed.append(event)
                job.counts["ended before"] += 1
        for event in missed:
            self._missed[event] += 1
            if self._missed[event] < _ATTEMPTS:
                events.insert(0, event)

    @contextlib.contextmanager
    def _job(self, kind: Kind, counts: Counter[str], name: str) -> Iterator[Job]:
        directory = self._directory / name
        directory.mkdir()
        mounted = self._disk in _MOUNTED
        if mounted:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(directory)], check=True)
        job = Job(kind, directory, self._model, self._rng, counts, {"CHAOS_COMMIT_SECONDS": "0.02"})
        try:
            make_inputs(directory, self._amounts.rows)
            yield job
        finally:
            job.close()
            if mounted:
                subprocess.run(["umount", "-l", str(directory)], check=True)
            shutil.rmtree(directory)
            for log in (*self._directory.glob("*.log"), *self._directory.glob("*.stderr")):
                log.unlink()


def _same(found: Any, expected: Any) -> bool:
    """Equal but for how much of each prompt was cached, which depends on the rows that ran before in the process."""
    if isinstance(expected, pa.Table):
        found, expected = (table.flatten().drop_columns(["usage.cached_tokens"]) for table in (found, expected))
        return bool(found.equals(expected))
    texts = [content if isinstance(content, bytes) else repr(content).encode() for content in (found, expected)]
    return crash_driver.without_cached_tokens(texts[0]) == crash_driver.without_cached_tokens(texts[1])


def small_disk() -> str:
    """How a small disk can be had here."""
    with tempfile.TemporaryDirectory() as directory:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], capture_output=True).returncode == 0:
            subprocess.run(["umount", directory], check=True)
            return "namespace" if "CHAOS_NAMESPACE" in os.environ else "mount"
    return "limit"


def enter_namespace() -> None:
    """Where mounting is not allowed, begin again where it is."""
    if small_disk() != "limit" or "CHAOS_NAMESPACE" in os.environ:
        return
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0:
            os.environ["CHAOS_NAMESPACE"] = "1"
            os.execvp("unshare", ["unshare", "-rm", sys.executable, "-m", "tests.chaos", *sys.argv[1:]])


COLUMNS = (
    *("jobs", "kill", "power", "torn files", "rival", "twins", "SIGTERM", "SIGUSR1", "disk", "retry", "real"),
    *("rows", "again", "differences"),
)


def table(results: dict[str, Counter[str]], seconds: float) -> str:
    """One line for each kind, and their sum."""
    total: Counter[str] = sum(results.values(), Counter())
    lines = [f"{'':16}" + "".join(f"{name:>12}" for name in COLUMNS)]
    for name, counts in [*results.items(), ("all", total)]:
        lines.append(f"{name:16}" + "".join(f"{counts[column]:>12,}" for column in COLUMNS))
    phases = ", ".join(f"{total[f'kill {phase}'] + total[f'power {phase}']} {phase}" for phase in PHASES)
    lines.append(
        f"kills and power cuts by phase: {phases}; {total['jobs on leases']} jobs without flock; {seconds:.0f} s"
    )
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a tenth of it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS], help="only this one")
    options = parser.parse_args()
    enter_namespace()
    disk = small_disk()
    means = {
        "mount": "a small tmpfs",
        "namespace": "a small tmpfs in a user namespace",
        "limit": "a limit on file sizes",
    }
    print(f"seed {options.seed}; full disks by {means[disk]}", flush=True)  # noqa: T201

    import cbgen.engine.engine
    import cbgen.engine.loader
    import cbgen.pipeline  # noqa: F401
    from tests.chain import build_chain_model

    began = time.monotonic()
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=os.environ.get("TMPDIR")) as name:
        directory = Path(name)
        model = build_chain_model(directory / "model")
        gc.freeze()
        chaos = Chaos(directory, model, SHORT if options.short else FULL, options.seed, disk)
        for kind in KINDS:
            if options.kind in (None, kind.name):
                problems += chaos.torment(kind)
    print(table(chaos.results, time.monotonic() - began))  # noqa: T201
    print("\n".join(problems) if problems else "no difference", flush=True)  # noqa: T201
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
