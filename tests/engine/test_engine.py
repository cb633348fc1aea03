"""The engine as a whole on tiny models: sampled rows in company, poisoned cache blocks, stops, statistics."""

import numpy as np
import pytest
import torch

from cbgen.config import EngineConfig
from cbgen.engine.engine import Engine
from cbgen.engine.kv_cache import bytes_per_block
from cbgen.params import SamplingParams
from tests.engine.parity import load
from tests.models import VOCAB_SIZE, build_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(build_model("llama-ratio-3", tmp_path_factory.mktemp("m")))


def make_prompts(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, rng.integers(1, 30)).astype(np.int32) for _ in range(num_rows)]


def answer(engine, prompts, params):
    for index, prompt in enumerate(prompts):
        engine.add(index, prompt, params[index % len(params)], random_stream=(1, index, 0))
    answers = {}
    while engine.has_unfinished:
        for generation in engine.step():
            answers[generation.index] = generation
        engine.check_integrity()
    return [answers[index] for index in range(len(prompts))]


def test_sampled_rows_do_not_depend_on_batch_chunks_or_preemption(loaded):
    params = [
        SamplingParams(max_tokens=20, temperature=0.8, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, top_k=5, min_tokens=6),
        SamplingParams(max_tokens=16),
        SamplingParams(max_tokens=20, temperature=1.0, top_p=0.7, repetition_penalty=1.3),
    ]
    prompts = make_prompts(16)
    alone = answer(Engine(loaded, EngineConfig(max_num_seqs=1)), prompts, params)
    pool = 5 * bytes_per_block(loaded.layers, 16, loaded.dtype)
    small = EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=9,
        max_model_len=64,
        kv_cache_memory=pool,
        disabled=frozenset({"prediction"}),
    )
    for config in (EngineConfig(max_num_seqs=16), EngineConfig(max_num_seqs=5, max_num_batched_tokens=7), small):
        engine = Engine(loaded, config)
        assert answer(engine, prompts, params) == alone, config
    assert engine.stats.num_preemptions > 0


def test_what_a_failed_row_left_in_the_cache_reaches_no_other_row(loaded, monkeypatch):
    """Blocks are reused without being cleared; stale NaN in them must stay invisible."""
    prompts = make_prompts(6)
    params = [SamplingParams(max_tokens=20, ignore_eos=True)]
    expected = answer(Engine(loaded, EngineConfig(max_num_seqs=2)), prompts, params)
    engine = Engine(loaded, EngineConfig(max_num_seqs=2))
    for spec in loaded.layers:
        for cache in engine._runner.kv_cache.layer(spec.layer_idx):
            cache.fill_(float("nan"))
    assert answer(engine, prompts, params) == expected


def test_a_row_of_nan_ends_alone(loaded):
    weight = loaded.model.get_input_embeddings().weight
    before = weight[VOCAB_SIZE - 1].clone()
    prompts = [p[p != VOCAB_SIZE - 1] for p in make_prompts(4) if len(p) > 1]
    params = [SamplingParams(max_tokens=4, ignore_eos=True)]
    expected = answer(Engine(loaded, EngineConfig(max_num_seqs=4)), prompts, params)
    with torch.no_grad():
        weight[VOCAB_SIZE - 1] = float("nan")
    try:
        poisoned = [np.array([5, VOCAB_SIZE - 1, 6], dtype=np.int32), *prompts]
        answers = answer(Engine(loaded, EngineConfig(max_num_seqs=2)), poisoned, params)
    finally:
        with torch.no_grad():
            weight[VOCAB_SIZE - 1] = before
    assert answers[0].finish_reason == "nan_logits"
    assert [a.token_ids for a in answers[1:]] == [a.token_ids for a in expected]


def test_only_rows_that_sample_get_logits(loaded, monkeypatch):
    engine = Engine(loaded, EngineConfig(max_num_seqs=4, max_num_batched_tokens=8))
    shapes = []
    sample = engine._runner.sampler.sample
    monkeypatch.setattr(
        engine._runner.sampler,
        "sample",
        lambda logits, rows: shapes.append((*logits.shape, len(rows))) or sample(logits, rows),
    )
    answer(engine, [np.arange(3, 23, dtype=np.int32), np.array([4], dtype=np.int32)], [SamplingParams(max_tokens=2)])
    assert all(rows == sequences <= 2 for rows, _, sequences in shapes)
    assert len(shapes) < engine.stats.num_steps, "steps in the middle of a prompt sample nothing"


@pytest.mark.parametrize("slots", [1, 5])
def test_rows_that_begin_alike_answer_as_without_the_cache(loaded, slots):
    """Float32, sampled and greedy, several samples of a row; what was cached is counted where it was."""
    prompts = make_prompts(3, seed=4)
    long = np.tile(prompts[0], 3)[:40]
    prompts = [np.concatenate([long, p]) for p in prompts] + [long, long[:33], prompts[1]]
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True),
    ]
    expected = answer(Engine(loaded, EngineConfig(disabled=frozenset({"prefix-cache"}))), prompts, params)
    engine = Engine(loaded, EngineConfig(max_num_seqs=slots, order="file"))
    answers = answer(engine, prompts, params)
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
    assert [a.cached_tokens for a in expected] == [0] * 6
    assert [a.cached_tokens for a in answers] == [0, 32, 32, 32, 32, 0]
    assert engine.stats.num_cached_tokens == 128
    assert engine.stats.num_prompt_tokens == sum(map(len, prompts))


def test_statistics_add_up(loaded):
    engine = Engine(loaded, EngineConfig(max_num_seqs=2))
    prompts = make_prompts(5)
    answers = answer(engine, prompts, [SamplingParams(max_tokens=3, ignore_eos=True)])
    stats = engine.stats
    assert stats.num_sampled_tokens == sum(len(a.token_ids) for a in answers) == 15
    assert stats.num_scheduled_tokens == sum(map(len, prompts)) + 15 - 5
    assert stats.num_queued_active == 2 * stats.num_queued_steps
    assert 0 < stats.num_active <= 2 * stats.num_steps
