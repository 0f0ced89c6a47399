"""By when waiting requests must have started: whoever has not, is given up."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class StartDeadlines(Generic[T]):
    """Items by the time at which they must have started. Nothing is removed when an item starts: `waits` says
    whether it still waits, and items that do not are dropped once they are the earliest."""

    def __init__(self, waits: Callable[[T], bool]) -> None:
        self._waits = waits
        self._items: deque[tuple[float, T]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, start_by_s: float, item: T) -> None:
        if not self._items or start_by_s >= self._items[-1][0]:  # almost always
            self._items.append((start_by_s, item))
        else:
            bisect.insort(self._items, (start_by_s, item), key=lambda entry: entry[0])

    def pop_overdue(self, now_s: float) -> list[T]:
        """Remove and return the items that should have started by now."""
        overdue = []
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            overdue.append(self._items.popleft()[1])
        return overdue

    def next_s(self) -> float | None:
        """The earliest time of an item that waits."""
        while self._items and not self._waits(self._items[0][1]):
            self._items.popleft()
        return self._items[0][0] if self._items else None
