"""Both builds of the library: for this CPU, and plain C++."""

import pytest

from cbgen.engine.native.library import open_library


@pytest.fixture(scope="session", params=["cpu", "plain"])
def library(request):
    return open_library(print, plain=request.param == "plain")
