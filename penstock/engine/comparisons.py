"""Comparisons: scores of vectors that callers supply. They run one at a time, in small parts between steps.
They wait in a separate queue, with limits, deadlines and cancellation like those of requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from penstock.errors import DeadlineExceeded, PenstockError, QueueFull, RowFailed
from penstock.types import Array, Comparison, Failure, Outcome, PooledOutput, Timings

Compare = Callable[[Comparison], Future[Array]]  # cancelling the future stops the work after its current part


@dataclass(frozen=True, slots=True)
class ComparisonLimits:
    """Limits of what waits behind the running comparison. An empty queue accepts a comparison of any size."""

    max_waiting_bytes: int = 256 << 20  # of vectors
    max_waiting_operations: float = 2.0**38  # multiplications: some seconds on a small CPU


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    comparison: Comparison
    num_bytes: int
    num_operations: float


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    comparison: Comparison
    scores: Future[Array]
    launched_s: float


class Comparisons:
    """add → launch → collect, on the engine's thread."""

    def __init__(self, limits: ComparisonLimits | None = None) -> None:
        self._limits = limits or ComparisonLimits()
        self.ids: set[str] = set()  # of waiting and running comparisons
        self._waiting: dict[str, _Waiting] = {}  # in order of arrival
        self._waiting_bytes = 0
        self._waiting_operations = 0.0
        self._running: _Running | None = None
        # No deadline is earlier. Kept, because every turn of the loop reads it. None: there are no deadlines.
        self._next_deadline_s: float | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, comparison: Comparison) -> None:
        """Queue a comparison. Raises `QueueFull` if too much waits."""
        entry, limits = _Waiting(comparison, comparison.num_bytes, comparison.num_operations), self._limits
        num_bytes = self._waiting_bytes + entry.num_bytes
        num_operations = self._waiting_operations + entry.num_operations
        too_much = num_bytes > limits.max_waiting_bytes or num_operations > limits.max_waiting_operations
        if self._waiting and too_much:
            raise QueueFull(
                f"{len(self._waiting)} comparisons are waiting, and with this one they would have more than "
                f"{limits.max_waiting_bytes >> 20} MiB of vectors or {limits.max_waiting_operations:.0e} "
                "products; try again shortly"
            )
        self._waiting[comparison.id] = entry
        self.ids.add(comparison.id)
        self._waiting_bytes, self._waiting_operations = num_bytes, num_operations
        deadline_s, earliest_s = comparison.deadline_s, self._next_deadline_s
        if deadline_s is not None and (earliest_s is None or deadline_s < earliest_s):
            self._next_deadline_s = deadline_s

    def _take(self, comparison_id: str) -> Comparison | None:
        """Remove a comparison from the queue."""
        if (entry := self._waiting.pop(comparison_id, None)) is None:
            return None
        self._waiting_bytes -= entry.num_bytes
        self._waiting_operations = self._waiting_operations - entry.num_operations if self._waiting else 0.0
        return entry.comparison

    @property
    def can_launch(self) -> bool:
        return self._running is None and bool(self._waiting)

    def launch(self, compare: Compare, wake: Callable[[], None], now_s: float) -> None:
        """Start the next comparison. `wake` is called, on any thread, when it is done."""
        comparison = self._take(next(iter(self._waiting)))
        assert comparison is not None
        try:
            scores = compare(comparison)
        except Exception as error:
            scores = Future()
            scores.set_exception(error)
        self._running = _Running(comparison, scores, now_s)
        scores.add_done_callback(lambda _: wake())

    def collect(self, now_s: float) -> list[Outcome]:
        """The outcome of the running comparison, if it has finished."""
        running = self._running
        if running is None or not running.scores.done():
            return []
        self._running = None
        self.ids.discard(running.comparison.id)
        return [_outcome(running, now_s)]

    def expire(self, now_s: float) -> list[Outcome]:
        """Fail the comparisons whose deadline has passed."""
        if self._next_deadline_s is None or now_s < self._next_deadline_s:
            return []
        expired = [each for each in self._all() if each.deadline_s is not None and each.deadline_s <= now_s]
        outcomes: list[Outcome] = []
        for comparison in expired:
            self.cancel(comparison.id)
            why = f"not finished {now_s - comparison.arrival_s:.3f} s after arrival"
            outcomes.append(Failure(comparison.id, DeadlineExceeded(why)))
        deadlines = (each.deadline_s for each in self._all() if each.deadline_s is not None)
        self._next_deadline_s = min(deadlines, default=None)
        return outcomes

    def overdue(self, now_s: float, max_queue_s: float) -> list[Comparison]:
        """Remove and return the comparisons that have waited too long to start."""
        found: list[Comparison] = []
        for entry in self._waiting.values():
            if entry.comparison.arrival_s + max_queue_s > now_s:
                break  # the queue is in order of arrival
            found.append(entry.comparison)
        for comparison in found:
            self.cancel(comparison.id)
        return found

    def next_deadline_s(self) -> float | None:
        return self._next_deadline_s

    def cancel(self, comparison_id: str) -> bool:
        """Drop a comparison; False if the id is unknown. A running one stops after its current part."""
        running = self._running
        if comparison_id not in self.ids:
            return False
        self.ids.remove(comparison_id)
        if running is not None and running.comparison.id == comparison_id:
            running.scores.cancel()
            self._running = None
            return True
        return self._take(comparison_id) is not None

    def fail_all(self, error: PenstockError) -> list[Outcome]:
        """End every comparison with an error."""
        comparisons = self._all()
        for comparison in comparisons:
            self.cancel(comparison.id)
        return [Failure(comparison.id, error) for comparison in comparisons]

    def _all(self) -> list[Comparison]:
        running = [] if self._running is None else [self._running.comparison]
        return [*running, *(entry.comparison for entry in self._waiting.values())]


def _outcome(running: _Running, now_s: float) -> Outcome:
    comparison = running.comparison
    if running.scores.cancelled():
        return Failure(comparison.id, RowFailed("the comparison was cancelled by the engine"))
    error = running.scores.exception()
    if isinstance(error, PenstockError):
        return Failure(comparison.id, error)
    if error is not None:
        return Failure(comparison.id, RowFailed(f"the comparison failed: {type(error).__name__}: {error}"))
    queue_s = max(0.0, running.launched_s - comparison.arrival_s)
    timings = Timings(queue_s, max(0.0, now_s - running.launched_s))
    return PooledOutput(comparison.id, running.scores.result(), timings)
