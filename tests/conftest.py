"""Shared set-up: no network, one clean environment per test, and the known-answer model built once."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for tiny models threads cost more than they give
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on CPU; Triton reads it when it is imported


@pytest.fixture(scope="session")
def chain_model(tmp_path_factory):
    from tests.chain import build_chain_model

    return build_chain_model(tmp_path_factory.mktemp("models") / "chain")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    prefixes = ("CBGEN_", "GITHUB_")  # a test must not report to the workflow that runs it
    kept = ("CBGEN_CACHE", "CBGEN_DISABLE")  # all tests must hold with optimizations switched off, too
    for name in [name for name in os.environ if name.startswith(prefixes) and name not in kept]:
        monkeypatch.delenv(name)
