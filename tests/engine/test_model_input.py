"""Step arrays against a token-by-token twin, over random schedules."""

import random

import numpy as np
import pytest

from cbgen.engine.model_input import build_model_input
from cbgen.engine.sampling_input import SamplingInput
from cbgen.params import SamplingParams
from tests.engine.test_scheduler import make_scheduler, make_sequence


@pytest.mark.parametrize("seed", range(30))
def test_arrays_equal_a_token_by_token_twin(seed):
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=rng.randint(20, 60), block_size=rng.choice([2, 4]), budget=rng.randint(4, 30))
    for index in range(12):
        num_output = rng.randint(1, 8)
        stream = (rng.randrange(2**63), index, rng.randrange(3))
        stops = frozenset(rng.sample(range(100, 200), rng.choice([0, 1, 3, 20])))
        params = random_params(rng, num_output)
        changes = {"params": params, "random_stream": stream, "stop_token_ids": stops}
        scheduler.add(make_sequence(index, rng.randint(1, 30), num_output, **changes))
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        built = build_model_input(output, scheduler.block_manager)
        _check(built, output, scheduler.block_manager)
        scheduler.update(output, np.array([rng.randrange(50, 60) for _ in built.sampling], dtype=np.int64))


def random_params(rng, num_output):
    return SamplingParams(
        max_tokens=num_output,
        min_tokens=rng.choice([0, 0, num_output // 2]),
        temperature=rng.choice([0.0, 0.7]),
        top_k=rng.choice([0, 5, 2**40]),
        top_p=rng.choice([0.5, 1.0]),
        min_p=rng.choice([0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        logit_bias=rng.choice([(), (), ((5, 1.0),)]),
    )


def _check(built, output, manager):
    twin = SamplingInput.from_sequences(built.sampling)
    for name in ("temperature", "top_k", "top_p", "min_p", "random_words"):
        value, expected = getattr(built.sampling_input, name), getattr(twin, name)
        assert (value.dtype, value.tolist()) == (expected.dtype, expected.tolist()), name
    assert built.sampling_input.special == twin.special
    ids, positions, addresses, starts, sampled = [], [], [], [0], []
    for sequence, count in zip(output.sequences, output.num_scheduled_tokens, strict=True):
        tokens = [*sequence.prompt_token_ids.tolist(), *sequence.output_token_ids]
        for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + count):
            ids.append(tokens[position])
            positions.append(position)
            block = int(manager.block_tables[sequence.slot, position // manager.block_size])
            addresses.append(block * manager.block_size + position % manager.block_size)
        starts.append(len(ids))
        if sequence.num_computed_tokens + count == len(tokens):
            sampled.append((sequence.index, len(ids) - 1))
    assert built.input_ids.tolist() == ids
    assert built.positions.tolist() == positions
    assert built.slot_mapping.tolist() == addresses
    assert built.cu_seqlens_q.tolist() == starts
    assert list(zip([s.index for s in built.sampling], built.logits_indices.tolist(), strict=True)) == sampled
    assert built.context_lens.tolist() == [
        s.num_computed_tokens + n for s, n in zip(output.sequences, output.num_scheduled_tokens, strict=True)
    ]
    assert len(set(addresses)) == len(addresses), "two tokens share a cache address"
    for row, sequence in enumerate(output.sequences):
        held = manager.num_held[sequence.slot]
        width = min(held, built.block_tables.shape[1])
        assert built.block_tables[row, :width].tolist() == manager.block_tables[sequence.slot, :width].tolist()
