"""KV cache blocks: reference counts, and the prefixes that other rows may reuse.

Bookkeeping only; the tensors are in `store`. A block is free, in use by one or more rows, or idle. An idle
block is used by no row, but holds a published prefix until the block is needed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence


class BlockPool:
    """Allocates blocks all or nothing, so that a row that has started can always finish."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._num_users = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.hit_tokens = 0
        self.lookup_tokens = 0

    @property
    def available(self) -> int:
        """The number of blocks that can be allocated, idle ones included."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` blocks, or return None if too few are left. Evicts idle prefixes, oldest first."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            block = self._free.popleft() if self._free else self._evict()
            self._num_users[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one use of each block. An unused block becomes idle if it holds a prefix, otherwise free."""
        for block in blocks:
            self._num_users[block] -= 1
            if self._num_users[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Acquire the blocks of the longest published prefix. The caller releases them."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._idle.pop(block, None)
            self._num_users[block] += 1
            found.append(block)
        self.lookup_tokens += len(keys) * self.block_size
        self.hit_tokens += len(found) * self.block_size
        return found

    def publish(self, block: int, key: bytes) -> None:
        """Let other rows find a block by the key of its prefix. If the key has a block, that block stays."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def retract(self, blocks: Sequence[int]) -> None:
        """Unpublish blocks, because the step that was to write them failed."""
        for block in blocks:
            if (key := self._key_of.pop(block, None)) is None:
                continue
            del self._block_of[key]
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def forget_prefixes(self) -> None:
        """Unpublish every prefix, because the contents of all blocks are lost."""
        self.retract(list(self._key_of))

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state and none is in use. For tests, when idle."""
        self.check()
        in_use = sum(map(bool, self._num_users))
        assert not in_use, f"{in_use} blocks are in use though no row is left"

    def check(self) -> None:
        """Assert that every block is in exactly one state."""
        in_use = sum(map(bool, self._num_users))
        assert all(count >= 0 for count in self._num_users)
        assert in_use + len(self._free) + len(self._idle) == self.num_blocks
        assert all(self._block_of[key] == block for block, key in self._key_of.items())

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block
