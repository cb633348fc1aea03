"""`cbgen doctor`: what is found on machines of every kind, the write test, and that nothing stays behind."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbgen import cli
from cbgen.doctor import disks, examination, hardware, software
from cbgen.doctor.check import Check
from cbgen.doctor.software import TorchFacts

GPU = {"name": "GPU", "free": 70 << 30, "total": 80 << 30}


@pytest.fixture
def probed(monkeypatch):
    """No second Python: what torch would say."""
    monkeypatch.setattr(examination, "probe_torch", lambda: TorchFacts(version="2.13.0+cpu"))
    monkeypatch.setattr(examination, "find_driver", lambda: None)


def run(*arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["doctor", *arguments])
    return exit_.value.code


# -- the command ------------------------------------------------------------------------------------------------------


def test_text_and_json_say_the_same(probed, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run() == 0
    text = capsys.readouterr().out
    assert run("--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["version"], document["ok"]) == (1, True)
    names = [check["name"] for check in document["checks"]]
    assert {"python", "packages", "torch", "device", "bfloat16", "cores", "memory", "model cache", "hub"} <= set(names)
    for check in document["checks"]:
        assert check["status"] in ("ok", "warn", "fail")
        assert f"{check['name']} " in text
    assert text.splitlines()[-1].endswith(" 0 fail")
    assert list(tmp_path.iterdir()) == []


def test_what_fails_is_exit_code_5(probed, capsys, tmp_path):
    assert run("--output", str(tmp_path / "no" / "out.jsonl")) == 5
    assert "create it first" in capsys.readouterr().out
    assert run("--json", "--output", str(tmp_path / "no" / "out.jsonl")) == 5
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_an_object_store_is_not_tried_and_its_secret_not_shown(probed, capsys):
    assert run("--output", "s3://AKIAIOSFODNN7EXAMPLE:hunter2@bucket/x") == 0
    out = capsys.readouterr().out
    assert "not tried" in out
    assert "hunter2" not in out


def test_the_token_is_never_shown(probed, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    run()
    run("--json")
    out = capsys.readouterr().out
    assert "a token is set" in out
    assert "verysecret" not in out


def test_it_runs_without_torch(tmp_path):
    """The real command, in a Python where torch, transformers and psutil cannot be imported."""
    blocked = ("torch", "transformers", "psutil")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name in {blocked!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}')\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "cbgen", "doctor", "--json"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.stderr == ""
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["torch"]["status"] == "fail"
    assert "pip install torch" in checks["torch"]["message"]
    assert result.returncode == 5


def test_torch_is_really_asked():
    facts = software.probe_torch()
    assert facts.error == ""
    assert facts.version.startswith("2.")


# -- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "driver", "status", "says"),
    [
        (TorchFacts(error="ModuleNotFoundError: No module named 'torch'"), None, "fail", "not installed"),
        (TorchFacts(error="OSError: libtorch.so: cannot open"), None, "fail", "reinstall"),
        (TorchFacts(error="loading it took more than 30 seconds"), None, "fail", "30 seconds"),
        (TorchFacts(version="2.13.0+cpu"), None, "ok", "CPU build"),
        (TorchFacts(version="2.13.0+cpu"), "550.54", "warn", "--torch-backend=auto"),
        (TorchFacts(version="2.13.0", cuda="13.0"), None, "warn", "no NVIDIA driver"),
        (TorchFacts(version="2.13.0", cuda="13.0", device_error="too old"), "470.1", "warn", "470.1 may be too old"),
        (TorchFacts(version="2.13.0", cuda="13.0", devices=[GPU]), "580.1", "ok", "driver 580.1"),
        (TorchFacts(version="2.13.0", cuda="6.4", devices=[GPU]), None, "ok", "6.4"),
    ],
)
def test_torch_against_the_driver(facts, driver, status, says):
    check = software.check_torch(facts, driver)
    assert check.status == status
    assert says in check.message


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import os; os._exit(7)", "exit code 7"),
        ("print('no json')", "exit code 0"),
        ("import time; time.sleep(60)", "more than"),
        ("print('a warning'); print('{\"version\": \"2.9\"}')", ""),
    ],
)
def test_a_torch_that_crashes_or_hangs_is_a_finding(monkeypatch, program, says):
    monkeypatch.setattr(software, "_PROBE", program)
    monkeypatch.setattr(software, "_PROBE_SECONDS", 1.0)
    facts = software.probe_torch()
    assert says in facts.error
    assert bool(facts.error) is bool(says)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build", "580.95.05"),
    ],
)
def test_the_driver_is_read_from_the_kernel(tmp_path, text, version):
    (tmp_path / "version").write_text(text + "\nGCC version: gcc 12\n")
    assert software.find_driver(tmp_path / "version") == version


def test_the_driver_is_asked_from_its_tool(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 535.1\necho 535.1\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert software.find_driver(tmp_path / "none") == "535.1"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert software.find_driver(tmp_path / "none") is None
    (tmp_path / "nvidia-smi").unlink()
    assert software.find_driver(tmp_path / "none") is None


def test_packages_that_are_missing_or_old_are_named(monkeypatch):
    wanted = ["good>=1.2", "old>=2.10", "missing>=1", "torch>=2.11", "extra>=1 ; extra == 'dev'"]
    monkeypatch.setattr(software.importlib.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(software, "_version_of", {"good": "1.10rc1", "old": "2.9.1+cpu"}.get)
    old, missing, good = software.check_packages()
    assert (old.status, missing.status, good) == ("fail", "fail", Check("packages", "ok", "good 1.10rc1"))
    assert "pip install -U old" in old.message
    assert "missing is not installed" in missing.message


# -- hardware ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "status", "text"),
    [
        (("3.6.0", "/usr/bin/gcc", True), "ok", "Triton 3.6.0"),
        ((None, "/usr/bin/gcc", True), "warn", "run `pip install triton`"),
        (("3.6.0", None, True), "warn", "install gcc, or set CC"),
        (("3.6.0", "/usr/bin/gcc", False), "warn", "install python3-dev"),
    ],
)
def test_kernels_for_a_gpu_need_triton_and_a_compiler(facts, status, text):
    version, compiler, has_headers = facts
    check = software.check_triton(version, compiler, has_headers=has_headers)
    assert check.status == status
    assert text in check.message


@pytest.mark.parametrize("devices", [[], [GPU]], ids=["no GPU", "a GPU"])
def test_triton_is_looked_at_where_there_is_a_gpu(devices, monkeypatch):
    monkeypatch.setattr(examination, "probe_torch", lambda: TorchFacts(version="2.13.0", cuda="13.0", devices=devices))
    monkeypatch.setattr(examination, "find_driver", lambda: "580.1")
    assert ("triton" in [check.name for check in examination.examine()]) == bool(devices)


def test_devices_are_listed_with_their_memory():
    free, busy = hardware.check_devices(TorchFacts(devices=[GPU, {**GPU, "free": 10 << 30}]))
    assert (free.status, busy.status) == ("ok", "warn")
    assert free.message == "cuda:0 is GPU, 70.0 GiB of 80.0 GiB free"
    assert [check.message for check in hardware.check_devices(TorchFacts())] == ["cpu"]


@pytest.mark.parametrize(
    ("flags", "has_gpu", "status"),
    [
        ({"fpu", "amx_bf16"}, False, "ok"),
        ({"asimd", "bf16"}, False, "ok"),
        ({"fpu", "avx2"}, False, "warn"),
        ({"fpu"}, True, "ok"),
        (None, False, "ok"),
    ],
)
def test_bfloat16_of_the_cpu(flags, has_gpu, status):
    assert hardware.check_bfloat16(flags, has_gpu=has_gpu).status == status


def test_cpu_flags_of_both_families(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor: 0\nflags\t\t: fpu avx512_bf16\n\nprocessor: 1\nflags\t: fpu\n")
    assert hardware.find_cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx512_bf16"}
    (tmp_path / "cpuinfo").write_text("Features\t: fp asimd bf16\n")
    assert hardware.find_cpu_flags(tmp_path / "cpuinfo") == {"fp", "asimd", "bf16"}
    assert hardware.find_cpu_flags(tmp_path / "none") is None


def test_a_container_with_fewer_cores_than_are_visible(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert hardware.check_cores(8, None) == Check("cores", "ok", "8")
    check = hardware.check_cores(64, 3.5)
    assert check.status == "warn"
    assert "OMP_NUM_THREADS=3" in check.message
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert hardware.check_cores(64, 3.5).status == "ok"


def test_limits_of_control_groups_are_the_least_of_all_levels(tmp_path):
    (tmp_path / "self").write_text("0::/a/b\n")
    (tmp_path / "root/a/b").mkdir(parents=True)
    (tmp_path / "root/a/b/cpu.max").write_text("max 100000\n")
    (tmp_path / "root/a/cpu.max").write_text("250000 100000\n")
    (tmp_path / "root/a/b/memory.max").write_text("max\n")
    (tmp_path / "root/memory.max").write_text("1000\n")
    paths = (tmp_path / "root", tmp_path / "self")
    assert hardware.find_cpu_quota(*paths) == 2.5
    assert hardware._find_memory_limit(*paths) == 1000
    assert hardware.find_cpu_quota(tmp_path / "x", tmp_path / "y") is None
    (tmp_path / "v1/cpu").mkdir(parents=True)
    (tmp_path / "v1/cpu/cpu.cfs_quota_us").write_text("150000")
    (tmp_path / "v1/cpu/cpu.cfs_period_us").write_text("100000")
    assert hardware.find_cpu_quota(tmp_path / "v1", tmp_path / "y") == 1.5
    (tmp_path / "v1/cpu/cpu.cfs_quota_us").write_text("-1")
    assert hardware.find_cpu_quota(tmp_path / "v1", tmp_path / "y") is None


def test_little_memory_is_a_warning():
    assert hardware.check_memory(16 << 30, 8 << 30, None).status == "ok"
    assert hardware.check_memory(16 << 30, 1 << 30, None).status == "warn"
    check = hardware.check_memory(16 << 30, 8 << 30, 1 << 30)
    assert check.status == "warn"
    assert "may hold 1.0 GiB" in check.message


# -- disks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "status"), [(50 << 30, "ok"), (5 << 30, "warn"), (1 << 20, "fail")])
def test_free_space(monkeypatch, tmp_path, free, status):
    usage = disks.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disks.shutil, "disk_usage", lambda path: usage._replace(free=free))
    check = disks.check_free_space("disk", tmp_path / "not" / "yet" / "there", enough=10 << 30)
    assert check.status == status
    assert str(tmp_path) in check.message


def test_the_cache_follows_the_hubs_variables(monkeypatch, tmp_path):
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disks.hub_cache() == f"{tmp_path}/.cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert disks.hub_cache() == f"{tmp_path}/x/huggingface/hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "h"))
    assert disks.hub_cache() == f"{tmp_path}/h/hub"
    assert not disks._has_token()
    (tmp_path / "h").mkdir()
    (tmp_path / "h/token").write_text("hf_x")
    assert disks._has_token()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "c"))
    assert disks.hub_cache() == f"{tmp_path}/c"


def test_the_cache_is_described(monkeypatch, tmp_path):
    assert "made with the first model" in disks.check_cache(tmp_path / "hub").message
    (tmp_path / "models--a--b").mkdir()
    assert disks.check_cache(tmp_path).message == f"{tmp_path} holds 1 model"
    monkeypatch.setattr(disks.os, "access", lambda path, mode: False)
    assert disks.check_cache(tmp_path).status == "fail"


def test_offline_is_said(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "only models in the cache" in disks.check_hub().message
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert "only models in the cache" not in disks.check_hub().message


def test_where_an_output_would_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert disks.output_directory(None) == tmp_path
    assert disks.output_directory("out.jsonl") == Path()
    assert disks.output_directory(str(tmp_path)) == tmp_path
    assert disks.output_directory(str(tmp_path / "x" / "out.jsonl")) == tmp_path / "x"
    assert disks.output_directory("s3://b/x") is None


def test_writing_works_and_leaves_nothing(tmp_path):
    assert disks.check_writing(tmp_path).status == "ok"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["fsync", "open"])
def test_a_disk_that_fails_is_said_and_nothing_stays(monkeypatch, tmp_path, step):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(disks.os, "fsync", fail) if step == "fsync" else patch.setattr(disks.Path, "open", fail)
        check = disks.check_writing(tmp_path)
    assert check.status == "fail"
    assert "No space left" in check.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["refused", "ignored"])
def test_a_filesystem_without_locks_is_a_warning(monkeypatch, tmp_path, kind):
    def flock(file, operation):
        if kind == "refused":
            raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(disks.fcntl, "flock", flock)
    check = disks.check_writing(tmp_path)
    assert check.status == "warn"
    assert "file locks" in check.message
    assert list(tmp_path.iterdir()) == []
