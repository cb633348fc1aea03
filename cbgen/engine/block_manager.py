"""Who holds which KV block: a free list, and one block table row per running slot.

The KV cache is `num_blocks` blocks of `block_size` token positions (PagedAttention, arXiv 2309.06180). A slot's table
maps position p to block `block_tables[slot, p // block_size]`. Tables live in one numpy array, so that a step's input
is built by indexing it, with no loop over blocks. Pure bookkeeping; the tensors are `KVCache`'s.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class BlockManager:
    """Free list and block tables. `allocate` is all or nothing.

    Attributes:
        block_tables: [max_num_seqs, max_blocks_per_seq] int32; entries past `num_blocks_held[slot]` are stale.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_tables: npt.NDArray[np.int32] = np.zeros(
            (max_num_seqs, self.blocks_for(max_model_len)), dtype=np.int32
        )
        self._num_held = [0] * max_num_seqs
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the warmest

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def num_held(self, slot: int) -> int:
        return self._num_held[slot]

    def capacity(self, slot: int) -> int:
        """How many positions the slot's blocks can hold."""
        return self._num_held[slot] * self.block_size

    def allocate(self, slot: int, num_tokens: int) -> bool:
        """Grow the slot's table to hold `num_tokens` positions. False, and nothing changed, when too few are free."""
        held = self._num_held[slot]
        needed = self.blocks_for(num_tokens) - held
        if needed <= 0:
            return True
        if needed > len(self._free):
            return False
        for position in range(held, held + needed):
            self.block_tables[slot, position] = self._free.pop()
        self._num_held[slot] = held + needed
        return True

    def free(self, slot: int) -> None:
        """Give back every block of the slot."""
        self._free.extend(reversed(self.block_tables[slot, : self._num_held[slot]].tolist()))
        self._num_held[slot] = 0

    def check_integrity(self) -> None:
        """Every block is free or held exactly once. Called after each operation in tests; O(num_blocks)."""
        held = [b for slot, n in enumerate(self._num_held) for b in self.block_tables[slot, :n].tolist()]
        assert sorted(held + self._free) == list(range(self.num_blocks)), "a block is lost or held twice"
