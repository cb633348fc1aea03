"""How memory becomes slots, tokens and blocks."""

import dataclasses

import pytest

from cbgen.config import EngineConfig
from cbgen.engine.kv_cache import bytes_per_block
from cbgen.engine.limits import choose_limits
from cbgen.errors import ModelError, UsageError
from tests.engine.parity import load
from tests.models import build_model

MB = 1 << 20


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(build_model("llama-ratio-1", tmp_path_factory.mktemp("m")))


def test_with_plenty_of_memory_every_slot_can_hold_a_whole_context(loaded):
    limits = choose_limits(loaded, EngineConfig(), free_bytes=1000 * MB)
    assert limits.num_blocks * limits.block_size == limits.max_num_seqs * loaded.max_context
    assert (limits.max_model_len, limits.notices) == (loaded.max_context, ())


def test_activations_and_logits_come_off_before_the_cache(loaded):
    wide = dataclasses.replace(loaded, hidden_size=10_000)
    narrow_blocks = choose_limits(loaded, EngineConfig(), free_bytes=30 * MB).num_blocks
    with pytest.raises(ModelError, match="lower --max-num-batched-tokens or --max-num-seqs, or free memory"):
        choose_limits(wide, EngineConfig(max_model_len=128), free_bytes=30 * MB)
    assert narrow_blocks > 0


def test_a_cache_smaller_than_the_context_shortens_it_and_says_so(loaded):
    memory = 3 * bytes_per_block(loaded.layers, 16, loaded.dtype)
    limits = choose_limits(loaded, EngineConfig(kv_cache_memory=memory))
    assert (limits.num_blocks, limits.max_model_len) == (3, 48)
    assert "context limited to 48 tokens (the model allows 128)" in limits.notices[0]


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused(loaded):
    memory = 3 * bytes_per_block(loaded.layers, 16, loaded.dtype)
    with pytest.raises(ModelError, match="room for 48 tokens, fewer than one row of 64"):
        choose_limits(loaded, EngineConfig(kv_cache_memory=memory, max_model_len=64))


def test_a_context_beyond_the_model_is_refused(loaded):
    with pytest.raises(UsageError, match="--max-model-len 129 is more than the model's 128"):
        choose_limits(loaded, EngineConfig(max_model_len=129))


def test_a_small_token_budget_lowers_the_slots_and_many_slots_raise_the_budget(loaded):
    assert choose_limits(loaded, EngineConfig(max_num_batched_tokens=5)).max_num_seqs == 5
    assert choose_limits(loaded, EngineConfig(max_num_seqs=600)).max_num_batched_tokens == 600
