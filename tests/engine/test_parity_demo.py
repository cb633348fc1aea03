"""The demo model in float32 against `transformers.generate`; `make parity` runs all of it, `make test` a part."""

import sys

import pytest
import torch
import transformers

from cbgen.engine.kv_cache import bytes_per_block
from cbgen.engine.loader import load_model, load_tokenizer
from cbgen.engine.model_files import conversion_directory, find_model
from cbgen.engine.preparation import prepare
from tests.engine import parity

TOPICS = (
    "rain", "bread", "bridges", "sparrows", "maps", "glass", "tides", "clocks", "salt", "moss", "trains", "paper",
    "bees", "chess", "wells", "kites", "copper", "gardens", "letters", "owls", "tea", "stars", "wool", "ferries",
    "snow", "apples", "lanterns", "rivers", "ink", "stairs", "drums", "sand",
)  # fmt: skip


@pytest.fixture(scope="module")
def demo():
    """Directory of the converted model, and the model loaded for our engine."""
    files = find_model("demo")
    tokenizer = load_tokenizer(files)
    loaded = load_model(files, dtype="float32", device=torch.device("cpu"), eos_token_id=None)
    return conversion_directory(files), tokenizer, prepare(loaded, set(), print)


def _prompts(tokenizer: transformers.PreTrainedTokenizerBase, num_rows: int) -> list[list[int]]:
    """Half chats, half plain text, of ragged lengths."""
    prompts = []
    for number, topic in enumerate(TOPICS[:num_rows]):
        text = f"Tell me about {topic}" + f" and {TOPICS[-number]}" * (number % 7)
        if number % 2:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


def _check(demo, num_rows, num_tokens, engines):
    directory, tokenizer, loaded = demo
    prompts = _prompts(tokenizer, num_rows)
    expected = parity.reference(directory, prompts, num_tokens)
    block_bytes = bytes_per_block(loaded.layers, 16, loaded.dtype)
    for engine in engines:
        backwards = engine.pop("backwards", False)
        if blocks := engine.pop("small_pool", 0):
            engine |= {"max_model_len": blocks * 16, "kv_cache_memory": blocks * block_bytes}
            engine |= {"disabled": frozenset({"prediction"})}  # which would admit fewer rows, and preempt none
        answers = parity.generate(loaded, prompts[::-1] if backwards else prompts, num_tokens, **engine)
        found = parity.compare(expected, answers[::-1] if backwards else answers)
        counts = f"{len(found.wrong)} wrong, {found.num_ties} ties, {parity.generate.preemptions} preemptions"
        sys.stdout.write(f"{engine}: {counts}\n")
        assert found.wrong == []
        assert "kv_cache_memory" not in engine or parity.generate.preemptions > 0


def test_demo_model_equals_generate(demo):
    _check(demo, 6, 24, [{"max_num_seqs": 4, "max_num_batched_tokens": 64}, {"max_num_seqs": 6, "small_pool": 14}])


@pytest.mark.slow
def test_demo_model_equals_generate_in_every_shape(demo):
    engines = [
        {"max_num_seqs": seqs, "max_num_batched_tokens": tokens} for seqs in (1, 4, 16) for tokens in (16, 64, 512)
    ]
    engines += [
        {"max_num_seqs": 16, "batching": "static"},
        {"max_num_seqs": 16, "small_pool": 40},
        {"max_num_seqs": 16, "backwards": True},
    ]
    _check(demo, 32, 64, engines)
