"""Outputs and their sidecars, touched by others: repaired, or refused in one sentence; never a wrong row."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbgen.config import OutputConfig
from cbgen.errors import CbgenError, InputError, RefusedError
from cbgen.output.outputs import FileOutput, Output, PartsOutput
from cbgen.output.writers import OrderedWriter
from tests.output.machine import deaths
from tests.output.miniature import Command, Mini, decoded, long_answer, sidecar_of

pytestmark = pytest.mark.usefixtures("small_files")

PROMPTS = [f"prompt {index}" + "~" * (index % 4 == 2) for index in range(11)]


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def swapped_lines(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[1:2], *lines[:1], *lines[2:]])


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda data: b"",
    "halved": lambda data: data[: len(data) // 2],
    "last byte cut": lambda data: data[:-1],
    "first byte cut": lambda data: data[1:],
    "zeros at its end": lambda data: data[: len(data) * 2 // 3] + bytes(len(data) - len(data) * 2 // 3),
    "zeros behind it": lambda data: data + bytes(50),
    "garbage behind it": lambda data: data + b'{"a": 1}\n',
    "garbage": lambda data: bytes(range(256)) * (len(data) // 256 + 1),
    "flipped at the start": lambda data: flipped(data, 0),
    "flipped in the middle": lambda data: flipped(data, len(data) // 2),
    "flipped near the end": lambda data: flipped(data, max(0, len(data) - 9)),
    "flipped at the end": lambda data: flipped(data, len(data) - 1),
    "doubled": lambda data: data + data,
    "first line out": lambda data: b"".join(data.splitlines(keepends=True)[1:]),
    "lines swapped": swapped_lines,
}


def edit(path: Path, how: str) -> bool:
    """Whether there was anything to change."""
    before = path.read_bytes()
    after = EDITS[how](before) if before else before
    if after == before:
        return False
    path.write_bytes(after)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 7))
    return True


def copied(directory: Path, source: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(source, directory, copy_function=shutil.copy2)


def stages(tmp_path: Path, kind: str) -> Iterator[tuple[str, Path]]:
    """Copies of outputs: a finished one, one to go on with after 7 of 11 rows, one whose journal holds rows that
    wait for others, and one that was stopped right before its end.
    """
    job = Command(tmp_path / "job", kind, PROMPTS)
    stops = {"waiting": lambda writer: 1 / 0, "sealed": lambda writer: writer.commit() or 1 / 0}
    for stage, limit in (("short", 7), ("waiting", None), ("sealed", None), ("done", None)):
        if stage in stops:
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ZeroDivisionError):
                patch.setattr(OrderedWriter, "commit" if stage == "waiting" else "finish", stops[stage])
                job.run()
        else:
            assert job.run(limit=limit) == 3
        copied(tmp_path / stage, tmp_path / "job")
        yield stage, tmp_path / stage


# -- the output and everything beside it, one file at a time ----------------------------------------------------------


def test_any_edit_of_any_file_is_repaired_or_refused_in_one_sentence(tmp_path: Path, kind: str) -> None:
    templates = dict(stages(tmp_path, kind))
    job = Command(tmp_path / "job", kind, PROMPTS)
    expected = job.decoded()
    wrong: list[str] = []
    for stage, template in templates.items():
        copied(job.directory, template)
        for path in [file.relative_to(job.directory) for file in job.files]:
            for how in [*EDITS, "deleted"] if _matters(stage, path) else ():
                copied(job.directory, template)
                if how == "deleted":
                    (job.directory / path).unlink()
                elif not edit(job.directory / path, how):
                    continue
                fault = outcome(job, expected)
                if fault:
                    wrong.append(f"{stage}: {path} {how}: {fault}")
    assert not wrong, f"{len(wrong)} outcomes:\n" + "\n".join(wrong)


def _matters(stage: str, path: Path) -> bool:
    """Some files are the same in several stages."""
    kinds = {"waiting": ("wal-",), "sealed": ("sealed-", "rows.jsonl", "published")}
    return path.name.startswith(kinds.get(stage, ("",)))


def outcome(job: Command, expected: list[dict[str, Any]]) -> str:
    """What is wrong after a run; empty if nothing is."""
    try:
        job.run()
    except CbgenError as error:
        text = str(error)
        return "" if text and "\n" not in text and len(text) < 500 else f"told {text!r}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    rows = job.decoded()
    return "" if rows == expected else f"holds {[row for row in rows if row not in expected]} among {len(rows)} rows"


def test_every_digit_of_the_state_matters(tmp_path: Path) -> None:
    job = Command(tmp_path / "job", "jsonl", PROMPTS)
    job.run(limit=7)
    path = sidecar_of(job.output) / "state.json"
    state = path.read_bytes()
    for place in range(len(state)):
        if state[place : place + 1].isdigit():
            path.write_bytes(state[:place] + (b"7" if state[place] != 0x37 else b"3") + state[place + 1 :])
            with pytest.raises(RefusedError, match=r"state\.json is missing or damaged"):
                job.run()
    path.write_bytes(state)
    assert job.run() == 3


def test_any_edit_of_any_file_while_a_retry_takes_effect_leaves_old_or_new_rows(tmp_path: Path, kind: str) -> None:
    """Between the commit that announces the rewritten rows and their move into place."""
    job = Command(tmp_path / "job", kind, PROMPTS)
    job.run()
    old = job.decoded()
    job.fails = False
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ZeroDivisionError):
        patch.setattr(Output, "end_swap", lambda *_: 1 / 0)
        patch.setattr(PartsOutput, "end_swap", lambda *_: 1 / 0)
        patch.setattr(FileOutput, "end_swap", lambda *_: 1 / 0)
        job.run(retry_errors=True)
    copied(tmp_path / "swap", job.directory)
    job.run()
    new = job.decoded()
    assert [row["completion"] for row in new] == [f"re:{prompt}" for prompt in PROMPTS]
    wrong: list[str] = []
    copied(job.directory, tmp_path / "swap")
    paths = [file.relative_to(job.directory) for file in job.files if file.suffix != ".new"]
    for path in paths:
        for how in [*EDITS, "deleted"]:
            copied(job.directory, tmp_path / "swap")
            if how == "deleted":
                (job.directory / path).unlink()
            elif not edit(job.directory / path, how):
                continue
            fault = outcome(job, new) and outcome(job, old)
            if fault:
                wrong.append(f"{path} {how}: {fault}")
    assert not wrong, f"{len(wrong)} outcomes:\n" + "\n".join(wrong)


def test_verify_finds_every_edit_of_what_was_committed(tmp_path: Path, kind: str) -> None:
    templates = dict(stages(tmp_path, kind))
    job = Command(tmp_path / "job", kind, PROMPTS)
    missed: list[str] = []
    for stage, template in templates.items():
        copied(job.directory, template)
        assert job.run(verify=True) == 0
        for path in [file.relative_to(job.directory) for file in job.files]:
            if path.name in ("marks", "published", "summary.json", "run.json") or path.name.startswith("wal-"):
                continue
            for how in ("halved", "flipped at the start", "flipped in the middle", "lines swapped"):
                copied(job.directory, template)
                stat = (job.directory / path).stat()
                if not edit(job.directory / path, how):
                    continue
                os.utime(job.directory / path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # even so
                with contextlib.suppress(RefusedError):
                    job.run(verify=True)
                    missed.append(f"{stage}: {path} {how}")
    assert not missed, "\n".join(missed)


def test_repair_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Command(tmp_path / "job", "jsonl", PROMPTS)
    job.run()
    os.truncate(job.output.path, 1500)
    capsys.readouterr()

    job.run()

    kept = 11 - len(job.asked)
    assert 0 < kept < 11
    assert f"out.jsonl was cut short: {kept} of 11 rows are whole, the rest is redone" in capsys.readouterr().err


# -- overwrite --------------------------------------------------------------------------------------------------------


def contents(config: OutputConfig) -> list[str]:
    """Completions that stand under the output's name and under those of its backups, as far as they can be read."""
    path = Path(config.path)
    found: list[str] = []
    for place in path.parent.glob(f"{path.name}*"):
        if not place.name.endswith(".cbgen"):
            with contextlib.suppress(OSError, ValueError):
                slash = "/" if place.is_dir() else ""
                rows = decoded(replace(config, path=f"{place}{slash}", format=config.resolved_format))
                found += [str(row["completion"]) for row in rows]
    return found


def test_killed_at_every_call_of_an_overwrite_the_old_rows_are_there_and_never_among_the_new(
    tmp_path: Path, kind: str
) -> None:
    for call, directory, it in deaths(tmp_path, least=10):
        job = Mini(directory, kind, 7)
        job.work()
        old = contents(job.config)
        job.config = replace(job.config, overwrite=True)
        with it.running():
            job.work(give=long_answer, stop_after=5)
        job.config = replace(job.config, overwrite=False)

        begun = contents(job.config)
        with contextlib.suppress(RefusedError):  # as good an answer as going on
            job.work(give=long_answer)
            completions = [str(row["completion"]) for row in job.decoded()]
            assert len(set(completions)) == 1 or completions == old, f"killed at call {call}"
        assert set(old) <= set(contents(job.config)) | set(begun), f"killed at call {call}"


def test_overwrite_makes_a_backup_of_a_directory_with_all_its_parts(tmp_path: Path) -> None:
    job = Command(tmp_path / "job", "parquet-parts", PROMPTS)
    job.run()
    before = {path.name: path.read_bytes() for path in (job.directory / "out").glob("part-*")}

    job.run(overwrite=True)

    (backup,) = job.directory.glob("out.backup-*")
    assert {path.name: path.read_bytes() for path in backup.iterdir()} == before
    assert len(job.asked) == len(PROMPTS)
    assert [row["prompt"] for row in job.decoded()] == PROMPTS


# -- where an output may be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["same", "relative", "symlink", "hardlink", "dots"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_output_that_is_the_input_is_refused_and_the_input_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, overwrite: bool, suffix: str
) -> None:
    job = Command(tmp_path / "job", "carried" if suffix == ".parquet" else "jsonl", PROMPTS)
    before = job.input.read_bytes()
    monkeypatch.chdir(job.directory)
    paths = {"same": str(job.input), "relative": job.input.name, "dots": f"../job/./{job.input.name}"}
    path = paths.get(link, f"link{suffix}")
    if link == "symlink":
        Path(path).symlink_to(job.input)
    elif link == "hardlink":
        os.link(job.input, path)

    with pytest.raises(CbgenError) as refused:
        job.run(path=path, overwrite=overwrite)

    assert "\n" not in str(refused.value)
    assert job.input.read_bytes() == before
    assert job.asked == []


@pytest.mark.parametrize("place", ["in", "in/", "./in/", "in/deeper/", "in/out.jsonl", "in/out.parquet"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_output_in_the_input_directory_is_no_input_of_it_and_moves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, overwrite: bool
) -> None:
    """Refused, or right: and then right once more, when the output is there already."""
    job = Command(tmp_path / "job", "jsonl", PROMPTS)
    monkeypatch.chdir(job.directory)
    Path("in").mkdir()
    job.input.rename("in/rows.jsonl")
    before = Path("in/rows.jsonl").read_bytes()

    for _ in range(2):
        with contextlib.suppress(RefusedError, InputError):
            job.run(source="in", path=place, overwrite=overwrite, rows_per_part=4)
            rows = decoded(replace(job.output, path=place, rows_per_part=4))
            assert [row["prompt"] for row in rows if "completion" in row] == PROMPTS
        assert Path("in/rows.jsonl").read_bytes() == before


def test_what_is_added_to_a_finished_output_is_never_cut_away(tmp_path: Path) -> None:
    job = Command(tmp_path / "job", "jsonl", PROMPTS)
    assert job.run() == 3
    (output,) = [file for file in job.files if file.name == "out.jsonl"]
    whole = output.read_bytes()
    output.write_bytes(whole + b'{"my": "notes"}\n')
    for options in ({}, {"verify": True}):
        with pytest.raises(RefusedError, match="was edited"):
            job.run(**options)
    assert output.read_bytes() == whole + b'{"my": "notes"}\n'
    output.write_bytes(whole + bytes(100))  # as a power cut may leave it
    assert job.run() == 3
    assert output.read_bytes() == whole
