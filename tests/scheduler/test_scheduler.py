from __future__ import annotations

import pytest

from penstock.errors import QueueFull
from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.queue import HEAD_START_S
from penstock.scheduler.scheduler import Budget, Chunking, ScheduledRows, Scheduler
from penstock.types import PoolingParams, Request, SamplerParams, Task
from tests.helpers import ints, make_request


def scheduler_of(tokens: int = 100, rows: int = 100, queued_tokens: int = 10**9) -> Scheduler:
    return Scheduler(Budget(tokens, rows, queued_tokens))


def ids(scheduled: list[ScheduledRows]) -> list[str]:
    return [entry.request.id for entry in scheduled]


def lengths(entry: ScheduledRows) -> list[int]:
    return entry.request.lengths[entry.rows].tolist()


def drain(scheduler: Scheduler) -> list[list[ScheduledRows]]:
    steps = []
    while scheduled := scheduler.schedule():
        steps.append(scheduled)
    return steps


def test_an_empty_queue_gives_no_work() -> None:
    assert scheduler_of().schedule() == []


def test_small_requests_share_one_step() -> None:
    scheduler = scheduler_of(tokens=30)
    for name in "abc":
        scheduler.add(make_request(name, [10]))
    assert ids(scheduler.schedule()) == ["a", "b", "c"]
    assert scheduler.schedule() == []


def test_a_step_never_exceeds_its_token_budget() -> None:
    scheduler = scheduler_of(tokens=25)
    scheduler.add(make_request("a", [10] * 7))
    assert [sum(map(sum, map(lengths, step))) for step in drain(scheduler)] == [20, 20, 20, 10]


def test_a_step_fills_its_token_budget_to_the_last_token() -> None:
    scheduler = scheduler_of(tokens=20)
    scheduler.add(make_request("a", [10, 10, 10]))
    assert lengths(scheduler.schedule()[0]) == [10, 10]


def test_a_step_never_exceeds_its_row_budget() -> None:
    scheduler = scheduler_of(tokens=10**6, rows=3)
    scheduler.add(make_request("a", [1] * 4))
    scheduler.add(make_request("b", [1] * 3))
    assert [[len(entry.rows) for entry in step] for step in drain(scheduler)] == [[3], [1, 2], [1]]


def test_a_request_too_large_for_one_step_runs_over_several_longest_rows_first() -> None:
    scheduler = scheduler_of(tokens=10)
    scheduler.add(make_request("a", [2, 9, 4, 6]))
    steps = drain(scheduler)
    assert [lengths(step[0]) for step in steps] == [[9], [6, 4], [2]]
    assert sorted(int(row) for step in steps for row in step[0].rows) == [0, 1, 2, 3]


def test_a_row_larger_than_the_whole_budget_runs_alone() -> None:
    scheduler = scheduler_of(tokens=10)
    scheduler.add(make_request("huge", [50]))
    scheduler.add(make_request("small", [1]))
    assert [ids(step) for step in drain(scheduler)] == [["huge"], ["small"]]


def test_each_oversized_row_of_a_request_runs_in_its_own_step() -> None:
    scheduler = scheduler_of(tokens=10)
    scheduler.add(make_request("huge", [50, 60, 3]))
    assert [lengths(step[0]) for step in drain(scheduler)] == [[60], [50], [3]]


def test_requests_behind_one_that_does_not_fit_fill_the_rest_of_the_step() -> None:
    scheduler = scheduler_of(tokens=10)
    scheduler.add(make_request("first", [6]))
    scheduler.add(make_request("wide", [8]))
    scheduler.add(make_request("narrow", [4]))
    assert ids(scheduler.schedule()) == ["first", "narrow"]
    assert ids(scheduler.schedule()) == ["wide"]


def test_a_request_that_was_passed_over_is_first_in_the_next_step() -> None:
    scheduler = scheduler_of(tokens=10)
    scheduler.add(make_request("first", [6]))
    scheduler.add(make_request("wide", [10]))
    scheduler.add(make_request("narrow", [4]))
    scheduler.schedule()
    scheduler.add(make_request("later", [4]))
    assert ids(scheduler.schedule()) == ["wide"]


def test_looking_ahead_stops_after_a_bounded_number_of_requests() -> None:
    scheduler = scheduler_of(tokens=10)
    scheduler.add(make_request("first", [6]))
    for number in range(Scheduler.LOOK_AHEAD + 1):
        scheduler.add(make_request(f"wide-{number}", [9]))
    scheduler.add(make_request("narrow", [1]))
    assert ids(scheduler.schedule()) == ["first"]


def test_equal_priorities_are_served_in_order_of_arrival() -> None:
    scheduler = scheduler_of(tokens=10)
    for number in range(5):
        scheduler.add(make_request(f"r{number}", [10], arrival_s=float(number)))
    assert [ids(step) for step in drain(scheduler)] == [["r0"], ["r1"], ["r2"], ["r3"], ["r4"]]


def test_equal_arrivals_are_served_in_the_order_in_which_they_were_added() -> None:
    scheduler = scheduler_of(tokens=10)
    for name in ("z", "a", "m"):
        scheduler.add(make_request(name, [10], arrival_s=5.0))
    assert [ids(step) for step in drain(scheduler)] == [["z"], ["a"], ["m"]]


def test_a_lower_priority_number_runs_sooner() -> None:
    scheduler = scheduler_of(tokens=10)
    scheduler.add(make_request("plain", [10], priority=0))
    scheduler.add(make_request("background", [10], priority=5))
    scheduler.add(make_request("urgent", [10], priority=-5))
    assert [ids(step) for step in drain(scheduler)] == [["urgent"], ["plain"], ["background"]]


@pytest.mark.parametrize(("lead_s", "winner"), [(0.9, "urgent"), (1.1, "patient")])
def test_a_priority_level_is_worth_one_head_start(lead_s: float, winner: str) -> None:
    scheduler = scheduler_of(tokens=10)
    scheduler.add(make_request("patient", [10], priority=1, arrival_s=100.0))
    scheduler.add(make_request("urgent", [10], priority=0, arrival_s=100.0 + lead_s * HEAD_START_S))
    assert ids(scheduler.schedule()) == [winner]


def test_a_steady_stream_of_urgent_requests_does_not_starve_a_patient_one() -> None:
    scheduler = scheduler_of(tokens=10)
    scheduler.add(make_request("patient", [10], priority=3, arrival_s=0.0))
    step_s, now = 0.5, 0.0
    for step in range(100):
        scheduler.add(make_request(f"urgent-{step}", [10], priority=0, arrival_s=now))
        if "patient" in ids(scheduler.schedule()):
            break
        now += step_s
    else:
        pytest.fail("the patient request never ran")
    assert now <= 3 * HEAD_START_S + step_s


def test_later_requests_fill_the_room_that_a_large_request_leaves() -> None:
    scheduler = scheduler_of(tokens=10)
    scheduler.add(make_request("bulk", [7] * 20))
    scheduler.add(make_request("small", [3]))
    assert ids(scheduler.schedule()) == ["bulk", "small"]


def test_a_cancelled_request_never_runs() -> None:
    scheduler = scheduler_of()
    for name in "abc":
        scheduler.add(make_request(name, [10]))
    assert scheduler.cancel("b")
    assert ids(scheduler.schedule()) == ["a", "c"]


def test_cancelling_an_unknown_request_changes_nothing() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("a", [10]))
    assert not scheduler.cancel("stranger")
    assert (scheduler.queue.num_tokens, scheduler.queue.num_rows, len(scheduler.queue)) == (10, 1, 1)


def test_cancelling_a_half_run_request_drops_the_rest_of_its_rows() -> None:
    scheduler = scheduler_of(tokens=10)
    scheduler.add(make_request("a", [10, 10, 10]))
    scheduler.schedule()
    assert scheduler.cancel("a")
    assert scheduler.schedule() == []
    assert (scheduler.queue.num_tokens, scheduler.queue.num_rows, len(scheduler.queue)) == (0, 0, 0)


def expired_ids(scheduler: Scheduler, now_s: float) -> list[str]:
    return [request.id for request in scheduler.expire(now_s)]


def test_a_request_expires_at_its_deadline_and_not_before() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("a", [10], deadline_s=5.0))
    assert expired_ids(scheduler, 4.999) == []
    assert expired_ids(scheduler, 5.0) == ["a"]
    assert scheduler.schedule() == []


def test_requests_without_a_deadline_never_expire() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("a", [10]))
    assert expired_ids(scheduler, 1e12) == []
    assert ids(scheduler.schedule()) == ["a"]


def test_only_requests_past_their_deadline_expire() -> None:
    scheduler = scheduler_of()
    for name, deadline in (("late", 1.0), ("early", 9.0), ("later", 2.0)):
        scheduler.add(make_request(name, [10], deadline_s=deadline))
    assert expired_ids(scheduler, 2.5) == ["late", "later"]
    assert ids(scheduler.schedule()) == ["early"]


def test_a_request_that_is_running_or_cancelled_does_not_expire_any_more() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("running", [10], deadline_s=1.0))
    scheduler.schedule()
    scheduler.add(make_request("cancelled", [10], deadline_s=1.0))
    scheduler.cancel("cancelled")
    assert expired_ids(scheduler, 2.0) == []


def test_an_id_that_is_used_again_does_not_inherit_the_old_deadline() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("a", [10], deadline_s=1.0))
    scheduler.cancel("a")
    scheduler.add(make_request("a", [10], deadline_s=9.0))
    assert expired_ids(scheduler, 5.0) == []
    assert expired_ids(scheduler, 9.0) == ["a"]


def test_the_next_deadline_is_the_earliest_of_the_waiting_requests() -> None:
    scheduler = scheduler_of()
    assert scheduler.queue.next_deadline_s() is None
    scheduler.add(make_request("a", [10], deadline_s=7.0))
    scheduler.add(make_request("b", [10], deadline_s=3.0))
    assert scheduler.queue.next_deadline_s() == 3.0
    scheduler.cancel("b")
    assert scheduler.queue.next_deadline_s() == 7.0


def test_deadlines_of_requests_that_have_left_do_not_pile_up() -> None:
    scheduler = scheduler_of()
    for number in range(1000):
        scheduler.add(make_request(str(number), [10], deadline_s=1e6 + number))
        scheduler.schedule()
    assert len(scheduler.queue._deadlines) < 200


def test_a_full_queue_refuses_and_says_how_full_it_is() -> None:
    scheduler = scheduler_of(queued_tokens=100)
    scheduler.add(make_request("a", [60]))
    with pytest.raises(QueueFull, match="60 tokens are waiting and at most 100"):
        scheduler.add(make_request("b", [41]))
    scheduler.add(make_request("c", [40]))
    assert scheduler.queue.num_tokens == 100
    assert "b" not in scheduler.queue


def test_an_empty_queue_takes_a_request_of_any_size() -> None:
    scheduler = scheduler_of(tokens=10, queued_tokens=20)
    scheduler.add(make_request("bulk", [10] * 30))
    assert len(drain(scheduler)) == 30


def test_a_full_queue_takes_requests_again_after_a_step() -> None:
    scheduler = scheduler_of(tokens=50, queued_tokens=100)
    scheduler.add(make_request("a", [50, 50]))
    with pytest.raises(QueueFull):
        scheduler.add(make_request("b", [50]))
    scheduler.schedule()
    scheduler.add(make_request("b", [50]))
    assert scheduler.queue.num_tokens == 100


def test_a_refused_request_leaves_no_trace() -> None:
    scheduler = scheduler_of(queued_tokens=10)
    scheduler.add(make_request("a", [10]))
    refused: Request = make_request("b", [1], deadline_s=1.0)
    with pytest.raises(QueueFull):
        scheduler.add(refused)
    assert expired_ids(scheduler, 2.0) == []
    assert (scheduler.queue.num_tokens, scheduler.queue.num_rows, len(scheduler.queue)) == (10, 1, 1)


def test_large_rows_are_chosen_to_fill_the_step_behind_the_first_in_the_queue() -> None:
    scheduler = scheduler_of(tokens=100)
    for name, length in (("a", 50), ("b", 30), ("c", 70), ("d", 49), ("e", 50)):
        scheduler.add(make_request(name, [length]))
    # "e" fits exactly beside "a". Then "b" is first in the queue, and "c" fills the rest of its step.
    assert [sorted(ids(step)) for step in drain(scheduler)] == [["a", "e"], ["b", "c"], ["d"]]


def test_small_rows_run_in_order_even_where_a_large_one_would_fill_more() -> None:
    scheduler = scheduler_of(tokens=100)
    for name, length in (("a", 20), ("b", 20), ("c", 20), ("d", 45), ("e", 40)):
        scheduler.add(make_request(name, [length]))
    assert ids(scheduler.schedule()) == ["a", "b", "c", "e"]
    assert ids(scheduler.schedule()) == ["d"]


TOKENS = PoolingParams(Task.TOKEN_EMBED)


def limited(chunked: bool, output_bytes: int = 40, tokens: int = 100) -> Scheduler:
    """A scheduler with a limit on output bytes. Each token of a per-token task outputs four bytes."""
    chunking = Chunking(BlockPool(64, 4), tokens) if chunked else None
    budget = Budget(tokens, 100, 10**9, output_bytes)
    return Scheduler(budget, chunking, token_bytes=lambda params: 4 if params.per_token else 0)


@pytest.mark.parametrize("chunked", [False, True])
def test_token_outputs_of_a_step_are_bounded_and_other_rows_fill_it(chunked: bool) -> None:
    scheduler = limited(chunked)
    scheduler.add(make_request("a", [4, 4, 4], params=TOKENS))
    scheduler.add(make_request("b", [3, 3], params=TOKENS))
    scheduler.add(make_request("c", [50]))
    steps = drain(scheduler)
    assert [[(entry.request.id, lengths(entry)) for entry in step] for step in steps] == [
        [("a", [4, 4]), ("c", [50])],
        [("a", [4]), ("b", [3, 3])],
    ]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_row_beyond_the_output_bound_runs_whole_and_without_others(chunked: bool) -> None:
    scheduler = limited(chunked)
    scheduler.add(make_request("a", [30, 2], params=TOKENS))
    assert [[lengths(entry) for entry in step] for step in drain(scheduler)] == [[[30]], [[2]]]
    assert scheduler.queue.num_tokens == scheduler.queue.num_rows == 0


def test_a_chunked_row_continues_whatever_it_outputs() -> None:
    scheduler = limited(chunked=True, tokens=20)
    scheduler.add(make_request("a", [45], params=TOKENS))
    ends = [entry.ends.tolist() for step in drain(scheduler) for entry in step if entry.ends is not None]
    assert ends == [[20], [40], [45]]


def test_every_output_of_a_row_counts_towards_the_bound() -> None:
    scheduler = limited(chunked=False)
    request = make_request("a", [5, 5])
    request.extra_params = (TOKENS, TOKENS)
    scheduler.add(request)
    assert [[lengths(entry) for entry in step] for step in drain(scheduler)] == [[[5]], [[5]]]


def prefix_caching_scheduler(pool: BlockPool) -> Scheduler:
    return Scheduler(Budget(100, 100, 10**9), Chunking(pool, 100, prefix_caching=True))


def run_with_prefixes(scheduler: Scheduler, request: Request) -> tuple[int, ...]:
    """Run a request of one row. Returns the numbers of tokens that came from the prefix cache."""
    request.reuse_prefix = True
    scheduler.add(request)
    (step,) = drain(scheduler)
    assert step[0].begins is not None
    return tuple(step[0].begins.tolist())


def test_rows_of_equal_tokens_share_the_blocks_of_their_prefix() -> None:
    scheduler = prefix_caching_scheduler(BlockPool(64, 4))
    assert run_with_prefixes(scheduler, make_request("a", [17])) == (0,)
    assert run_with_prefixes(scheduler, make_request("b", [17])) == (16,)


@pytest.mark.parametrize(
    ("name", "value"),
    [("adapters", [0]), ("adapters", [1]), ("type_ids", [1] * 17), ("key_limits", [9])],
    ids=str,
)
def test_rows_whose_hidden_states_differ_share_no_prefix_block(name: str, value: list[int]) -> None:
    scheduler = prefix_caching_scheduler(BlockPool(64, 4))
    run_with_prefixes(scheduler, make_request("a", [17]))
    for again, cached in (("b", 0), ("c", 16)):
        request = make_request(again, [17])
        setattr(request, name, ints(value))
        assert run_with_prefixes(scheduler, request) == (cached,)


def test_rows_that_generate_share_no_prefix_block_with_rows_that_are_pooled() -> None:
    pool = BlockPool(64, 4)
    run_with_prefixes(prefix_caching_scheduler(pool), make_request("a", [17]))
    generation = GenerationScheduler(pool, GenerationLimits(4, 100, 100, 64, 1000))
    request = make_request("b", [17], params=PoolingParams(Task.GENERATE))
    request.sampling = SamplerParams(max_tokens=2)
    generation.add(request)
    assert generation.schedule(0.0) is not None
    assert pool.hit_tokens == 0


def test_a_step_has_no_more_adapters_than_slots_and_no_request_starves() -> None:
    scheduler = Scheduler(Budget(max_tokens=100, max_rows=16, max_queued_tokens=10_000))
    scheduler.max_adapters = 2
    waiting = {}
    for number in range(40):
        request = make_request(str(number), [5])
        request.adapters = ints([number % 5 - 1])
        waiting[request.id] = number % 5 - 1
        scheduler.add(request)
    first = iter(list(waiting))
    while waiting:
        oldest = next(name for name in first if name in waiting)
        scheduled = scheduler.schedule()
        names = [entry.request.id for entry in scheduled]
        assert oldest in names, "the request that waits longest is in every step"
        assert len({waiting[name] for name in names} - {-1}) <= 2
        for name in names:
            del waiting[name]
        first = iter(list(waiting))
    assert not len(scheduler.queue)
