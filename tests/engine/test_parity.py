"""Random tiny models of many architectures: our greedy ids equal `transformers.generate`, whatever the batch does."""

import random

import pytest

from cbgen.engine.kv_cache import bytes_per_block
from cbgen.engine.preparation import prepare
from tests.engine import parity
from tests.models import ARCHITECTURES, VOCAB_SIZE, build_model

NUM_TOKENS = 24
SMALL_POOL_BLOCKS = 8  # of 16 tokens: two or three rows fit, so that others are preempted


def _prompts(num_rows: int = 8) -> list[list[int]]:
    """Ragged prompts: one token, shorter and longer than a window of 8, across block borders; the last two begin alike
    for two blocks.
    """
    rng = random.Random(1)
    lengths = [1, 2, 7, 9, 16, 17, 33, 40][:num_rows]
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    prompts[-1][:32] = prompts[-2][:32]
    return prompts


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_generate_for_every_batch_shape(architecture, tmp_path):
    directory = build_model(architecture, tmp_path)
    prompts = _prompts()
    expected = parity.reference(directory, prompts, NUM_TOKENS)
    loaded = prepare(parity.load(directory), set(), print)
    pool = SMALL_POOL_BLOCKS * bytes_per_block(loaded.layers, 16, loaded.dtype)

    for engine in (
        {"max_num_seqs": 1},
        {"max_num_seqs": 4, "max_num_batched_tokens": 16},
        {"max_num_seqs": 8, "max_num_batched_tokens": 64},
        {"max_num_seqs": 3, "batching": "static"},
        {"max_num_seqs": 5, "max_num_batched_tokens": 24, "decode_steps": 4},
        {"max_num_seqs": 4, "order": "file", "disabled": frozenset({"prefix-cache", "prediction"})},
    ):
        found = parity.compare(expected, parity.generate(loaded, prompts, NUM_TOKENS, **engine))
        assert (found.wrong, found.num_ties) == ([], 0), engine
        # The rows that begin alike are in one static batch, where none waits for the other.
        assert (parity.generate.cached_tokens > 0) == ("disabled" not in engine and "batching" not in engine)

    small = {"max_num_seqs": 8, "max_model_len": 80, "kv_cache_memory": pool, "disabled": frozenset({"prediction"})}
    answers = parity.generate(loaded, prompts, NUM_TOKENS, **small)
    assert parity.generate.preemptions > 0
    found = parity.compare(expected, answers)
    assert (found.wrong, found.num_ties) == ([], 0), "small pool"

    backwards = parity.generate(loaded, prompts[::-1], NUM_TOKENS, max_num_seqs=4)[::-1]
    found = parity.compare(expected, backwards)
    assert (found.wrong, found.num_ties) == ([], 0), "input order reversed"

    for disabled in ({"native", "fusion", "packing"}, {"native"}, {"fusion"}):
        loaded = prepare(parity.load(directory), disabled, print)
        found = parity.compare(expected, parity.generate(loaded, prompts, NUM_TOKENS, max_num_seqs=4))
        assert (found.wrong, found.num_ties) == ([], 0), disabled


def test_the_window_matters_to_these_models(tmp_path):
    """Were the window ignored or off by one, the comparison above would notice: other windows give other answers."""
    prompts = _prompts()
    answers = [
        parity.generate(parity.load(build_model("mistral-window-8", tmp_path / str(w), sliding_window=w)), prompts, 24)
        for w in (7, 8, 9)
    ]
    assert answers[0] != answers[1] != answers[2]


@pytest.mark.parametrize("architecture", ["llama-ratio-3", "qwen3-ratio-4", "gemma2-softcap-window-8"])
def test_bfloat16_rows_are_the_same_in_any_company(architecture, tmp_path):
    """Our kernels sum in an order that no neighbour changes: with them bfloat16 is exact, too, however rows are
    batched, chunked, and served from the prefix cache.
    """
    loaded = prepare(parity.load(build_model(architecture, tmp_path), dtype="bfloat16"), set(), print)
    if loaded.packing != "native":
        pytest.skip("this CPU has no AVX512-BF16")
    prompts = _prompts()
    prompts += [prompts[-1][:length] for length in (16, 17, 32, 33, 34, 40)]  # all but one or two tokens are shared
    alone = [parity.generate(loaded, [prompt], NUM_TOKENS, max_num_seqs=1)[0] for prompt in prompts]
    for engine in (
        {"max_num_seqs": 8, "max_num_batched_tokens": 200},
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},
        {"max_num_seqs": 3, "batching": "static"},
        {"max_num_seqs": 8, "max_num_batched_tokens": 16},
        {"max_num_seqs": 1},
        {"max_num_seqs": 1, "max_num_batched_tokens": 8},  # steps in which nobody samples
    ):
        assert parity.generate(loaded, prompts, NUM_TOKENS, **engine) == alone, engine
    assert parity.generate.cached > 0


def test_bfloat16_rows_do_not_depend_on_their_neighbours_much(tmp_path):
    """Without our kernels rounding differs with the shape of a batch; but most rows of a short run agree."""
    loaded = parity.load(build_model("llama-ratio-3", tmp_path), dtype="bfloat16")
    alone = parity.generate(loaded, _prompts(), 8, max_num_seqs=1)
    together = parity.generate(loaded, _prompts(), 8, max_num_seqs=8)
    assert sum(a == b for a, b in zip(alone, together, strict=True)) >= 6
