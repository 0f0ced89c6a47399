"""How a task runs: prepare a request, submit it to an engine, finish its output.

A task is one call: its inputs and options. `prepare` tokenises and returns the request together with the
function that turns the engine's arrays into the task's result. No other code depends on how a task is
prepared or finished.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from penstock.errors import DeadlineExceeded
from penstock.handle import EngineHandle
from penstock.tasks.model import TextModel
from penstock.types import PooledOutput, Request

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

WINDOW_ROWS = 2048  # inputs that are tokenised and submitted together
MAX_WINDOWS_IN_FLIGHT = 2  # the engine runs one while the next is tokenised


@dataclass(slots=True, eq=False)  # not frozen, because each request creates one and frozen ones are slower
class Prepared(Generic[R_co]):
    """A request that can be submitted, and how its output becomes the task's result."""

    request: Request
    finish: Callable[[PooledOutput], R_co]
    output: PooledOutput | None = None  # if already available; the request is then not submitted
    is_slow_to_finish: bool = False  # if so, `finish` runs on another thread than the event loop's


class PoolingTask(Protocol[R]):
    @property
    def num_rows(self) -> int:
        """How many inputs the call has."""

    def check(self, model: TextModel) -> None:
        """Refuse a call that the model cannot run, before any work is done for it."""

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[R]:
        """Tokenise and lay out the rows. Long texts are tokenised off the event loop."""

    def windows(self, size: int) -> Iterator[PoolingTask[R]]:
        """The same task over at most `size` inputs at a time."""

    def merge(self, parts: Sequence[R]) -> R:
        """Merge the results of the windows."""


@dataclass(slots=True, kw_only=True)
class Scheduling:
    """Priority (lower runs sooner), arrival, timeout and client of a request."""

    priority: int = 0
    arrival_s: float | None = None  # monotonic clock; None: when it is submitted
    timeout_s: float | None = None  # counted from the arrival
    client: str = ""  # clients share the device by their weights
    weight: float = 1.0
    is_background: bool = False  # runs only on the capacity that other requests leave


DEFAULT_SCHEDULING = Scheduling()


def submit(
    engine: EngineHandle, request: Request, scheduling: Scheduling
) -> Coroutine[Any, Any, PooledOutput]:
    """Run a request. Raises `DeadlineExceeded` once its timeout has passed."""
    request.priority = scheduling.priority
    request.client, request.weight = scheduling.client, scheduling.weight
    request.is_background = scheduling.is_background
    request.arrival_s = time.monotonic() if scheduling.arrival_s is None else scheduling.arrival_s
    if scheduling.timeout_s is None:
        return engine.run(request)
    return _run_within(engine, request, scheduling.timeout_s)


async def _run_within(engine: EngineHandle, request: Request, timeout_s: float) -> PooledOutput:
    request.deadline_s = request.arrival_s + timeout_s
    left_s = request.deadline_s - time.monotonic()
    try:
        async with asyncio.timeout(left_s):
            return await engine.run(request)
    except TimeoutError:
        raise DeadlineExceeded(f"not finished within the timeout of {timeout_s:g} s") from None


async def run_prepared(engine: EngineHandle, prepared: Prepared[R], scheduling: Scheduling) -> PooledOutput:
    """The output of a prepared request, from the engine unless it is already available."""
    if prepared.output is not None:
        return prepared.output
    return await submit(engine, prepared.request, scheduling)


async def finish(prepared: Prepared[R], output: PooledOutput) -> R:
    if prepared.is_slow_to_finish:
        return await asyncio.to_thread(prepared.finish, output)
    return prepared.finish(output)


@dataclass(frozen=True, slots=True, eq=False)
class TaskRunner:
    """Runs tasks of any size on one model: large calls in windows, in order."""

    model: TextModel
    engine: EngineHandle
    request_ids: Iterator[str]

    async def run(
        self,
        task: PoolingTask[R],
        scheduling: Scheduling = DEFAULT_SCHEDULING,
        on_progress: Callable[[int], None] | None = None,
    ) -> R:
        """The task's result. `on_progress` is called with the number of inputs that each window completes."""
        task.check(self.model)
        window_rows = min(WINDOW_ROWS, getattr(task, "max_window_rows", WINDOW_ROWS))
        if task.num_rows <= window_rows:
            result = await self._run_window(task, scheduling)
            if on_progress is not None:
                on_progress(task.num_rows)
            return result
        parts: list[R] = []
        running: deque[tuple[Prepared[R], int, asyncio.Task[PooledOutput]]] = deque()

        async def complete_oldest() -> None:
            prepared, num_rows, submitted = running[0]
            parts.append(await finish(prepared, await submitted))
            running.popleft()
            if on_progress is not None:
                on_progress(num_rows)

        try:
            for window in task.windows(window_rows):
                if len(running) == MAX_WINDOWS_IN_FLIGHT:
                    await complete_oldest()
                prepared = await window.prepare(self.model, next(self.request_ids))
                submitted = asyncio.ensure_future(run_prepared(self.engine, prepared, scheduling))
                running.append((prepared, window.num_rows, submitted))
                await asyncio.sleep(0)  # lets the request be sent before the next window is tokenised
            while running:
                await complete_oldest()
        finally:
            for _, _, submitted in running:  # empty unless a window has failed
                submitted.cancel()
            await asyncio.gather(*(each[2] for each in running), return_exceptions=True)
        return task.merge(parts)

    async def _run_window(self, task: PoolingTask[R], scheduling: Scheduling) -> R:
        prepared = await task.prepare(self.model, next(self.request_ids))
        return await finish(prepared, await run_prepared(self.engine, prepared, scheduling))


def request_ids(prefix: str) -> Iterator[str]:
    return (f"{prefix}-{number}" for number in itertools.count())
