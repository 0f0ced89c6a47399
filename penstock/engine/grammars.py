"""Compiles grammars on separate threads. A request joins the generation scheduler when its grammar is ready,
and delays no other request.

One thread compiles only small grammars, so a small one never waits for large ones. A small grammar that turns
out to be slow moves behind the large ones.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.errors import BadValue, DeadlineExceeded, PenstockError, QueueFull
from penstock.inputs.grammar_sandbox import STACK_BYTES, GrammarTimeout, GrammarTooComplex
from penstock.scheduler.generation import Constraint
from penstock.types import Grammar, Request

ConstraintFactory = Callable[[], Constraint]  # makes a fresh constraint for each row from a compiled grammar


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    factory: ConstraintFactory
    num_bytes: int = 0  # of memory that it holds


Compile = Callable[[Grammar, float], Compiled]  # the number is a time limit in seconds

MAX_CACHED = 64  # compiled grammars, by content
MAX_CACHED_BYTES = 1 << 30
MAX_WAITING = 256  # requests
MAX_COMPILE_S = 30.0
MAX_SMALL_CHARS = 4096
MAX_SMALL_S = 2.0  # compile time after which a small grammar counts as large
REFUSED_S = 60.0  # how long a grammar that was too slow or too complex is refused without a new attempt
_MAX_REFUSED = 1024
# More than the stack of the sandbox, so that a grammar that compiled there compiles here too.
_THREAD_STACK_BYTES = 4 * STACK_BYTES

_Key = tuple[str, str]


@dataclass(slots=True, eq=False)
class _Job:
    """One grammar, compiled once for all requests that wait for it."""

    grammar: Grammar
    is_small: bool
    compiled: Future[Compiled] = field(default_factory=Future)
    began_s: float | None = None  # None: it waits for a thread
    num_waiting: int = 0  # requests

    @property
    def has_failed(self) -> bool:
        return self.compiled.done() and self.compiled.exception() is not None


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    request: Request
    grammar: Grammar
    job: _Job


class Grammars:
    """begin → ready. All public methods are called on the engine's thread."""

    def __init__(
        self,
        compile: Compile,
        *,
        close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        max_compile_s: float = MAX_COMPILE_S,
        max_small_s: float = MAX_SMALL_S,
    ) -> None:
        self._compile = compile
        self._close = close
        self._clock = clock
        self._max_compile_s = max_compile_s
        self._max_small_s = max_small_s
        self._changed = threading.Condition()  # guards the attributes up to the empty line
        self._small: deque[_Job] = deque()
        self._large: deque[_Job] = deque()
        self._cache: OrderedDict[_Key, _Job] = OrderedDict()  # last used last
        self._refused: OrderedDict[_Key, tuple[float, str]] = OrderedDict()  # until when, and why
        self._is_closed = False

        self._threads: list[threading.Thread] = []
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def begin(self, request: Request, grammar: Grammar, wake: Callable[[], None]) -> None:
        """Start compiling the grammar of a request. `wake` is called, on any thread, when it is ready."""
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFull(f"{len(self._waiting)} requests wait for their grammars; try again shortly")
        self._start_threads()
        with self._changed:
            job = self._job(grammar)
            job.num_waiting += 1
        self._waiting[request.id] = _Waiting(request, grammar, job)
        job.compiled.add_done_callback(lambda _: wake())

    def ready(self) -> list[tuple[Request, list[Constraint] | PenstockError]]:
        """Remove and return the requests whose grammars are done: a constraint for each row, or the error."""
        done = [waiting for waiting in self._waiting.values() if waiting.job.compiled.done()]
        for waiting in done:
            self._forget(waiting.request.id)
        return [(waiting.request, _constraints(waiting)) for waiting in done]

    def expire(self, now_s: float) -> list[tuple[Request, PenstockError]]:
        """Remove and return the requests whose deadline has passed, and those whose grammar takes too long to
        compile. Waiting for a thread does not count as compiling."""
        expired: list[tuple[Request, PenstockError]] = []
        for waiting in list(self._waiting.values()):
            request, job = waiting.request, waiting.job
            if request.deadline_s is not None and request.deadline_s <= now_s:
                message = f"not finished {now_s - request.arrival_s:.3f} s after arrival"
                expired.append((request, DeadlineExceeded(message)))
            elif self._give_up_s(job, now_s) <= now_s and not job.compiled.done():
                expired.append((request, BadValue(self._too_slow(), param=waiting.grammar.param)))
            else:
                continue
            self._forget(request.id)
        return expired

    def requests(self) -> list[Request]:
        """The requests whose grammar is being compiled."""
        return [waiting.request for waiting in self._waiting.values()]

    def next_deadline_s(self) -> float | None:
        """The latest time for the next call of `expire`; None: no call is needed."""
        now_s = self._clock()
        deadlines = [self._give_up_s(waiting.job, now_s) for waiting in self._waiting.values()]
        requests = (waiting.request for waiting in self._waiting.values())
        deadlines += [request.deadline_s for request in requests if request.deadline_s is not None]
        return min(deadlines, default=None)

    def cancel(self, request_id: str) -> None:
        """Forget a request. If its grammar is being compiled, the grammar stays in the cache."""
        if request_id in self._waiting:
            self._forget(request_id)

    def clear(self) -> list[str]:
        """Forget every request and return their ids."""
        names = list(self._waiting)
        for name in names:
            self._forget(name)
        return names

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._close()

    def _forget(self, request_id: str) -> None:
        with self._changed:
            self._waiting.pop(request_id).job.num_waiting -= 1

    def _give_up_s(self, job: _Job, now_s: float) -> float:
        return (now_s if job.began_s is None else job.began_s) + self._max_compile_s

    def _too_slow(self) -> str:
        return f"the grammar takes more than {self._max_compile_s:g} s to compile; use a simpler one"

    def _job(self, grammar: Grammar) -> _Job:
        """The job of an identical grammar, or a new job. A grammar that failed to compile is tried again."""
        key, now_s = (grammar.kind, grammar.text), self._clock()
        if key in self._refused:
            until_s, reason = self._refused[key]
            if now_s < until_s:
                raise BadValue(reason, param=grammar.param)
            del self._refused[key]
        job = self._cache.get(key)
        if job is None or job.has_failed:
            job = self._cache[key] = _Job(grammar, len(grammar.text) <= MAX_SMALL_CHARS)
            (self._small if job.is_small else self._large).append(job)
            self._changed.notify_all()
        self._cache.move_to_end(key)
        self._evict()
        return job

    def _evict(self) -> None:
        """Evict the least recently used grammars. Requests that use one keep it."""
        sizes = {key: _num_bytes(job) for key, job in self._cache.items()}
        num_bytes = sum(sizes.values())
        while len(self._cache) > MAX_CACHED or (num_bytes > MAX_CACHED_BYTES and len(self._cache) > 1):
            key, _ = self._cache.popitem(last=False)
            num_bytes -= sizes[key]

    def _start_threads(self) -> None:
        if self._threads:
            return
        default = threading.stack_size(_THREAD_STACK_BYTES)
        try:
            for small_only in (False, True):
                # Daemon threads, so that a grammar that never finishes does not keep the process alive.
                thread = threading.Thread(
                    target=self._work, args=(small_only,), name="penstock-grammars", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        finally:
            threading.stack_size(default)

    # On the compiler threads.

    def _work(self, small_only: bool) -> None:
        while (job := self._next(small_only)) is not None:
            key = (job.grammar.kind, job.grammar.text)
            try:
                compiled = self._compile(
                    job.grammar,
                    min(self._max_small_s, self._max_compile_s) if job.is_small else self._max_compile_s,
                )
            except GrammarTimeout:
                if job.is_small and self._max_small_s < self._max_compile_s:
                    self._put_behind_large_ones(job)
                else:
                    self._refuse(key, job, self._too_slow())
            except GrammarTooComplex:
                self._refuse(
                    key, job, "the grammar is too complex: it nests too deeply or needs too much memory"
                )
            except Exception as error:
                job.compiled.set_exception(error)
            else:
                job.compiled.set_result(compiled)

    def _next(self, small_only: bool) -> _Job | None:
        """The next grammar that a request still waits for; None when the engine closes."""
        with self._changed:
            while not self._is_closed:
                jobs = self._large if self._large and not small_only else self._small
                if not jobs:
                    self._changed.wait()
                    continue
                job = jobs.popleft()
                if job.num_waiting:
                    job.began_s = self._clock()
                    return job
                key = (job.grammar.kind, job.grammar.text)
                if self._cache.get(key) is job:
                    del self._cache[key]
        return None

    def _put_behind_large_ones(self, job: _Job) -> None:
        with self._changed:
            job.is_small, job.began_s = False, None
            self._large.append(job)
            self._changed.notify_all()

    def _refuse(self, key: _Key, job: _Job, reason: str) -> None:
        with self._changed:
            self._refused[key] = self._clock() + REFUSED_S, reason
            if len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)
        job.compiled.set_exception(BadValue(reason))


def _num_bytes(job: _Job) -> int:
    return job.compiled.result().num_bytes if job.compiled.done() and not job.has_failed else 0


def _constraints(waiting: _Waiting) -> list[Constraint] | PenstockError:
    param = waiting.grammar.param
    try:
        make_constraint = waiting.job.compiled.result().factory
        return [make_constraint() for _ in range(waiting.request.num_rows)]
    except PenstockError as error:
        return type(error)(error.message, param=param)
    except Exception as error:  # an error in the grammar library must end this request, not the engine
        return BadValue(f"the grammar cannot be used: {error}", param=param)
