"""Which models' decode steps hold still for a CUDA graph: nothing that the host waits for, nothing carried over."""

import pytest
import torch
from torch import nn

from cbgen.engine import loader
from cbgen.engine.loader import LoadedModel
from cbgen.engine.preparation import prepare
from tests.engine import parity
from tests.engine.capture_check import obstacle_to_capture
from tests.models import ARCHITECTURES, build_model


def _load(name, directory, *, joined=True, dtype="bfloat16", **changes) -> LoadedModel:
    loaded = parity.load(build_model(name, directory, **changes), dtype)
    return prepare(loaded, {"native", "packing", *([] if joined else ["fusion"])}, print)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_can_be_captured_joined_and_as_it_came(architecture, tmp_path):
    for joined in (True, False):
        assert obstacle_to_capture(_load(architecture, tmp_path, joined=joined)) == ""


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn", "linear", "llama3"])
def test_scaled_position_embeddings_can_be_captured(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    more = {
        "longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
        "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }
    assert obstacle_to_capture(_load("llama-ratio-1", tmp_path, rope_parameters=rope | more.get(kind, {}))) == ""


# -- that the check sees something ------------------------------------------------------------------------------------


def test_experts_one_by_one_cannot_be_captured(tmp_path):
    """Why it matters that transformers multiplies all experts in one grouped product."""
    loaded = _load("mixtral-moe", tmp_path)
    loaded.model.set_experts_implementation("eager")
    assert "nonzero" in obstacle_to_capture(loaded)


def test_a_model_that_may_look_cannot_be_captured(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "stop_looking", lambda model: None)
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    for name, changes in (("llama-ratio-1", {"rope_parameters": rope}), ("gpt2-learned-positions", {})):
        assert "meta tensors" in obstacle_to_capture(_load(name, tmp_path / name, **changes)), name


@pytest.mark.parametrize(
    ("look", "obstacle"),
    [
        (lambda x: x * x.sum().item(), "item()"),
        (lambda x: x * x[x > 0].sum(), "nonzero"),
        (lambda x: x + torch.tensor(1.0, dtype=x.dtype).to(x.device), "aten.to"),
        (lambda x: x + torch.zeros(x.shape[-1], dtype=x.dtype).to(x.device), "aten.to"),
    ],
    ids=["a value", "a shape that depends on values", "a number from the host", "a tensor from the host"],
)
def test_obstacles_are_found(look, obstacle, tmp_path):
    loaded = _load("llama-ratio-1", tmp_path)
    loaded.model.model.norm = Wrapped(loaded.model.model.norm, look)
    assert obstacle in obstacle_to_capture(loaded)


class Wrapped(nn.Module):
    def __init__(self, inner, look):
        super().__init__()
        self.inner, self.look = inner, look

    def forward(self, x):
        return self.inner(self.look(x))
