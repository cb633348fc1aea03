"""Step arrays against a token-by-token twin, over random schedules."""

import random

import numpy as np
import pytest

from cbgen.engine.model_input import build_model_input
from tests.engine.test_scheduler import make_scheduler, make_sequence


@pytest.mark.parametrize("seed", range(30))
def test_arrays_equal_a_token_by_token_twin(seed):
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=rng.randint(20, 60), block_size=rng.choice([2, 4]), budget=rng.randint(4, 30))
    for index in range(12):
        scheduler.add(make_sequence(index, rng.randint(1, 30), rng.randint(1, 8)))
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        built = build_model_input(output, scheduler.block_manager)
        _check(built, output, scheduler.block_manager)
        scheduler.update(output, np.array([rng.randrange(50, 60) for _ in built.sampling], dtype=np.int64))


def _check(built, output, manager):
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
