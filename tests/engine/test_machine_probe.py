"""The probe of a device, with a clock that is told what to show and a stand-in for torch's part of CUDA."""

import pytest
import torch

from cbgen.engine import machine_probe
from cbgen.engine.machine_probe import (
    MachineSpeed,
    free_device_memory,
    measure_speed,
    peak_memory_of,
    prefer_growing_segments,
    release_cached_memory,
    speed_of,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_best_of_a_few_runs_counts_and_those_that_wake_the_device_do_not(dtype):
    waking, copies, products = [0.004, 0.001, 0.006], [0.5, 0.25, 1.0, 0.5], [0.01, 0.02, 0.04, 0.02]
    seconds = iter([*waking, *copies, 0.02, *products])
    results = []

    def seconds_of(run):
        results.append(run())
        return next(seconds)

    speed = speed_of(CPU, dtype, seconds_of, copied_bytes=1000, matrix_size=10)
    assert speed == MachineSpeed(bandwidth=2 * 1000 / 0.25, flops=2 * 10**3 / 0.01)
    assert next(seconds, None) is None
    copy, product = results[0], results[-1]
    assert (copy.nbytes, product.shape, product.dtype) == (1000, (10, 10), dtype)
    assert product.abs().max() > 0


def test_runs_that_take_no_time_wake_nothing_and_end():
    results = []
    speed_of(CPU, torch.float32, lambda run: results.append(run()) or 1e-5, copied_bytes=8, matrix_size=2)
    assert len(results) == 2 * (32 + 4)


def test_other_devices_are_not_measured():
    assert measure_speed(CPU, torch.float32) is None


def test_balance():
    """Of an H200: 700 TFLOP/s over 4.2 TB/s are 167 operations a byte; a bfloat16 weight takes 2 bytes and gives 2."""
    assert MachineSpeed(4.2e12, 700e12).balanced_tokens(2) == pytest.approx(166.7, abs=0.1)
    assert MachineSpeed(4.2e12, 50e12).balanced_tokens(4) == pytest.approx(23.8, abs=0.1)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_allocator_settings_stay(name):
    environment = {name: "max_split_size_mb:64"}
    prefer_growing_segments(environment)
    assert environment == {name: "max_split_size_mb:64"}


def test_segments_grow_where_nothing_is_said():
    environment = {"PATH": "/bin"}
    prefer_growing_segments(environment)
    assert environment == {"PATH": "/bin", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


# -- calls of torch.cuda, on a stand-in -------------------------------------------------------------------------------

CUDA = torch.device("cuda")


@pytest.fixture
def calls(monkeypatch):
    """A device of 100 bytes, of which 60 are free and 30 were allocated at the peak; what was called, in order."""
    calls = []
    counts = {"memory_allocated": 10, "max_memory_allocated": 30, "reset_peak_memory_stats": None}
    for name, value in counts.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name, value=value: calls.append(name) or value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    return calls


def test_what_the_allocator_keeps_is_free_too(calls):
    assert free_device_memory(CUDA) == 60
    assert calls == ["empty_cache"]


def test_the_peak_is_that_of_the_call(calls):
    assert peak_memory_of(lambda: calls.append("run"), CUDA) == 20
    assert calls == ["memory_allocated", "reset_peak_memory_stats", "run", "max_memory_allocated"]


def test_a_cpu_has_nothing_to_give_back(calls):
    release_cached_memory(CPU)
    assert calls == []


def test_a_device_without_room_for_the_probe_has_an_unknown_speed(calls, monkeypatch):
    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(machine_probe, "speed_of", no_room)
    assert measure_speed(CUDA, torch.bfloat16) is None
    monkeypatch.setattr(machine_probe, "speed_of", lambda *_: MachineSpeed(2.0, 3.0))
    assert measure_speed(CUDA, torch.bfloat16) == MachineSpeed(2.0, 3.0)
    assert calls == ["empty_cache", "empty_cache"]


def test_events_count_milliseconds(monkeypatch):
    log = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            assert isinstance(end, Event)
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert machine_probe._cuda_seconds(lambda: log.append("run")) == 0.25
    assert log == ["record", "run", "record", "wait"]
