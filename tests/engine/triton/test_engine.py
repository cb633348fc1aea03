"""The engine on Triton's operators, all of it but the GPU: rows answer as with the reference, eager and recorded."""

import numpy as np
import pytest

from cbgen.config import EngineConfig
from cbgen.engine.engine import Engine
from cbgen.engine.operators.triton import TritonOperators
from cbgen.engine.preparation import prepare
from cbgen.params import SamplingParams
from tests.engine.parity import load
from tests.engine.test_rounds import Recorder, run, tokens
from tests.models import VOCAB_SIZE, build_model

# Ratios 1 to 4 with head norms, a window below the prompts, soft-caps, sinks; joined layers and layers as they are.
ARCHITECTURES = ["llama-ratio-3", "qwen3-ratio-4", "gemma2-softcap-window-8", "gpt-oss-sinks-window-8"]


def make_rows():
    rng = np.random.default_rng(0)
    shared = rng.integers(3, VOCAB_SIZE, 16)
    settings = [
        {"max_tokens": 4},
        {"max_tokens": 4, "temperature": 1.0, "top_k": 5},
        {"max_tokens": 5, "temperature": 0.8, "top_p": 0.7, "min_p": 0.05, "repetition_penalty": 1.3},
        {"max_tokens": 4, "min_tokens": 3, "stop_token_ids": tuple(range(3, VOCAB_SIZE, 9))},
    ]
    rows = []
    for index, length in enumerate((1, 11, 7, 12, 5)):
        prompt = np.concatenate([shared[: 16 * (index % 3 == 1)], rng.integers(3, VOCAB_SIZE, length)])
        rows.append((prompt.astype(np.int32), SamplingParams(**settings[index % 4]), False))
    return rows


@pytest.fixture(scope="module", params=ARCHITECTURES)
def models(request, tmp_path_factory):
    """(on the reference's operators, on Triton's)"""
    directory = build_model(request.param, tmp_path_factory.mktemp("m"))
    plain = prepare(load(directory), {"native"}, print)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cbgen.engine.preparation.choose_operators", lambda *_: TritonOperators((9, 0), 132))
        return plain, prepare(load(directory), set(), print)


def test_rows_answer_as_with_plain_operators(models):
    """Recorded with the models whose layers are joined, the operators one by one with the others."""
    plain, ours = models
    is_recorded = "layers" in ours.fused
    assert ours.operators.name == "triton"
    rows = make_rows()
    expected = tokens(run(Engine(plain, EngineConfig(max_num_seqs=4, max_model_len=64)), rows))
    config = EngineConfig(max_num_seqs=3, max_model_len=64, max_num_batched_tokens=16, decode_steps=4)
    engine = Engine(ours, config, capture=Recorder() if is_recorded else None)
    engine._run = lambda output: pytest.fail("a round was done as a step")
    assert tokens(run(engine, rows)) == expected
    assert engine.stats.graphs_off == ""
