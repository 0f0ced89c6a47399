"""Requests that have arrived but are not queued yet. Some wait here until an adapter is read or a grammar is
compiled; they delay no other request."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.adapter_waits import AdapterWaits
from penstock.engine.admission import Admission
from penstock.engine.grammars import Grammars
from penstock.engine.pending import PendingRequests
from penstock.errors import NotPossible, PenstockError
from penstock.runner.base import AdapterStore
from penstock.scheduler.background import BackgroundLane
from penstock.scheduler.generation import GenerationScheduler
from penstock.scheduler.scheduler import Scheduler
from penstock.types import Failure, Outcome, Request, SamplerParams


class Arrivals:
    """add → admit, on the engine's thread. A request leaves into a queue, or with a failure that is raised or
    returned."""

    def __init__(
        self,
        scheduler: Scheduler,
        pending: PendingRequests,
        generation: GenerationScheduler | None,
        admission: Admission,
        lane: BackgroundLane,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called, on any thread, when a request may be admitted."""
        self.adapters: AdapterStore | None = None  # None: the engine takes no adapters
        self.grammars: Grammars | None = None  # compiles grammars before their requests join `generation`
        self._queue = scheduler.queue
        self._pending = pending
        self._generation = generation
        self._admission = admission
        self._lane = lane
        self._wake = wake
        self._adapter_waits = AdapterWaits()

    def __len__(self) -> int:
        """Number of requests that wait here."""
        return len(self._adapter_waits) + (0 if self.grammars is None else len(self.grammars))

    def __contains__(self, request_id: str) -> bool:
        if self.adapters is not None and request_id in self._adapter_waits:
            return True
        return self.grammars is not None and request_id in self.grammars

    def requests(self) -> list[Request]:
        compiling = [] if self.grammars is None else self.grammars.requests()
        return compiling + self._adapter_waits.requests()

    def add(self, request: Request, now_s: float) -> None:
        """Queue a request, or hold it here until its adapters or its grammar are ready. Raises `BadValue`,
        `NotPossible` or `QueueFull` if it is refused."""
        if request.adapters is None or not self._waits_for_adapters(request):
            self._enqueue(request, now_s)

    def admit(self, now_s: float) -> list[Outcome]:
        """Queue the requests that are ready. Returns the failures of those that cannot be queued."""
        outcomes: list[Outcome] = []
        for request, error in self._adapter_waits.ready() if self._adapter_waits else ():
            try:
                if error is not None:
                    raise error
                self._enqueue(request, now_s)
            except PenstockError as failure:
                outcomes.append(Failure(request.id, failure))
        return outcomes + self._admit_compiled(now_s)

    def expire(self, now_s: float) -> list[Outcome]:
        """Fail the requests whose deadline has passed, and those whose grammar takes too long."""
        expired = self._adapter_waits.expire(now_s) if self._adapter_waits else []
        if self.grammars is not None:
            expired += self.grammars.expire(now_s)
        return [Failure(request.id, error) for request, error in expired]

    def next_deadline_s(self) -> float | None:
        """The latest time for the next call of `expire`; None: no call is needed."""
        adapting = self._adapter_waits.next_deadline_s() if self._adapter_waits else None
        compiling = None if self.grammars is None else self.grammars.next_deadline_s()
        if adapting is None or compiling is None:
            return compiling if adapting is None else adapting
        return min(adapting, compiling)

    def cancel(self, request_id: str) -> None:
        """Drop a request, if it waits here."""
        if not self._adapter_waits.cancel(request_id) and self.grammars is not None:
            self.grammars.cancel(request_id)

    def clear(self) -> list[str]:
        """Drop every request and return their ids."""
        compiling = [] if self.grammars is None else self.grammars.clear()
        return compiling + self._adapter_waits.clear()

    def close(self) -> None:
        if self.grammars is not None:
            self.grammars.close()

    def _waits_for_adapters(self, request: Request) -> bool:
        """Refuse adapters that are not loaded, and start reading those that are only on disk. Returns whether
        the request has to wait for a read."""
        if self.adapters is None or request.adapters is None:
            raise NotPossible("this model has no adapters", param="adapter")
        self.adapters.check(request.adapters)
        if reads := self.adapters.prefetch(request.adapters):
            self._adapter_waits.hold(request, reads, self._wake)
        return bool(reads)

    def _enqueue(self, request: Request, now_s: float) -> None:
        if not request.is_background:
            self._lane.saw_interactive(now_s)
        if request.sampling is not None:
            self._add_generation(request, request.sampling, now_s)
        elif request.is_background:
            self._pending.add(request)
        else:
            admission = self._admission
            if self._queue.num_tokens > admission.num_fast_tokens:
                admission.check(request)
            max_queue_s = admission.max_queue_s
            self._pending.add(request, now_s + max_queue_s if max_queue_s else None)

    def _add_generation(self, request: Request, sampling: SamplerParams, now_s: float) -> None:
        if self._generation is None:
            raise NotPossible("this engine does not generate")
        start_by_s = None
        if not request.is_background:
            self._admission.check_prompt(request, self._generation)
            start_by_s = self._admission.start_by_s(now_s)
        if sampling.grammar is None:
            self._generation.add(request, start_by_s=start_by_s)
        elif self.grammars is None:
            raise NotPossible("this engine does not constrain its output")
        else:
            self._generation.check(request)
            self.grammars.begin(request, sampling.grammar, self._wake)

    def _admit_compiled(self, now_s: float) -> list[Outcome]:
        if self.grammars is None or self._generation is None:
            return []
        outcomes: list[Outcome] = []
        for request, constraints in self.grammars.ready():
            try:
                if isinstance(constraints, PenstockError):
                    raise constraints
                start_by_s = None if request.is_background else self._admission.start_by_s(now_s)
                self._generation.add(request, constraints, start_by_s)
            except PenstockError as error:
                outcomes.append(Failure(request.id, error))
        return outcomes
