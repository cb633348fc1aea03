"""Shared blocks: who may use what, what is given up first, and that the books hold after every operation."""

import random

import numpy as np
import pytest

from cbgen.engine.block_manager import BlockManager
from cbgen.engine.prefix_cache import block_hashes


def make_manager(num_blocks=8, block_size=2, slots=4):
    return BlockManager(num_blocks, block_size, slots, num_blocks * block_size, prefix_cache=True)


def admit(manager, slot, tokens, *, computed=True):
    """Put a prompt into a slot and compute it; how many of its tokens were there."""
    hashes = manager.hashes(np.array(tokens, dtype=np.int32))
    prefix = manager.find_prefix(hashes, len(tokens))
    assert manager.admit(slot, len(tokens), hashes, prefix)
    manager.check_integrity()
    if computed:
        manager.note_computed(slot, len(tokens))
        manager.check_integrity()
    return len(prefix.blocks) * manager.block_size


def test_a_hash_covers_all_tokens_before_and_none_after():
    rng = random.Random(0)
    for _ in range(50):
        tokens = np.array([rng.randrange(5) for _ in range(rng.randint(0, 20))], dtype=np.int32)
        size = rng.randint(1, 5)
        hashes = block_hashes(tokens, size)
        assert len(hashes) == len(tokens) // size
        for number, block_hash in enumerate(hashes):
            stop = (number + 1) * size
            assert block_hashes(tokens[:stop], size)[-1] == block_hash
            changed = tokens.copy()
            changed[rng.randrange(stop)] += 1
            assert block_hashes(changed, size)[number] != block_hash
    assert block_hashes(np.array([1, 2, 3], dtype=np.int32)[::-1], 3) == block_hashes(
        np.array([3, 2, 1], dtype=np.int32), 3
    )


def test_hashes_are_the_same_in_every_process():
    """Two ranks, or a run and its resumption, must decide alike."""
    assert block_hashes(np.arange(4, dtype=np.int32), 4)[0].hex() == "35ce1b7dc4da8ce51a7591561b3595db"


def test_a_block_is_found_once_it_is_computed_and_not_before():
    manager = make_manager()
    assert admit(manager, 0, [1, 2, 3, 4, 5], computed=False) == 0
    hashes = manager.hashes(np.array([1, 2, 3, 4, 9], dtype=np.int32))
    assert manager.find_prefix(hashes, 5).blocks == []
    assert manager.find_prefix(hashes, 5).is_growing
    manager.note_computed(0, 3)
    prefix = manager.find_prefix(hashes, 5)
    assert (prefix.blocks, prefix.is_growing) == ([manager.block_tables[0, 0]], True)
    manager.note_computed(0, 5)
    prefix = manager.find_prefix(hashes, 5)
    assert (prefix.blocks, prefix.is_growing) == (manager.block_tables[0, :2].tolist(), False)


def test_one_token_is_always_left_to_compute():
    manager = make_manager()
    admit(manager, 0, [1, 2, 3, 4])
    assert admit(manager, 1, [1, 2, 3, 4]) == 2
    assert admit(manager, 2, [1, 2, 3, 4, 5]) == 4


def test_what_was_about_to_be_computed_is_not_when_its_row_ends():
    manager = make_manager()
    admit(manager, 0, [1, 2, 3, 4, 5], computed=False)
    manager.free(0)
    hashes = manager.hashes(np.array([1, 2, 9], dtype=np.int32))
    assert not manager.find_prefix(hashes, 3).is_growing


def num_found(manager, tokens):
    """How many tokens of a prompt that begins so would be served."""
    hashes = manager.hashes(np.array([*tokens, 0], dtype=np.int32))
    return len(manager.find_prefix(hashes, len(tokens) + 1).blocks) * manager.block_size


def test_blocks_of_ended_rows_are_found_until_their_room_is_needed():
    manager = make_manager(num_blocks=4)
    admit(manager, 0, [1, 2, 3, 4])
    manager.free(0)
    assert manager.num_free_blocks == 4
    assert manager.allocate(0, 4)
    assert num_found(manager, [1, 2, 3, 4]) == 4, "blocks without content go first"
    assert manager.allocate(1, 4)
    assert num_found(manager, [1, 2, 3, 4]) == 0
    assert not manager.allocate(2, 1)
    manager.check_integrity()


def test_the_end_of_a_prefix_is_given_up_before_its_beginning():
    manager = make_manager(num_blocks=3)
    admit(manager, 0, [1, 2, 3, 4, 5, 6])
    manager.free(0)
    left = []
    for slot in range(1, 4):
        assert manager.allocate(slot, 2)
        left.append(num_found(manager, [1, 2, 3, 4, 5, 6]))
    assert left == [4, 2, 0]


def test_least_recently_used_goes_first_and_what_waiting_rows_want_last():
    manager = make_manager(num_blocks=3)
    for slot, token in enumerate((1, 2, 3)):
        admit(manager, slot, [token, token])
    for slot in (2, 0, 1):
        manager.free(slot)
    wanted = manager.hashes(np.array([3, 3], dtype=np.int32))
    manager.want(wanted)
    manager.check_integrity()
    found = []
    for slot in range(3):
        manager.allocate(slot, 2)
        manager.check_integrity()
        found.append([t for t in (1, 2, 3) if manager.find_prefix(manager.hashes(np.full(3, t, np.int32)), 3).blocks])
    assert found == [[2, 3], [3], []]


def test_wants_are_counted():
    manager = make_manager(num_blocks=2)
    for slot, token in enumerate((1, 2)):
        admit(manager, slot, [token, token])
    manager.free(0)
    manager.free(1)
    hashes = manager.hashes(np.array([1, 1], dtype=np.int32))
    manager.want(hashes)
    manager.want(hashes)
    manager.unwant(hashes)
    manager.check_integrity()
    manager.allocate(2, 2)
    assert manager.find_prefix(hashes, 3).blocks, "one row still wants it"
    manager.unwant(hashes)
    manager.check_integrity()


def test_what_a_failed_row_computed_is_forgotten_unless_others_use_it():
    manager = make_manager()
    admit(manager, 0, [1, 2, 3, 4, 5])
    admit(manager, 1, [1, 2, 7])
    manager.forget(0)
    manager.free(0)
    manager.check_integrity()
    assert len(manager.find_prefix(manager.hashes(np.array([1, 2, 3, 4, 5], dtype=np.int32)), 5).blocks) == 1


class Checked:
    """A block manager, and a naive twin that remembers which prefix each block was computed for."""

    def __init__(self, rng):
        self.rng = rng
        self.num_blocks, self.block_size = rng.randint(4, 30), rng.choice([1, 2, 4])
        self.manager = make_manager(self.num_blocks, self.block_size, slots=5)
        self.content = {}  # block -> tokens up to its end
        self.rows = {}  # slot -> its tokens
        self.computed = {}
        self.wanted = []

    def admit(self, slot):
        manager, size = self.manager, self.block_size
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(1, self.num_blocks * size))]
        hashes = manager.hashes(np.array(tokens, dtype=np.int32))
        prefix = manager.find_prefix(hashes, len(tokens))
        held = [self.content[block] for block in prefix.blocks]
        assert held == [tuple(tokens[: (number + 1) * size]) for number in range(len(held))]
        assert len(held) * size < len(tokens)
        left = manager.num_free_blocks - manager.num_taken(prefix, len(tokens))
        assert manager.admit(slot, len(tokens), hashes, prefix) is (left >= 0)
        if left >= 0:
            assert manager.num_free_blocks == left
            self.rows[slot], self.computed[slot] = tokens, len(held) * size

    def compute(self, slot):
        before, size = self.computed[slot], self.block_size
        self.computed[slot] = self.rng.randint(before, len(self.rows[slot]))
        for number in range(before // size, self.computed[slot] // size):
            block = int(self.manager.block_tables[slot, number])
            assert self.manager.ref_counts[block] == 1, "written although shared"
            self.content[block] = tuple(self.rows[slot][: (number + 1) * size])
        self.manager.note_computed(slot, self.computed[slot])

    def grow(self, slot):
        self.manager.allocate(slot, min(len(self.rows[slot]) + self.block_size, self.num_blocks * self.block_size))

    def free(self, slot):
        if self.rng.random() < 0.1:
            self.manager.forget(slot)
        self.manager.free(slot)
        del self.rows[slot], self.computed[slot]

    def change_wants(self):
        if self.wanted and self.rng.random() < 0.5:
            self.manager.unwant(self.wanted.pop(self.rng.randrange(len(self.wanted))))
        else:
            tokens = np.array([self.rng.randrange(2) for _ in range(6)], dtype=np.int32)
            self.wanted.append(self.manager.hashes(tokens))
            self.manager.want(self.wanted[-1])


@pytest.mark.parametrize("seed", range(60))
def test_random_operations_keep_the_books_and_find_only_what_was_computed(seed):
    rng = random.Random(seed)
    checked = Checked(rng)
    for _ in range(300):
        slot = rng.randrange(5)
        if slot not in checked.rows:
            checked.admit(slot)
        else:
            rng.choices([checked.compute, checked.grow, checked.free], [5, 1, 4])[0](slot)
        if rng.random() < 0.5:
            checked.change_wants()
        checked.manager.check_integrity()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m._free.pop(), "lost or held twice"),
        (lambda m: m.ref_counts.__setitem__(int(m.block_tables[0, 0]), 2), "reference count"),
        (lambda m: m._free.__setitem__(0, int(m.block_tables[0, 0])), "lost or held twice"),
    ],
)
def test_integrity_check_notices_damage(damage, message):
    manager = make_manager()
    admit(manager, 0, [1, 2, 3])
    damage(manager)
    with pytest.raises(AssertionError, match=message):
        manager.check_integrity()
