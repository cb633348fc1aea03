"""Fixtures of all tests of outputs: a fast directory, and every kind of output in turn."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.output.machine import fast_directory
from tests.output.miniature import KINDS


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with fast_directory(tmp_path) as directory:
        yield directory


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
