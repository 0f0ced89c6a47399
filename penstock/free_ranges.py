"""First-fit allocation of ranges, shared by the vector store and the shared-memory arena."""

from __future__ import annotations

import bisect


class FreeRanges:
    """What of [0, size) is free, as ranges in order; neighbours are always joined."""

    def __init__(self, size: int) -> None:
        self.starts = [0] if size else []
        self.sizes = [size] if size else []
        self._most = size  # no range is larger

    def take(self, size: int) -> int | None:
        """The first range that is large enough."""
        if size > self._most:
            return None
        for i, free in enumerate(self.sizes):
            if free >= size:
                start = self.starts[i]
                if free == size:
                    del self.starts[i], self.sizes[i]
                else:
                    self.starts[i], self.sizes[i] = start + size, free - size
                return start
        self._most = max(self.sizes, default=0)
        return None

    def give(self, start: int, size: int) -> None:
        i = bisect.bisect_left(self.starts, start)
        if i < len(self.starts) and start + size == self.starts[i]:
            size += self.sizes[i]
            del self.starts[i], self.sizes[i]
        if i and self.starts[i - 1] + self.sizes[i - 1] == start:
            self.sizes[i - 1] += size
            size = self.sizes[i - 1]
        else:
            self.starts.insert(i, start)
            self.sizes.insert(i, size)
        self._most = max(self._most, size)
