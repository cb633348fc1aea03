"""The kernels pass the trials that a run makes at its start: they are not refused where they are right."""

import dataclasses

import pytest
import torch

from cbgen.engine.kv_cache import LayerSpec
from cbgen.engine.operators import trials
from cbgen.engine.operators.reference import ReferenceOperators
from cbgen.engine.operators.trials import ModelShape
from cbgen.engine.operators.triton import TritonOperators
from cbgen.engine.operators.trust import find_faults

PLAIN = LayerSpec(0, num_kv_heads=2, key_dim=16, value_dim=16, window=None, num_heads=6)
ODD = dataclasses.replace(PLAIN, value_dim=24, num_kv_heads=1, window=4096, softcap=20.0, has_sinks=True)


@pytest.mark.parametrize(
    ("layer", "dtype", "num_multiprocessors"), [(PLAIN, torch.float32, 10_000), (ODD, torch.float16, 1)]
)
def test_triton_operators_pass_every_trial(layer, dtype, num_multiprocessors, monkeypatch):
    monkeypatch.setattr(trials, "_UNSPLIT", 20)  # the interpreter takes milliseconds for each row
    monkeypatch.setattr(trials, "_UNIFORMS", (0.21, 0.78))
    shape = ModelShape(dtype, torch.device("cpu"), 72, 40, 500, (layer,))
    assert find_faults(TritonOperators((9, 0), num_multiprocessors), ReferenceOperators(), shape) == {}
