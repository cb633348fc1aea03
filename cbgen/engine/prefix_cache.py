"""Which KV blocks hold the beginning of which prompts, and which of them are given up first.

A full block is known by a hash of all tokens up to its end (BLAKE2b, 16 bytes: two prefixes that share one do not
occur), so equal hashes mean equal content, whatever the model's layers look at. Blocks that nobody holds stay until
their room is needed: first those that no waiting row begins with, least recently used first. Pure bookkeeping, without
a clock; `BlockManager` counts who holds what.

    tokens   [ 16 ][ 16 ][ 16 ][ 5 ]
    hashes    h0    h1    h2            h1 covers tokens 0 to 31
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import numpy.typing as npt


def block_hashes(token_ids: npt.NDArray[np.int32], block_size: int) -> list[bytes]:
    """One hash for each full block: of every token up to the block's end."""
    state = hashlib.blake2b(digest_size=16)
    data = np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
    size = 4 * block_size
    hashes = []
    for start in range(0, len(data) - size + 1, size):
        state.update(data[start : start + size])
        hashes.append(state.digest())
    return hashes


class PrefixCache:
    """Blocks by the prefix they hold. A block is *idle* while it is kept for its content only."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # in order of last use
        self._idle_wanted: OrderedDict[int, None] = OrderedDict()  # the same, of prefixes that waiting rows begin with
        self._wanted: dict[bytes, int] = {}  # how many waiting rows
        self._promised: dict[bytes, int] = {}  # the slot that is about to compute it

    @property
    def num_idle(self) -> int:
        return len(self._idle) + len(self._idle_wanted)

    def find(self, hashes: list[bytes]) -> list[int]:
        """Blocks of the longest known prefix."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def is_stored(self, block: int) -> bool:
        return block in self._hashes

    # -- what is about to be computed ---------------------------------------------------------------------------------

    def promise(self, hashes: list[bytes], slot: int) -> None:
        """A slot will compute these; of two slots the first stands."""
        for block_hash in hashes:
            self._promised.setdefault(block_hash, slot)

    def is_promised(self, block_hash: bytes) -> bool:
        return block_hash in self._promised

    def withdraw(self, hashes: list[bytes], slot: int) -> None:
        """The slot will not."""
        for block_hash in hashes:
            if self._promised.get(block_hash) == slot:
                del self._promised[block_hash]

    def store(self, block_hash: bytes, block: int) -> None:
        """The block's KV is computed. If another holds the same, that one stays the known one."""
        self._promised.pop(block_hash, None)
        if block_hash not in self._blocks and block not in self._hashes:
            self._blocks[block_hash] = block
            self._hashes[block] = block_hash

    def forget(self, block: int) -> None:
        """A block that is held loses its name."""
        block_hash = self._hashes.pop(block, None)
        if block_hash is not None:
            del self._blocks[block_hash]

    # -- what nobody holds --------------------------------------------------------------------------------------------

    def retire(self, block: int) -> None:
        """Nobody holds this stored block any more."""
        is_wanted = self._hashes[block] in self._wanted
        (self._idle_wanted if is_wanted else self._idle)[block] = None

    def revive(self, block: int) -> None:
        """An idle block is held again."""
        self._idle.pop(block, None)
        self._idle_wanted.pop(block, None)

    def evict(self) -> int:
        """Give up an idle block and return it."""
        block, _ = (self._idle or self._idle_wanted).popitem(last=False)
        self.forget(block)
        return block

    # -- what waiting rows begin with ---------------------------------------------------------------------------------

    def want(self, hashes: list[bytes]) -> None:
        """A row that begins so waits."""
        for block_hash in hashes:
            count = self._wanted.get(block_hash, 0)
            self._wanted[block_hash] = count + 1
            if not count:
                self._move(block_hash, self._idle, self._idle_wanted)

    def unwant(self, hashes: list[bytes]) -> None:
        """It waits no more."""
        for block_hash in hashes:
            count = self._wanted[block_hash] - 1
            if count:
                self._wanted[block_hash] = count
            else:
                del self._wanted[block_hash]
                self._move(block_hash, self._idle_wanted, self._idle)

    def _move(self, block_hash: bytes, source: OrderedDict[int, None], target: OrderedDict[int, None]) -> None:
        block = self._blocks.get(block_hash)
        if block is not None and block in source:
            del source[block]
            target[block] = None

    def idle_blocks(self) -> list[int]:
        """Those kept for their content only, in the order they would be given up."""
        return [*self._idle, *self._idle_wanted]

    def check_integrity(self) -> None:
        """Both directions agree, and idle blocks are where they belong. For tests."""
        assert self._blocks == {block_hash: block for block, block_hash in self._hashes.items()}
        assert all(self._hashes[block] not in self._wanted for block in self._idle)
        assert all(self._hashes[block] in self._wanted for block in self._idle_wanted)
        assert not self._promised.keys() & self._blocks.keys(), "promised although it is there"
