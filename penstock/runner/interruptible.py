"""A background step on a CPU that other steps interrupt.

A step of long rows takes many milliseconds, and the rows of an encoder cannot be chunked. So a background
step stops at the yield points of its layers, runs the work that was offered meanwhile on its own thread, and
continues. Work that interrupts it cannot see what it has computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from threading import Condition
from typing import Any

from penstock.layers.yield_points import yielding_to
from penstock.types import PooledResult, PoolPlan, StepResult

Work = Callable[[], Any]

# A step reports this quantile of its stretches. In the longest of many, the operating system has usually run
# another process.
_LONG_STRETCH = 0.75


class InterruptibleSteps:
    """At most one step at a time. The engine's loop calls `launch`, `hold`, `release` and `advance`."""

    def __init__(self, run: Callable[[PoolPlan], StepResult], thread: Executor) -> None:
        """`run` computes a step on the caller's thread; steps run on `thread`."""
        self._run = run
        self._thread = thread
        self._changed = Condition()
        self._offered: deque[tuple[Future[Any], Work]] = deque()
        self._is_running = False  # from launch to end
        self._is_held = False
        self._num_advances = 0  # yield points that a held step may pass
        self._resumed_s = 0.0  # when the step began, or continued after a yield point
        self._stretches_s: list[float] = []  # compute time from one yield point to the next

    def launch(self, plan: PoolPlan) -> Future[StepResult]:
        """Start a step. Its result includes how long it keeps other work waiting."""
        with self._changed:
            self._is_running, self._num_advances = True, 0
        return self._thread.submit(self._step, plan)

    def offer(self, work: Callable[[], Any]) -> Future[Any] | None:
        """Run `work` at the next yield point; None if no step is running."""
        with self._changed:
            if not self._is_running:
                return None
            future: Future[Any] = Future()
            self._offered.append((future, work))
            self._changed.notify()
            return future

    def hold(self) -> None:
        """Stop the step at its next yield point, until `release` or `advance`."""
        with self._changed:
            self._is_held = True

    def release(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify()

    def advance(self) -> None:
        """Let a held step run up to its next yield point."""
        with self._changed:
            self._num_advances += 1
            self._changed.notify()

    def _step(self, plan: PoolPlan) -> StepResult:
        self._stretches_s.clear()
        self._resumed_s = time.perf_counter()
        try:
            with yielding_to(self._yield):
                result = self._run(plan)
            self._pause()
        finally:
            self._end()
        if isinstance(result, PooledResult):
            stretches_s = sorted(self._stretches_s)
            usual_s = stretches_s[int(_LONG_STRETCH * len(stretches_s))]
            return replace(result, device_s=sum(stretches_s), stretch_s=usual_s)
        return result

    def _yield(self) -> None:
        """Run what has been offered, and wait while the step is held."""
        if not self._offered and not self._is_held:  # without the lock: a miss costs one product at most
            self._pause()
            self._resumed_s = time.perf_counter()
            return
        self._pause()
        while (offer := self._next_offer()) is not None:
            _run_offer(*offer)
        self._resumed_s = time.perf_counter()

    def _next_offer(self) -> tuple[Future[Any], Work] | None:
        """The next offer; a held step waits for it. None: the step may continue."""
        with self._changed:
            while True:
                if self._offered:
                    return self._offered.popleft()
                if not self._is_held:
                    return None
                if self._num_advances:
                    self._num_advances -= 1
                    return None
                self._changed.wait()

    def _pause(self) -> None:
        self._stretches_s.append(time.perf_counter() - self._resumed_s)

    def _end(self) -> None:
        """Run what was offered after the last yield point."""
        with self._changed:
            self._is_running = False
            left = list(self._offered)
            self._offered.clear()
        for future, work in left:
            _run_offer(future, work)


def _run_offer(future: Future[Any], work: Work) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        with yielding_to(None):
            result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
