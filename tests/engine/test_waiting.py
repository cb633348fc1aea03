"""The queue against a naive twin, over seeds: who is next, in every order, with groups, age and preempted rows."""

import math
import random

import numpy as np
import pytest

from cbgen.engine.prefix_cache import block_hashes
from cbgen.engine.waiting import WaitingQueue
from tests.engine.test_scheduler import make_sequence


def make_queue(order="file", slots=1000, lengths=None):
    def expected(sequence):
        return lengths[sequence.index] if lengths else sequence.max_total_tokens - sequence.num_prompt_tokens

    return WaitingQueue(order, slots, expected)


def make_row(index, num_output=1, prefix=(), tail=4):
    tokens = [*prefix, *(1000 + index * 10 + i for i in range(tail))]
    sequence = make_sequence(index, len(tokens), num_output)
    sequence.prompt_token_ids = np.array(tokens, dtype=np.int32)
    sequence.block_hashes = block_hashes(sequence.prompt_token_ids, 2)
    return sequence


def drain(queue):
    """Row indexes in order of admission."""
    order = []
    for entry in queue.candidates():
        queue.take(entry)
        queue.check_integrity()
        order.append(entry.sequence.index)
    assert len(queue) == queue.num_prompt_tokens == 0
    return order


@pytest.mark.parametrize(
    ("order", "expected"),
    [("file", [0, 1, 2, 3, 4]), ("longest", [1, 4, 3, 0, 2]), ("auto", [1, 3, 4, 0, 2])],
)
def test_orders(order, expected):
    queue = make_queue(order)
    for index, length in enumerate([10, 100, 9, 80, 85]):
        queue.add(make_row(index, length))
    assert drain(queue) == expected


def test_rows_that_begin_alike_stay_together():
    first, second = (1, 2, 3, 4, 5, 6), (1, 2, 9, 9, 9, 9)
    queue = make_queue()
    for index, prefix in enumerate([first, second, (), first, second, first]):
        queue.add(make_row(index, prefix=prefix))
    assert drain(queue) == [0, 3, 5, 1, 4, 2]


def test_a_small_part_in_common_makes_no_group():
    head = (1, 2)
    queue = make_queue("longest")
    for index, length in enumerate([5, 9, 7]):
        queue.add(make_row(index, length, prefix=head))
    assert drain(queue) == [1, 2, 0]


def test_a_group_goes_by_its_longest_row():
    prefix = (1, 2, 3, 4, 5, 6)
    queue = make_queue("longest")
    for index, (length, begins) in enumerate([(5, prefix), (50, ()), (90, prefix), (70, ()), (60, prefix)]):
        queue.add(make_row(index, length, begins))
    assert drain(queue) == [2, 4, 0, 3, 1]


def test_who_is_passed_over_holds_up_its_group_only():
    prefix = (1, 2, 3, 4, 5, 6)
    queue = make_queue()
    for index, begins in enumerate([prefix, prefix, (), prefix, ()]):
        queue.add(make_row(index, prefix=begins))
    seen = []
    for entry in queue.candidates():
        seen.append(entry.sequence.index)
        if seen[-1] in (2, 4):
            queue.take(entry)
    assert seen == [0, 2, 4]
    assert drain(queue) == [0, 1, 3]


def test_preempted_rows_come_first_in_order_of_arrival():
    queue = make_queue("longest")
    for index in range(5):
        queue.add(make_row(index, index + 1))
    taken = []
    for entry in queue.candidates():
        queue.take(entry)
        taken.append(entry.sequence)
        if len(taken) == 3:
            break
    for sequence in taken[:2]:
        queue.put_back(sequence)
        queue.check_integrity()
    assert [s.index for s in taken] == [4, 3, 2]
    assert drain(queue) == [3, 4, 1, 0]


def test_the_oldest_goes_first_once_the_window_is_nearly_full():
    queue = make_queue("longest", slots=1)  # 28 may come after it
    for index in range(28):
        queue.add(make_row(index, index + 1))
    assert next(queue.candidates()).sequence.index == 27
    queue.add(make_row(28, 29))
    assert next(queue.candidates()).sequence.index == 0
    order = drain(queue)
    assert order[:2] == [0, 28]
    assert len(order) == 29


def test_a_row_is_removed_with_all_its_samples():
    queue = make_queue()
    rows = [make_row(index) for index in (0, 1, 1, 2)]
    for row in rows:
        queue.add(row)
    assert queue.remove_row(1) == rows[1:3]
    queue.check_integrity()
    assert drain(queue) == [0, 2]


class NaiveQueue:
    """Groups as plain lists, put in order anew for each question."""

    def __init__(self, rank, oldest):
        self.rank = rank
        self.oldest = oldest
        self.groups = []  # dicts
        self.num_arrived = 0

    def add(self, row):
        rank = self.rank(row.index)
        group = self._group_of(row)
        if group is None:
            group = {"members": [], "arrival": self.num_arrived, "key": rank, "owned": set()}
            self.groups.append(group)
        group["key"] = min(group["key"], rank)
        group["members"].append(row)
        group["owned"] |= set(row.block_hashes) - {h for g in self.groups for h in g["owned"]}
        self.num_arrived += 1

    def _group_of(self, row):
        hashes = row.block_hashes
        for depth in range(len(hashes) - 1, len(hashes) // 2 - 1, -1):
            for group in self.groups:
                if hashes[depth] in group["owned"]:
                    return group
        return None

    def take(self):
        first = min((row for group in self.groups for row in group["members"]), key=lambda r: r.arrival)
        if self.num_arrived - first.arrival <= self.oldest:
            group = min(self.groups, key=lambda g: (g["key"], g["arrival"]))
            first = min(group["members"], key=lambda r: (self.rank(r.index), r.arrival))
        for group in self.groups:
            group["members"] = [row for row in group["members"] if row is not first]
        self.groups = [group for group in self.groups if group["members"]]
        return first


@pytest.mark.parametrize("seed", range(60))
def test_random_queues_agree_with_a_naive_twin(seed):
    rng = random.Random(seed)
    lengths = {}
    order = rng.choice(["file", "longest", "auto"])
    ranks = {"file": lambda i: 0, "longest": lambda i: -lengths[i], "auto": lambda i: -int(2 * math.log2(lengths[i]))}
    queue = make_queue(order, slots=rng.choice([1, 1000]), lengths=lengths)
    twin = NaiveQueue(ranks[order], queue._oldest)
    prefixes = [tuple(rng.randrange(3) for _ in range(rng.choice([4, 8]))) for _ in range(4)]
    for index in range(150):
        if rng.random() < 0.6 or not len(queue):
            lengths[index] = rng.randint(1, 300)
            row = make_row(index, prefix=rng.choice([*prefixes, ()]), tail=rng.randint(1, 6))
            queue.add(row)
            twin.add(row)
        else:
            entry = next(queue.candidates())
            assert entry.sequence is twin.take()
            queue.take(entry)
        queue.check_integrity()
        assert {s.index for s in queue} == {row.index for group in twin.groups for row in group["members"]}


def test_lengths_that_are_known_better_put_the_queue_in_order_again():
    lengths = dict(enumerate([10, 20, 30]))
    queue = make_queue("longest", lengths=lengths)
    for index in range(3):
        queue.add(make_row(index))
    lengths.update({0: 25, 2: 5})
    queue.sort_again()
    queue.check_integrity()
    assert drain(queue) == [0, 1, 2]
