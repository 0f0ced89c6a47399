"""Small and large requests that wait together: both kinds get a share of each step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduler.scheduler import Budget, ScheduledRows, Scheduler
from tests.helpers import make_request
from tests.thinning import num_examples


def scheduler_of(tokens: int = 100, rows: int = 100, *, shared: bool = True) -> Scheduler:
    return Scheduler(Budget(tokens, rows, 10**9, is_shared=shared))


def step_of(scheduler: Scheduler) -> dict[str, int]:
    """The tokens of each request in the next step."""
    return tokens_by_request(scheduler.schedule())


def tokens_by_request(scheduled: list[ScheduledRows]) -> dict[str, int]:
    assert len({entry.request.id for entry in scheduled}) == len(scheduled), "a request has one entry"
    return {entry.request.id: int(entry.request.lengths[entry.rows].sum()) for entry in scheduled}


def test_a_single_row_runs_in_the_next_step_beside_a_large_request() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("large", [10] * 100))
    assert step_of(scheduler) == {"large": 100}
    scheduler.add(make_request("single", [10]))
    assert step_of(scheduler) == {"single": 10, "large": 90}
    assert step_of(scheduler) == {"large": 100}


def test_a_single_row_runs_in_the_next_step_however_many_large_requests_wait() -> None:
    scheduler = scheduler_of()
    for number in range(3 * Scheduler.LOOK_AHEAD):
        scheduler.add(make_request(f"large-{number}", [10] * 20))
    scheduler.add(make_request("single", [10]))
    assert step_of(scheduler) == {"single": 10, "large-0": 90}


def test_a_flood_of_small_requests_leaves_a_large_one_half_of_each_step() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("large", [10] * 100))
    names = (str(number) for number in itertools.count())
    for _ in range(20):
        for _ in range(30):
            scheduler.add(make_request(next(names), [10]))
        step = step_of(scheduler)
        assert step["large"] == 50 and sum(step.values()) == 100


def test_large_requests_run_one_after_the_other_in_full_steps() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("a", [10] * 25))
    scheduler.add(make_request("b", [10] * 25))
    steps = [step_of(scheduler) for _ in range(5)]
    assert steps == [{"a": 100}, {"a": 100}, {"a": 50, "b": 50}, {"b": 100}, {"b": 100}]


@pytest.mark.parametrize("shared", [True, False])
def test_small_requests_alone_run_in_the_order_of_a_queue_without_shares(shared: bool) -> None:
    scheduler = scheduler_of(shared=shared)
    for number, length in enumerate((60, 50, 30, 100, 10, 20, 70)):
        scheduler.add(make_request(str(number), [length], arrival_s=number))
    steps = [step_of(scheduler) for _ in range(5)]
    assert steps == [
        {"0": 60, "2": 30, "4": 10},
        {"1": 50, "5": 20},
        {"3": 100},
        {"6": 70},
        {},
    ]


def test_without_shares_a_small_request_waits_for_a_large_one() -> None:
    scheduler = scheduler_of(shared=False)
    scheduler.add(make_request("large", [10] * 30))
    scheduler.add(make_request("single", [10]))
    assert [list(step_of(scheduler)) for _ in range(4)] == [["large"], ["large"], ["large"], ["single"]]


def test_a_request_with_more_rows_than_a_step_is_large() -> None:
    scheduler = scheduler_of(rows=4)
    scheduler.add(make_request("large", [1] * 12))
    scheduler.add(make_request("single", [1]))
    scheduled = scheduler.schedule()
    assert {entry.request.id: len(entry.rows) for entry in scheduled} == {"single": 1, "large": 3}


def test_rows_longer_than_half_a_step_do_not_starve_beside_small_requests() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("large", [60] * 10))
    names = (str(number) for number in itertools.count())
    steps = 0
    while scheduler.queue.has_large:
        for _ in range(30):
            scheduler.add(make_request(next(names), [10]))
        scheduler.schedule()
        steps += 1
    assert steps <= 20, "it gets half of the device"


def test_small_requests_do_not_starve_beside_rows_that_fill_a_step() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("large", [100] * 50))
    for number in range(10):
        scheduler.add(make_request(str(number), [100]))
    steps = [next(iter(step_of(scheduler))) for _ in range(20)]
    assert steps.count("large") == 10


def test_a_less_urgent_small_request_takes_no_share_from_a_large_one() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("large", [10] * 30, priority=0))
    scheduler.add(make_request("background", [10], priority=5))
    steps = [step_of(scheduler) for _ in range(4)]
    assert steps == [{"large": 100}, {"large": 100}, {"large": 100}, {"background": 10}]


def test_a_less_urgent_large_request_takes_only_what_small_ones_leave() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("background", [10] * 30, priority=5, arrival_s=1.0))
    for number in range(15):
        scheduler.add(make_request(str(number), [10], arrival_s=1.0))
    assert "background" not in step_of(scheduler)
    assert step_of(scheduler)["background"] == 50


def test_a_less_urgent_request_that_has_waited_its_head_start_has_its_share() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("background", [10] * 30, priority=5, arrival_s=0.0))
    for number in range(15):
        scheduler.add(make_request(str(number), [10], arrival_s=6.0))
    assert step_of(scheduler)["background"] == 50


def test_steps_of_large_requests_stay_short_while_small_ones_come_and_not_for_ever() -> None:
    scheduler = scheduler_of()
    scheduler.max_shared_tokens = 40
    scheduler.add(make_request("large", [10] * 1000))
    assert step_of(scheduler) == {"large": 100}
    scheduler.add(make_request("single", [10]))
    assert step_of(scheduler) == {"single": 10, "large": 30}
    assert step_of(scheduler) == {"large": 40}
    for _ in range(Scheduler.SHORT_STEPS):
        scheduler.schedule()
    assert step_of(scheduler) == {"large": 100}


def test_a_large_request_that_follows_small_ones_begins_with_short_steps() -> None:
    scheduler = scheduler_of()
    scheduler.max_shared_tokens = 40
    scheduler.add(make_request("single", [10]))
    assert step_of(scheduler) == {"single": 10}
    scheduler.add(make_request("large", [10] * 1000))
    assert step_of(scheduler) == {"large": 40}


def test_cancelling_a_large_request_keeps_the_books_right() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("large", [10] * 30))
    scheduler.add(make_request("single", [10]))
    scheduler.schedule()
    scheduler.cancel("large")
    queue = scheduler.queue
    assert (queue.num_tokens, queue.num_rows, queue.num_large_tokens, queue.num_large_rows) == (0, 0, 0, 0)
    assert len(queue) == 0 and scheduler.schedule() == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # steps before it arrives
            st.lists(st.integers(1, 40), min_size=1, max_size=12),
            st.integers(-2, 2),
        ),
        min_size=1,
        max_size=30,
    )
)
@settings(max_examples=num_examples(150), deadline=None)
def test_every_row_runs_once_within_the_budget_and_no_request_waits_for_later_ones_for_ever(
    stream: list[tuple[int, list[int], int]],
) -> None:
    scheduler = Scheduler(Budget(32, 5, 10**9, is_shared=True))
    arrivals = [(index, *each) for index, each in enumerate(stream)]
    left = {str(index): set(range(len(lengths))) for index, _, lengths, _ in arrivals}
    step = due = 0
    while arrivals or len(scheduler.queue):
        while arrivals and due + arrivals[0][1] <= step:
            index, gap, lengths, priority = arrivals.pop(0)
            due += gap
            scheduler.add(make_request(str(index), lengths, priority=priority, arrival_s=float(due)))
        scheduled = scheduler.schedule()
        assert bool(scheduled) or not len(scheduler.queue), "a step runs something while anything waits"
        num_rows = sum(len(entry.rows) for entry in scheduled)
        assert num_rows <= 5
        assert sum(tokens_by_request(scheduled).values()) <= 32 or num_rows == 1
        for entry in scheduled:
            rows = set(entry.rows.tolist())
            assert rows <= left[entry.request.id]
            left[entry.request.id] -= rows
        queue = scheduler.queue
        waiting = list(queue)
        assert queue.num_tokens == sum(queued.num_tokens_left for queued in waiting)
        assert queue.num_large_tokens == sum(q.num_tokens_left for q in waiting if q.is_large)
        assert queue.num_large_rows == sum(q.num_rows_left for q in waiting if q.is_large)
        assert [q.rank for q in waiting] == sorted(q.rank for q in waiting)
        step += 1
    assert not any(left.values())
