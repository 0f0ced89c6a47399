"""Grammars compile on threads of their own. A request joins the generation scheduler when its grammar is
ready, and no other request waits for it."""

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

ConstraintFactory = Callable[[], Constraint]  # makes a fresh constraint for each row from a compiled grammar
Compile = Callable[[Grammar], ConstraintFactory]

MAX_CACHED = 64  # compiled grammars, by content
MAX_WAITING = 256  # requests
MAX_COMPILE_S = 30.0
_NUM_THREADS = 2  # so that one slow grammar does not delay all others


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    request: Request
    factory: Future[ConstraintFactory]
    give_up_s: float  # when compiling has taken too long


class Grammars:
    """begin → ready. Everything but compiling itself is called on the engine's thread."""

    def __init__(
        self,
        compile: Compile,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_compile_s: float = MAX_COMPILE_S,
    ) -> None:
        self._compile = compile
        self._clock = clock
        self._max_compile_s = max_compile_s
        self._jobs: queue.SimpleQueue[tuple[Grammar, Future[ConstraintFactory]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._cache: OrderedDict[Grammar, Future[ConstraintFactory]] = OrderedDict()  # last used last
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def begin(self, request: Request, grammar: Grammar, wake: Callable[[], None]) -> None:
        """Compile the grammar of a request; `wake` is called, on any thread, when it is ready."""
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFull(f"{len(self._waiting)} requests wait for their grammars; try again shortly")
        factory = self._compiled(grammar)
        self._waiting[request.id] = _Waiting(request, factory, self._clock() + self._max_compile_s)
        factory.add_done_callback(lambda _: wake())

    def ready(self) -> list[tuple[Request, list[Constraint] | PenstockError]]:
        """Remove the requests whose grammars are ready: a constraint for each row, or the error."""
        done = [waiting for waiting in self._waiting.values() if waiting.factory.done()]
        for waiting in done:
            del self._waiting[waiting.request.id]
        return [(waiting.request, _constraints(waiting)) for waiting in done]

    def expire(self, now_s: float) -> list[tuple[Request, PenstockError]]:
        """Remove the requests whose deadline has passed, and those whose grammar takes too long to
        compile."""
        expired: list[tuple[Request, PenstockError]] = []
        for waiting in list(self._waiting.values()):
            request = waiting.request
            if request.deadline_s is not None and request.deadline_s <= now_s:
                message = f"not finished {now_s - request.arrival_s:.3f} s after arrival"
                expired.append((request, DeadlineExceeded(message)))
            elif waiting.give_up_s <= now_s and not waiting.factory.done():
                message = (
                    f"the grammar takes more than {self._max_compile_s:g} s to compile; use a simpler one"
                )
                expired.append((request, BadValue(message)))
            else:
                continue
            del self._waiting[request.id]
        return expired

    def next_deadline_s(self) -> float | None:
        deadlines = (min(w.give_up_s, w.request.deadline_s or w.give_up_s) for w in self._waiting.values())
        return min(deadlines, default=None)

    def cancel(self, request_id: str) -> None:
        """Forget a request; a grammar that is being compiled stays in the cache."""
        self._waiting.pop(request_id, None)

    def clear(self) -> list[str]:
        """Forget every request and return their ids."""
        names = list(self._waiting)
        self._waiting.clear()
        return names

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _compiled(self, grammar: Grammar) -> Future[ConstraintFactory]:
        """The compiled grammar, from the cache or a thread; one that failed is compiled again."""
        found = self._cache.get(grammar)
        if found is not None and not (found.done() and found.exception() is not None):
            self._cache.move_to_end(grammar)
            return found
        found = self._cache[grammar] = Future()
        self._cache.move_to_end(grammar)
        while len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        self._jobs.put((grammar, found))
        while len(self._threads) < _NUM_THREADS:
            # Daemon threads: a grammar that never compiles keeps no process alive.
            thread = threading.Thread(target=self._work, name="penstock-grammars", daemon=True)
            self._threads.append(thread)
            thread.start()
        return found

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            grammar, factory = job
            try:
                factory.set_result(self._compile(grammar))
            except Exception as error:
                factory.set_exception(error)


def _constraints(waiting: _Waiting) -> list[Constraint] | PenstockError:
    try:
        make_constraint = waiting.factory.result()
        return [make_constraint() for _ in range(waiting.request.num_rows)]
    except PenstockError as error:
        return error
    except Exception as error:  # an error of the grammar library ends this request, not the engine
        return BadValue(f"the grammar cannot be used: {error}")
