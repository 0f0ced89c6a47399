"""The scheduler under random sequences of events, compared with a simple model of what should wait."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.errors import QueueFull
from penstock.scheduler.queue import HEAD_START_S
from penstock.scheduler.scheduler import Budget, ScheduledRows, Scheduler
from penstock.types import Request
from tests.helpers import make_request
from tests.thinning import num_examples

BUDGET = Budget(max_tokens=32, max_rows=5, max_queued_tokens=200)
STEP_S = 0.25


@dataclass
class Arrival:
    gap_s: float
    lengths: list[int]
    priority: int


arrivals = st.lists(
    st.builds(
        Arrival,
        gap_s=st.sampled_from([0.0, 0.0, 0.1, 0.25, 1.0]),
        lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
        priority=st.integers(-3, 3),
    ),
    min_size=1,
    max_size=40,
)


def place(request: Request) -> tuple[float, int]:
    return request.arrival_s + request.priority * HEAD_START_S, int(request.id)


@given(arrivals)
@settings(max_examples=num_examples(150), deadline=None)
def test_every_request_finishes_within_the_steps_that_its_place_in_the_queue_allows(
    stream: list[Arrival],
) -> None:
    """Each step runs at least one row of the first request. So a request takes at most one step for each of
    its rows and of the rows before it, however many requests arrive after it."""
    clock = itertools.accumulate(arrival.gap_s for arrival in stream)
    requests = [
        make_request(str(i), arrival.lengths, priority=arrival.priority, arrival_s=now)
        for i, (arrival, now) in enumerate(zip(stream, clock, strict=True))
    ]
    scheduler = Scheduler(Budget(BUDGET.max_tokens, BUDGET.max_rows, 10**9))
    joined: dict[str, int] = {}
    finished: dict[str, int] = {}
    rows_run = dict.fromkeys((request.id for request in requests), 0)
    waiting = list(requests)
    for step in itertools.count():
        while waiting and waiting[0].arrival_s <= step * STEP_S:
            joined[waiting[0].id] = step
            scheduler.add(waiting.pop(0))
        scheduled = scheduler.schedule()
        for entry in scheduled:
            rows_run[entry.request.id] += len(entry.rows)
            if rows_run[entry.request.id] == entry.request.num_rows:
                finished[entry.request.id] = step
        if not scheduled and not waiting:
            break
    assert finished.keys() == rows_run.keys()
    for request in requests:
        ahead = sum(other.num_rows for other in requests if place(other) < place(request))
        assert finished[request.id] - joined[request.id] < ahead + request.num_rows


@dataclass
class Expected:
    request: Request
    number: int  # number of earlier requests
    rows: set[int]

    @property
    def place(self) -> tuple[float, int]:
        return self.request.arrival_s + self.request.priority * HEAD_START_S, self.number

    @property
    def tokens(self) -> int:
        return int(sum(self.request.lengths[row] for row in self.rows))


class Line(RuleBasedStateMachine):
    """Adds, cancels, schedules and expires requests at random. There are few ids, so that they are reused."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(BUDGET)
        self.waiting: dict[str, Expected] = {}
        self.count = itertools.count()
        self.now_s = 0.0

    @rule(
        name=st.sampled_from("abcde"),
        lengths=st.lists(st.integers(1, 4) | st.integers(1, 40), min_size=1, max_size=8),
        priority=st.integers(-2, 2),
        timeout_s=st.none() | st.integers(0, 3),
    )
    def add(self, name: str, lengths: list[int], priority: int, timeout_s: int | None) -> None:
        if name in self.waiting:
            return
        deadline = None if timeout_s is None else self.now_s + timeout_s
        request = make_request(name, lengths, priority=priority, arrival_s=self.now_s, deadline_s=deadline)
        queued = sum(expected.tokens for expected in self.waiting.values())
        room = not queued or queued + request.num_tokens <= BUDGET.max_queued_tokens
        try:
            self.scheduler.add(request)
            assert room
        except QueueFull:
            assert not room
            return
        self.waiting[name] = Expected(request, next(self.count), set(range(len(lengths))))

    @rule(name=st.sampled_from("abcde"))
    def cancel(self, name: str) -> None:
        assert self.scheduler.cancel(name) == (self.waiting.pop(name, None) is not None)

    @rule(seconds=st.integers(0, 2))
    def expire(self, seconds: int) -> None:
        self.now_s += seconds
        late = {
            name
            for name, expected in self.waiting.items()
            if expected.request.deadline_s is not None and expected.request.deadline_s <= self.now_s
        }
        assert {request.id for request in self.scheduler.expire(self.now_s)} == late
        for name in late:
            del self.waiting[name]

    @precondition(lambda self: self.waiting)
    @rule()
    def schedule(self) -> None:
        first = min(self.waiting.values(), key=lambda expected: expected.place)
        scheduled = self.scheduler.schedule()
        assert scheduled[0].request is first.request, "the first request in the queue always runs"
        self._check_budget(scheduled)
        for entry in scheduled:
            expected = self.waiting[entry.request.id]
            taken = {int(row) for row in entry.rows}
            assert entry.request is expected.request
            assert len(taken) == len(entry.rows) and taken <= expected.rows
            expected.rows -= taken
            if not expected.rows:
                del self.waiting[entry.request.id]

    @invariant()
    def the_books_are_right(self) -> None:
        line = self.scheduler.queue
        assert line.num_tokens == sum(expected.tokens for expected in self.waiting.values())
        assert line.num_rows == sum(len(expected.rows) for expected in self.waiting.values())
        assert {waiting.request.id for waiting in line} == self.waiting.keys()
        assert len(line) == len(self.waiting)
        assert all(name in line for name in self.waiting)

    def teardown(self) -> None:
        while self.waiting:
            self.schedule()
        assert self.scheduler.schedule() == []
        self.the_books_are_right()

    @staticmethod
    def _check_budget(scheduled: list[ScheduledRows]) -> None:
        rows = sum(len(entry.rows) for entry in scheduled)
        tokens = sum(int(entry.request.lengths[entry.rows].sum()) for entry in scheduled)
        assert rows <= BUDGET.max_rows
        assert tokens <= BUDGET.max_tokens or rows == 1


Line.TestCase.settings = settings(max_examples=num_examples(120), stateful_step_count=40, deadline=None)
TestLine = Line.TestCase
