"""First-fit allocation of ranges, for the vector cache and shared memory."""

from __future__ import annotations

import bisect


class FreeRanges:
    """The free parts of [0, size), as ordered ranges; adjacent ranges are always merged."""

    def __init__(self, size: int) -> None:
        self.starts = [0] if size else []
        self.sizes = [size] if size else []
        self._max_size = size  # no free range is larger

    def take(self, size: int) -> int | None:
        """Take the first range that is large enough; returns its start, or None."""
        if size > self._max_size:
            return None
        for i, free in enumerate(self.sizes):
            if free >= size:
                start = self.starts[i]
                if free == size:
                    del self.starts[i], self.sizes[i]
                else:
                    self.starts[i], self.sizes[i] = start + size, free - size
                return start
        self._max_size = max(self.sizes, default=0)
        return None

    def give(self, start: int, size: int) -> None:
        """Return a range, and merge it with its free neighbours."""
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
        self._max_size = max(self._max_size, size)
