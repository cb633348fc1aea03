"""How many threads a process takes."""

import os
import subprocess
import sys

import psutil
import pytest

from cbgen.engine.cpu_settings import choose_threads


@pytest.fixture
def sixteen_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 32 if logical else 16)


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 16), ("200000 100000", 2), ("250000 100000", 3), ("50000 100000", 1), ("", 16)],
)
def test_a_container_s_quota_bounds_the_threads(quota, threads, sixteen_cores, tmp_path):
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert choose_threads(tmp_path) == threads


@pytest.mark.parametrize(("quota", "threads"), [(-1, 16), (400000, 4)])
def test_quota_of_older_kernels(quota, threads, sixteen_cores, tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert choose_threads(tmp_path) == threads


def test_hardware_threads_do_not_count_and_affinity_does(sixteen_cores, monkeypatch, tmp_path):
    assert choose_threads(tmp_path) == 16
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert choose_threads(tmp_path) == 2


def test_the_environment_has_the_last_word():
    code = (
        "import torch; from cbgen.engine.cpu_settings import apply_cpu_settings; apply_cpu_settings(); "
        "print(torch.get_num_threads())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert result.stdout.strip() == "1", result.stderr
