"""Paths and URIs, credentials kept out of messages, retries, and files published whole or not at all."""

import os
from pathlib import Path

import pytest

from cbgen.data import addresses, files, filesystems
from cbgen.errors import InputError


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("s3://KEY:SECRET@bucket/a.jsonl", "s3://***@bucket/a.jsonl"),
        ("s3://KEY@bucket/a", "s3://***@bucket/a"),
        ("gs://b/a?access_token=abc&region=x", "gs://b/a?access_token=***&region=x"),
        ("abfs://c@account/x?sig=abc%3D&sp=r", "abfs://***@account/x?sig=***&sp=r"),
        ("https://h/x?X-Amz-Signature=1f&X-Amz-Credential=AB", "https://h/x?X-Amz-Signature=***&X-Amz-Credential=***"),
        ("s3://b/a?account_key=xyz", "s3://b/a?account_key=***"),
        ("s3://b/a?PassWord=xyz'", "s3://b/a?PassWord=***'"),
        ("token hf_abcdefghijkl failed", "token *** failed"),
        ("sk-proj-abc_def-123456", "***"),
        ("id AKIAIOSFODNN7EXAMPLE.", "id ***."),
        (
            "s3://bucket/email@example.com/monkey.jsonl?region=eu",
            "s3://bucket/email@example.com/monkey.jsonl?region=eu",
        ),
        ("/data/task-list/hf_x.jsonl", "/data/task-list/hf_x.jsonl"),
    ],
)
def test_redact(text: str, clean: str) -> None:
    assert addresses.redact(text) == clean


def test_redacting_twice_changes_nothing() -> None:
    once = addresses.redact("s3://KEY:SECRET@bucket/a?token=b&region=c")

    assert addresses.redact(once) == once


@pytest.mark.parametrize(
    ("path", "expected"),
    [("s3://b/a", True), ("az://b", True), ("fsspec+memory://a", True), ("a.jsonl", False), ("/a:b//c", False)],
)
def test_is_uri(path: str, expected: bool) -> None:
    assert addresses.is_uri(path) is expected


def test_file_uri_is_local() -> None:
    assert addresses.local_path("file:///a%20b/c") == Path("/a b/c")
    assert addresses.local_path("x/y") == Path("x/y")
    assert addresses.local_path("s3://b/a") is None


def test_child_of_a_uri_keeps_its_options_and_is_quoted() -> None:
    assert addresses.child_path("s3://b/d/?region=x", "a b#c?.jsonl") == "s3://b/d/a%20b%23c%3F.jsonl?region=x"
    assert addresses.base_name("s3://b/d/a%20b%23c%3F.jsonl?region=x") == "a b#c?.jsonl"


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("ftp://host/a", "ftp:// is not known; known are s3://"),
        ("s3://bucket/a?regoin=x", "'regoin' is no option"),
        ("s3:///a", "no bucket"),
    ],
)
def test_uri_that_cannot_be_opened_is_an_input_error(uri: str, words: str) -> None:
    with pytest.raises(InputError, match="cannot open") as raised:
        filesystems.open_filesystem(uri)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("gs://anonymous@bucket/a b.jsonl", "bucket/a b.jsonl"),
        ("gcs://anonymous@bucket/a%20b.jsonl", "bucket/a b.jsonl"),
        ("abfs://container@account.dfs.core.windows.net/d/a%20b", "container/d/a b"),
        ("az://container@account.dfs.core.windows.net/d/a", "container/d/a"),
        ("hf://datasets/user/name/a%20b.jsonl", "datasets/user/name/a b.jsonl"),
    ],
)
def test_other_stores_are_reached_by_their_schemes(uri: str, path: str) -> None:
    assert filesystems.open_filesystem(uri)[1] == path


def test_web_without_aiohttp_is_an_input_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(InputError, match="needs the package aiohttp; install it, or download"):
        filesystems.open_filesystem("https://KEY:SECRET@host/a")


# -- retries ----------------------------------------------------------------------------------------------------------


def test_passing_failures_are_tried_again_with_growing_pauses() -> None:
    outcomes: list[object] = [OSError("a"), OSError("b"), OSError("c"), OSError("d"), 7]
    pauses: list[float] = []

    def action() -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    assert filesystems.with_retries(action, pauses.append) == 7
    assert len(pauses) == 4
    for number, pause in enumerate(pauses):
        assert 0.25 * 2**number <= pause <= 0.75 * 2**number


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (OSError("AWS Error SLOW_DOWN during GetObject"), 5),
        (TimeoutError("slow"), 5),
        (FileNotFoundError("gone"), 1),
        (PermissionError("no"), 1),
        (OSError("AWS Error ACCESS_DENIED during HeadObject operation"), 1),
        (OSError("AWS Error NO_SUCH_BUCKET during PutObject"), 1),
    ],
)
def test_failures_for_good_are_not_tried_again(error: OSError, tries: int) -> None:
    calls: list[int] = []

    def action() -> None:
        calls.append(1)
        raise error

    with pytest.raises(OSError) as raised:  # noqa: PT011
        filesystems.with_retries(action, lambda _: None)
    assert raised.value is error
    assert len(calls) == tries


# -- local files ------------------------------------------------------------------------------------------------------


def test_local_publish_replaces_the_whole_file(tmp_path: Path) -> None:
    source, target = tmp_path / "made", tmp_path / "out"
    source.write_bytes(b"new")
    target.write_bytes(b"old and longer")

    files.publish(str(target), source)

    assert target.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["made", "out"]


def test_local_publish_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "made", tmp_path / "out"
    source.write_bytes(b"new")
    target.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.publish(str(target), source)

    assert target.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["made", "out"]


def test_local_files_by_path_and_by_uri(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/a%20b"
    files.write_bytes(uri, b"abc")

    assert (tmp_path / "a b").read_bytes() == b"abc"
    assert files.read_bytes(uri) == files.read_bytes(str(tmp_path / "a b")) == b"abc"
    assert files.exists(uri)
    assert files.list_names(str(tmp_path)) == files.list_names(f"file://{tmp_path}") == ["a b"]
    assert files.signature(uri) == [3, (tmp_path / "a b").stat().st_mtime_ns]
    files.delete(uri)
    files.delete(uri)
    assert not files.exists(uri)
    assert files.list_names(str(tmp_path / "nowhere")) == []
