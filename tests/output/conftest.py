"""Fixtures of all tests of outputs: a fast directory, and every kind of output in turn, small files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cbgen.output import journal, writers
from tests.output.machine import fast_directory
from tests.output.miniature import KINDS


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with fast_directory(tmp_path) as directory:
        yield directory


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments and appended pieces of a few records, so that short jobs see many of them."""
    monkeypatch.setattr(journal, "_SEGMENT_BYTES", 300)
    monkeypatch.setattr(writers, "_APPEND_BYTES", 200)
