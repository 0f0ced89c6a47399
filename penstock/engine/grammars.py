"""Grammars are compiled beside the engine's loop, on threads of their own: a request joins the lane when what
it must follow is there, and nobody else waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from penstock.errors import BadValue, DeadlineExceeded, PenstockError, QueueFull
from penstock.scheduler.generation import Constraint
from penstock.types import Grammar, Request

Ways = Callable[[], Constraint]  # gives each row its own way through a compiled grammar
Compile = Callable[[Grammar], Ways]

MOST_KEPT = 64  # compiled grammars, by content
MOST_WAITING = 256  # requests
MOST_S = 30.0  # what takes longer is given up
_THREADS = 2  # so that one that takes long does not hold up all others


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    request: Request
    ways: Future[Ways]
    until_s: float


class Grammars:
    """begin → ready. All but the compiling itself is called on the engine's thread."""

    def __init__(
        self, compile: Compile, *, clock: Callable[[], float] = time.monotonic, most_s: float = MOST_S
    ) -> None:
        self._compile = compile
        self._clock = clock
        self._most_s = most_s
        self._jobs: queue.SimpleQueue[tuple[Grammar, Future[Ways]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._known: OrderedDict[Grammar, Future[Ways]] = OrderedDict()  # the last one used is the newest
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def begin(self, request: Request, wake: Callable[[], None]) -> None:
        """Take a request on; `wake` is called, on any thread, when it is ready."""
        assert request.sampling is not None and request.sampling.grammar is not None
        if len(self._waiting) >= MOST_WAITING:
            raise QueueFull(f"{len(self._waiting)} requests wait for their grammars; try again shortly")
        ways = self._ways(request.sampling.grammar)
        self._waiting[request.id] = _Waiting(request, ways, self._clock() + self._most_s)
        ways.add_done_callback(lambda _: wake())

    def ready(self) -> list[tuple[Request, list[Constraint] | PenstockError]]:
        """Those that wait no longer: a constraint for each row, or why there is none."""
        done = [waiting for waiting in self._waiting.values() if waiting.ways.done()]
        for waiting in done:
            del self._waiting[waiting.request.id]
        return [(waiting.request, _constraints(waiting)) for waiting in done]

    def expired(self, now_s: float) -> list[tuple[Request, PenstockError]]:
        """Let go of the requests that are late, and of those whose grammar takes too long."""
        late: list[tuple[Request, PenstockError]] = []
        for waiting in list(self._waiting.values()):
            request = waiting.request
            if request.deadline_s is not None and request.deadline_s <= now_s:
                words = f"not finished {now_s - request.arrival_s:.3f} s after arrival"
                late.append((request, DeadlineExceeded(words)))
            elif waiting.until_s <= now_s and not waiting.ways.done():
                words = f"the grammar takes more than {self._most_s:g} s to compile; use a simpler one"
                late.append((request, BadValue(words)))
            else:
                continue
            del self._waiting[request.id]
        return late

    def next_deadline_s(self) -> float | None:
        ends = (min(w.until_s, w.request.deadline_s or w.until_s) for w in self._waiting.values())
        return min(ends, default=None)

    def cancel(self, request_id: str) -> None:
        """Forget a request; what is being compiled is kept for others."""
        self._waiting.pop(request_id, None)

    def clear(self) -> list[str]:
        """Forget every request, and tell which there were."""
        names = list(self._waiting)
        self._waiting.clear()
        return names

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _ways(self, grammar: Grammar) -> Future[Ways]:
        """What is known of a grammar; one that failed is tried again."""
        found = self._known.get(grammar)
        if found is not None and not (found.done() and found.exception() is not None):
            self._known.move_to_end(grammar)
            return found
        found = self._known[grammar] = Future()
        self._known.move_to_end(grammar)
        while len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)
        self._jobs.put((grammar, found))
        while len(self._threads) < _THREADS:
            # As daemons: one that does not come to an end keeps no process alive.
            thread = threading.Thread(target=self._work, name="penstock-grammars", daemon=True)
            self._threads.append(thread)
            thread.start()
        return found

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            grammar, ways = job
            try:
                ways.set_result(self._compile(grammar))
            except Exception as error:
                ways.set_exception(error)


def _constraints(waiting: _Waiting) -> list[Constraint] | PenstockError:
    try:
        ways = waiting.ways.result()
        return [ways() for _ in range(waiting.request.num_rows)]
    except PenstockError as error:
        return error
    except Exception as error:  # whatever the library stumbles over ends this request, not the engine
        return BadValue(f"the grammar cannot be used: {error}")
