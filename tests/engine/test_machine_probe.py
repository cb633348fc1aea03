"""The probe of a device, with a clock that is told what to show; what it does on CUDA needs a GPU."""

import pytest
import torch

from cbgen.engine.machine_probe import MachineSpeed, measure_speed, prefer_growing_segments, speed_of

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
