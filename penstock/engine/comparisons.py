"""Scores of vectors that callers bring: they run beside the steps and wait for none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from penstock.errors import PenstockError, RowFailed
from penstock.types import Array, Comparison, Failure, Outcome, PooledOutput, Timings


class Comparisons:
    """The comparisons that the runner is working on, by id."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Comparison, Future[Array]]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def add(self, comparison: Comparison, future: Future[Array], wake: Callable[[], None]) -> None:
        """Take on a comparison; `wake` is called, on any thread, when it is done."""
        self._running[comparison.id] = (comparison, future)
        future.add_done_callback(lambda _: wake())

    def collect(self, now_s: float) -> list[Outcome]:
        """Remove the comparisons that are done and return their outcomes."""
        done = [key for key, (_, future) in self._running.items() if future.done()]
        return [_outcome(*self._running.pop(key), now_s) for key in done]

    def fail_all(self, error: PenstockError) -> list[Outcome]:
        failures: list[Outcome] = [Failure(key, error) for key in self._running]
        self._running.clear()
        return failures


def _outcome(comparison: Comparison, future: Future[Array], now_s: float) -> Outcome:
    if (error := future.exception()) is not None:
        why = f"the comparison failed: {type(error).__name__}: {error}"
        return Failure(comparison.id, RowFailed(why))
    elapsed_s = max(0.0, now_s - comparison.arrival_s)
    return PooledOutput(comparison.id, future.result(), Timings(device_s=elapsed_s))
