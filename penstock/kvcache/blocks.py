"""Blocks of key/value memory: who holds which, and which hold a prefix that others may reuse.

Counts and hashes only; the tensors lie in `store`. A block is free, held by one or more rows, or
idle: held by none but still keeping a prefix, until its room is needed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence


class BlockPool:
    """Allocation is all or nothing, so a row that has begun can always finish."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._holders = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.hit_tokens = 0
        self.lookup_tokens = 0

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """So many blocks, or None if there are not enough; idle prefixes give way, oldest first."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            block = self._free.popleft() if self._free else self._evict()
            self._holders[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each; a block that keeps a prefix turns idle, any other is free."""
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix, held for the caller."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._idle.pop(block, None)
            self._holders[block] += 1
            found.append(block)
        self.lookup_tokens += len(keys) * self.block_size
        self.hit_tokens += len(found) * self.block_size
        return found

    def publish(self, block: int, key: bytes) -> None:
        """Say that a block now holds the prefix of this key. The first to say so keeps it."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def retract(self, blocks: Sequence[int]) -> None:
        """Blocks that were published but never written: nobody may find them any more."""
        for block in blocks:
            if (key := self._key_of.pop(block, None)) is None:
                continue
            del self._block_of[key]
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def check_integrity(self) -> None:
        """Every block is in exactly one state, and nobody holds one; called by tests when idle."""
        self.check()
        assert not any(self._holders), f"{sum(map(bool, self._holders))} blocks are held by nobody's rows"

    def check(self) -> None:
        """Every block is in exactly one state."""
        held = sum(1 for count in self._holders if count)
        assert all(count >= 0 for count in self._holders)
        assert held + len(self._free) + len(self._idle) == self.num_blocks
        assert all(self._block_of[key] == block for block, key in self._key_of.items())

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block
