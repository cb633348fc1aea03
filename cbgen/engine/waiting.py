"""The rows that wait, and who is next: the look-ahead window of the scheduler.

Rows that begin alike form a group and stay together, so that what they share is computed once and used while it is
there. Among groups, and within one, `file` goes by arrival and `longest` by expected length, longest first (longest
processing time first keeps the end of a job short: Graham, 1969). Rows that were preempted come before all others.

Nobody waits for ever: the row that came first is next, whatever the order, once so many have come after it that the
window would soon have to stop for it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from cbgen.engine.sequence import Sequence

Order = Literal["file", "longest", "auto"]
ROWS_PER_SLOT = 32  # how far the window reaches; fewer, and one long row starves the rest
_OLDEST_PER_SLOT = 28  # so many rows per slot may come before the oldest must go


@dataclass(slots=True, eq=False)
class _Group:
    """Waiting rows that begin alike. Its key never falls while rows of it wait: they stay together."""

    key: tuple[int, int]
    members: list[Waiting] = field(default_factory=list)  # in order
    hashes: list[bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Waiting:
    """A sequence in the queue. `group` is None for one that was preempted."""

    sequence: Sequence
    arrival: int
    key: tuple[int, int]  # (minus its length's rank, arrival)
    group: _Group | None


class WaitingQueue:
    """Add in order of arrival; iterate over `candidates` in order of admission, and `take` those that are admitted.

    Args:
        order: see the module. `auto` is `longest` as far as lengths differ by more than a factor of 1.4.
        max_num_seqs: slots that are filled from it.
        expected_output: expected length of a sequence.
    """

    def __init__(self, order: Order, max_num_seqs: int, expected_output: Callable[[Sequence], int]) -> None:
        self.num_prompt_tokens = 0
        self._order = order
        self._oldest = _OLDEST_PER_SLOT * max_num_seqs
        self._expected_output = expected_output
        self._num_arrived = 0
        self._entries: OrderedDict[int, Waiting] = OrderedDict()  # by arrival, those of groups
        self._preempted: list[Waiting] = []  # in order of arrival
        self._groups: list[_Group] = []  # in order
        self._group_of: dict[bytes, _Group] = {}

    def __len__(self) -> int:
        return len(self._entries) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        """In no order that means anything."""
        for entry in [*self._preempted, *self._entries.values()]:
            yield entry.sequence

    # -- in -----------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """The last to arrive."""
        arrival = sequence.arrival = self._num_arrived
        self._num_arrived += 1
        key = (self._rank(sequence), arrival)
        group = self._find_group(sequence)
        if group is None:
            group = _Group(key)
            insort(self._groups, group, key=attrgetter("key"))
        elif key[0] < group.key[0]:
            self._groups.pop(self._position(group))
            group.key = (key[0], group.key[1])
            insort(self._groups, group, key=attrgetter("key"))
        entry = Waiting(sequence, arrival, key, group)
        insort(group.members, entry, key=attrgetter("key"))
        for block_hash in sequence.block_hashes:
            if block_hash not in self._group_of:
                self._group_of[block_hash] = group
                group.hashes.append(block_hash)
        self._entries[arrival] = entry
        self.num_prompt_tokens += sequence.num_prompt_tokens

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that was preempted."""
        arrival = sequence.arrival
        insort(self._preempted, Waiting(sequence, arrival, (0, arrival), None), key=attrgetter("arrival"))
        self.num_prompt_tokens += sequence.num_prompt_tokens

    def _find_group(self, sequence: Sequence) -> _Group | None:
        """The group that this shares at least half of its full blocks with, the longest prefix first."""
        hashes = sequence.block_hashes
        for position in range(len(hashes) - 1, len(hashes) // 2 - 1, -1):
            group = self._group_of.get(hashes[position])
            if group is not None:
                return group
        return None

    def _rank(self, sequence: Sequence) -> int:
        """What groups and rows are ordered by before their arrival."""
        if self._order == "file":
            return 0
        length = self._expected_output(sequence)
        return -length if self._order == "longest" else -int(2 * math.log2(length))

    # -- out ----------------------------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[Waiting]:
        """In order of admission. One that is not taken is passed over, and the rest of its group with it."""
        yield from list(self._preempted)
        while self._entries:
            oldest = next(iter(self._entries.values()))
            if self._num_arrived - oldest.arrival <= self._oldest:
                break
            yield oldest
            if oldest.arrival in self._entries:
                break
        position = 0
        while position < len(self._groups):
            group = self._groups[position]
            first = group.members[0]
            yield first
            if group.members and group.members[0] is first:
                position += 1

    def remove_row(self, index: int) -> list[Sequence]:
        """Remove every sequence of a row; returns them."""
        found = [e for e in [*self._preempted, *self._entries.values()] if e.sequence.index == index]
        for entry in found:
            self.take(entry)
        return [entry.sequence for entry in found]

    def take(self, entry: Waiting) -> None:
        """Remove a candidate."""
        self.num_prompt_tokens -= entry.sequence.num_prompt_tokens
        group = entry.group
        if group is None:
            self._preempted.remove(entry)
            return
        del self._entries[entry.arrival]
        del group.members[bisect_left(group.members, entry.key, key=attrgetter("key"))]
        if not group.members:
            self._groups.pop(self._position(group))
            for block_hash in group.hashes:
                del self._group_of[block_hash]

    def _position(self, group: _Group) -> int:
        return bisect_left(self._groups, group.key, key=attrgetter("key"))

    def sort_again(self) -> None:
        """Expected lengths have changed."""
        if self._order == "file":
            return
        for group in self._groups:
            for entry in group.members:
                entry.key = (self._rank(entry.sequence), entry.arrival)
            group.members.sort(key=attrgetter("key"))
            group.key = (group.members[0].key[0], group.key[1])
        self._groups.sort(key=attrgetter("key"))

    def check_integrity(self) -> None:
        """Every entry is in its group, once, and in order. For tests."""
        members = [entry for group in self._groups for entry in group.members]
        assert sorted(entry.arrival for entry in members) == list(self._entries)
        assert all(group.members for group in self._groups)
        assert [g.key for g in self._groups] == sorted(g.key for g in self._groups)
        for group in self._groups:
            assert [e.key for e in group.members] == sorted(e.key for e in group.members)
            assert all(self._group_of[block_hash] is group for block_hash in group.hashes)
        assert sum(len(group.hashes) for group in self._groups) == len(self._group_of)
        assert self.num_prompt_tokens == sum(sequence.num_prompt_tokens for sequence in self)
