"""Deadlines by which waiting requests must have started."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class StartDeadlines(Generic[T]):
    """Items sorted by the time at which they must have started. An item is not removed when it starts.
    Instead, the earliest item is dropped when `waits` returns False for it."""

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
        """Remove and return the items that had to start by now and still wait."""
        overdue = []
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            overdue.append(self._items.popleft()[1])
        return overdue

    def next_s(self) -> float | None:
        """The earliest deadline of a waiting item."""
        while self._items and not self._waits(self._items[0][1]):
            self._items.popleft()
        return self._items[0][0] if self._items else None
