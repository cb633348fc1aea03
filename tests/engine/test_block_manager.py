"""The block manager against a naive twin (a set of free ids and a dict of lists), checked after every operation."""

import random

import pytest

from cbgen.engine.block_manager import BlockManager


@pytest.mark.parametrize("seed", range(40))
def test_random_operations_agree_with_a_naive_twin(seed):
    rng = random.Random(seed)
    num_blocks, block_size, slots = rng.randint(1, 30), rng.choice([1, 3, 16]), rng.randint(1, 5)
    manager = BlockManager(num_blocks, block_size, slots, max_model_len=num_blocks * block_size)
    held = {slot: [] for slot in range(slots)}
    for _ in range(200):
        slot = rng.randrange(slots)
        if rng.random() < 0.3:
            manager.free(slot)
            held[slot] = []
        else:
            num_tokens = rng.randint(0, num_blocks * block_size)
            needed = max(0, -(-num_tokens // block_size) - len(held[slot]))
            free = num_blocks - sum(map(len, held.values()))
            before = manager.block_tables[slot, : len(held[slot])].tolist()
            assert manager.allocate(slot, num_tokens) is (needed <= free)
            assert manager.block_tables[slot, : len(held[slot])].tolist() == before, "blocks moved"
            if needed <= free:
                held[slot] = manager.block_tables[slot, : len(held[slot]) + needed].tolist()
        manager.check_integrity()
        assert manager.num_free_blocks == num_blocks - sum(map(len, held.values()))
        assert [manager.capacity(s) for s in range(slots)] == [len(held[s]) * block_size for s in range(slots)]
        assert len({block for blocks in held.values() for block in blocks}) == sum(map(len, held.values()))


def test_integrity_check_notices_a_lost_block():
    manager = BlockManager(4, 2, 1, 8)
    manager.allocate(0, 4)
    manager._free.pop()
    with pytest.raises(AssertionError, match="lost or held twice"):
        manager.check_integrity()
