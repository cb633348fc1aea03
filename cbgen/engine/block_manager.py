"""Who holds which KV block: a free list, reference counts, and one block table row per running slot.

The KV cache is `num_blocks` blocks of `block_size` token positions (PagedAttention, arXiv 2309.06180). A slot's table
maps position p to block `block_tables[slot, p // block_size]`. Tables live in one numpy array, so that a step's input
is built by indexing it, with no loop over blocks. Slots whose prompts begin alike share the full blocks of what they
have in common (`PrefixCache`); a shared block is never written again. Pure bookkeeping; the tensors are `KVCache`'s.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cbgen.engine.prefix_cache import PrefixCache, block_hashes

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prefix:
    """What of a sequence is in the cache.

    Attributes:
        blocks: of its first positions; always fewer than it has tokens, so that there is something to compute.
        is_growing: a running sequence is about to compute the next block, too.
    """

    blocks: list[int]
    is_growing: bool


class BlockManager:
    """Free list, block tables and reference counts. `allocate` and `admit` are all or nothing.

    Attributes:
        block_tables: [max_num_seqs, max_blocks_per_seq] int32; entries past `num_held[slot]` are stale.
        num_held: [max_num_seqs] int64 blocks of each slot.
        num_unstored: [max_num_seqs] int64, full blocks that the prefix cache gets once they are computed.
        ref_counts: [num_blocks] int32, how many slots hold each block.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int, *, prefix_cache: bool = False
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.has_prefix_cache = prefix_cache
        self.block_tables: npt.NDArray[np.int32] = np.zeros(
            (max_num_seqs, self.blocks_for(max_model_len)), dtype=np.int32
        )
        self.num_held: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_unstored: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        self.ref_counts: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the warmest
        self._cache = PrefixCache()
        self._hashes: list[list[bytes]] = [[] for _ in range(max_num_seqs)]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, those that the prefix cache would give up included."""
        return len(self._free) + self._cache.num_idle

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def capacity(self, slot: int) -> int:
        """How many positions the slot's blocks can hold."""
        return int(self.num_held[slot]) * self.block_size

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def hashes(self, token_ids: npt.NDArray[np.int32]) -> list[bytes]:
        """What the full blocks of a sequence are known by; empty without a prefix cache."""
        return block_hashes(token_ids, self.block_size) if self.has_prefix_cache else []

    def want(self, hashes: list[bytes]) -> None:
        """A sequence that begins so waits: keep these blocks, if any can be kept."""
        self._cache.want(hashes)

    def unwant(self, hashes: list[bytes]) -> None:
        """It waits no more."""
        self._cache.unwant(hashes)

    def find_prefix(self, hashes: list[bytes], num_tokens: int) -> Prefix:
        """What a sequence of `num_tokens` tokens would not have to compute."""
        usable = hashes[: (num_tokens - 1) // self.block_size]
        blocks = self._cache.find(usable)
        is_growing = len(blocks) < len(usable) and self._cache.is_promised(usable[len(blocks)])
        return Prefix(blocks, is_growing)

    def num_taken(self, prefix: Prefix, num_tokens: int) -> int:
        """How many blocks fewer are free once a sequence with this prefix is admitted."""
        num_idle = sum(1 for block in prefix.blocks if not self.ref_counts[block])
        return self.blocks_for(num_tokens) - len(prefix.blocks) + num_idle

    def admit(self, slot: int, num_tokens: int, hashes: list[bytes], prefix: Prefix) -> bool:
        """Give an empty slot the blocks of its prefix and new ones for the rest. False, and nothing changed, if too
        few are free.
        """
        if self.num_taken(prefix, num_tokens) > self.num_free_blocks:
            return False
        for position, block in enumerate(prefix.blocks):
            if not self.ref_counts[block]:
                self._cache.revive(block)
            self.ref_counts[block] += 1
            self.block_tables[slot, position] = block
        num_found = len(prefix.blocks)
        self.num_held[slot] = num_found
        self.allocate(slot, num_tokens)
        missing = [h for h in hashes[num_found : num_tokens // self.block_size] if not self._cache.find([h])]
        self._hashes[slot] = hashes
        self.num_unstored[slot] = len(hashes) - num_found
        self._cache.promise(missing, slot)
        return True

    def note_computed(self, slot: int, num_computed_tokens: int) -> None:
        """The slot's KV is there so far; the full blocks of it can be found from now on."""
        hashes = self._hashes[slot]
        first, last = len(hashes) - int(self.num_unstored[slot]), num_computed_tokens // self.block_size
        for position in range(first, min(last, len(hashes))):
            self._cache.store(hashes[position], int(self.block_tables[slot, position]))
        self.num_unstored[slot] = max(0, len(hashes) - max(first, last))

    def extend_hashes(self, slot: int, hashes: list[bytes]) -> None:
        """The slot's sequence has grown past its prompt, and these are all its full blocks."""
        self.num_unstored[slot] += len(hashes) - len(self._hashes[slot])
        self._hashes[slot] = hashes

    # -- blocks -------------------------------------------------------------------------------------------------------

    def allocate(self, slot: int, num_tokens: int) -> bool:
        """Grow the slot's table to hold `num_tokens` positions. False, and nothing changed, when too few are free."""
        held = int(self.num_held[slot])
        needed = self.blocks_for(num_tokens) - held
        if needed <= 0:
            return True
        if needed > self.num_free_blocks:
            return False
        blocks = [self._free.pop() if self._free else self._cache.evict() for _ in range(needed)]
        self.ref_counts[blocks] = 1
        self.block_tables[slot, held : held + needed] = blocks
        self.num_held[slot] = held + needed
        return True

    def free(self, slot: int) -> None:
        """Give back every block of the slot; what the prefix cache knows stays findable while there is room."""
        blocks = self.block_tables[slot, : self.num_held[slot]]
        self.ref_counts[blocks] -= 1
        for block in blocks[self.ref_counts[blocks] == 0][::-1].tolist():  # the end of a prefix is given up first
            if self._cache.is_stored(block):
                self._cache.retire(block)
            else:
                self._free.append(block)
        self._cache.withdraw(self._hashes[slot], slot)
        self._hashes[slot] = []
        self.num_held[slot] = self.num_unstored[slot] = 0

    def forget(self, slot: int) -> None:
        """What the slot alone holds shall not be found again: there is something wrong with it."""
        for block in self.block_tables[slot, : self.num_held[slot]].tolist():
            if self.ref_counts[block] == 1:
                self._cache.forget(block)

    def forget_idle(self, hashes: list[bytes]) -> None:
        """What of a prefix nobody holds shall not be found again: there is something wrong with it."""
        for block_hash in hashes:
            for block in self._cache.find([block_hash]):
                if not self.ref_counts[block]:
                    self._cache.revive(block)
                    self._cache.forget(block)
                    self._free.append(block)

    def num_exclusive(self, slots: Int64Array) -> Int64Array:
        """[len(slots)] blocks that each slot holds alone: those it would give back."""
        held = self.num_held[slots]
        width = int(held.max(initial=0))
        is_held = np.arange(width) < held[:, None]  # [len(slots), width]
        count: Int64Array = ((self.ref_counts[self.block_tables[slots, :width]] == 1) & is_held).sum(axis=1)
        return count

    def check_integrity(self) -> None:
        """Every block is free, idle or held as often as counted. Called after each operation in tests."""
        held = Counter(b for slot, n in enumerate(self.num_held) for b in self.block_tables[slot, :n].tolist())
        idle = self._cache.idle_blocks()
        assert sorted([*held, *self._free, *idle]) == list(range(self.num_blocks)), "a block is lost or held twice"
        counts = [held[block] for block in range(self.num_blocks)]
        assert self.ref_counts.tolist() == counts, "a reference count is wrong"
        assert not any(self._cache.is_stored(block) for block in self._free), "a free block can be found"
        assert all(0 <= n <= len(h) for n, h in zip(self.num_unstored, self._hashes, strict=True))
        self._cache.check_integrity()
