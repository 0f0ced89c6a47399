"""Clients share the device by their weights, and no client starves another."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import QueueFull
from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.fair_queue import MAX_LEVELS
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.scheduler import Budget, Chunking, Scheduler
from tests.generation.fakes import generation_request
from tests.helpers import make_request
from tests.thinning import num_examples

STEP = 100  # tokens in a step
STEP_S = 0.05


@dataclass
class Traffic:
    """A client that always has `num_waiting` requests with rows of these lengths in the queue."""

    name: str
    lengths: list[int]
    num_waiting: int = 1
    weight: float = 1.0
    priority: int = 0
    pending: set[str] = field(default_factory=set)


class Device:
    """A scheduler whose steps take `STEP_S` each on a fake clock, and clients that keep it busy."""

    def __init__(self, *clients: Traffic, shared: bool = True) -> None:
        self.scheduler = Scheduler(Budget(STEP, STEP, 10**9, is_shared=shared))
        self.clients = clients
        self.names = itertools.count()
        self.now_s = 0.0
        self.tokens: Counter[str] = Counter()  # finished tokens by client
        self.waits: defaultdict[str, list[int]] = defaultdict(list)  # steps per finished request, by client
        self.left: dict[str, tuple[Traffic, int, int]] = {}  # client, remaining rows, step of arrival
        self.num_steps = 0

    def refill(self) -> None:
        for client in self.clients:
            while len(client.pending) < client.num_waiting:
                name = str(next(self.names))
                request = make_request(
                    name,
                    client.lengths,
                    client=client.name,
                    weight=client.weight,
                    priority=client.priority,
                    arrival_s=self.now_s,
                )
                self.scheduler.add(request)
                client.pending.add(name)
                self.left[name] = (client, len(client.lengths), self.num_steps)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.refill()
            for entry in self.scheduler.schedule():
                client, rows, came = self.left[entry.request.id]
                self.tokens[client.name] += int(entry.request.lengths[entry.rows].sum())
                self.left[entry.request.id] = (client, rows - len(entry.rows), came)
                if rows == len(entry.rows):
                    client.pending.discard(entry.request.id)
                    self.waits[client.name].append(self.num_steps - came)
            self.num_steps += 1
            self.now_s += STEP_S

    def share(self, name: str) -> float:
        return self.tokens[name] / sum(self.tokens.values())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "flood",
    [
        [Traffic("flood", [10], 500)],
        [Traffic("flood", [10] * 200, 4)],
        [Traffic("flood", [10], 500), Traffic("flood", [10] * 200, 4)],
        [Traffic(f"flood-{number}", [10] * 200, 2) for number in range(4)],
        [Traffic("flood", [100], 50)],
    ],
    ids=["singles", "batches", "both", "four of batches", "whole steps"],
)
def test_a_client_with_one_row_at_a_time_runs_in_the_next_step_beside_a_flood(
    flood: list[Traffic], shared: bool
) -> None:
    for client in flood:
        client.pending.clear()
    device = Device(*flood, Traffic("single", [10]), shared=shared)
    device.run(60)
    waits = device.waits["single"]
    assert max(waits) <= 2 * len(flood), waits
    assert len(waits) >= 60 / (1 + len(flood)) - 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1.0, 2.0, 3.0]),
            st.lists(st.integers(1, 30), min_size=1, max_size=6),
            st.integers(3, 40),
            st.integers(-3, 3),
        ),
        min_size=2,
        max_size=4,
    )
)
@settings(max_examples=12, deadline=None)
def test_shares_converge_to_weights_whatever_the_requests_and_priorities(
    clients: list[tuple[float, list[int], int, int]],
) -> None:
    traffic = [
        # Enough requests always wait to fill any share of a step.
        Traffic(str(at), lengths, max(count, 2 * STEP // sum(lengths)), weight, priority)
        for at, (weight, lengths, count, priority) in enumerate(clients)
    ]
    device = Device(*traffic)
    device.scheduler.queue.set_head_start(200.0)
    device.run(150)
    device.tokens.clear()
    device.run(150)
    total = sum(weight for weight, *_ in clients)
    for client in traffic:
        # Rows of almost a third of a step leave gaps, which rows of other clients fill.
        assert device.share(client.name) == pytest.approx(client.weight / total, abs=0.06)


def test_clients_of_single_rows_and_of_batches_have_equal_shares() -> None:
    device = Device(
        Traffic("singles", [10], 100), Traffic("batches", [10] * 50, 3), Traffic("more batches", [10] * 80, 1)
    )
    device.run(300)
    for name in ("singles", "batches", "more batches"):
        assert device.share(name) == pytest.approx(1 / 3, abs=0.02)


def test_the_requests_of_one_client_run_in_the_order_of_a_queue_without_clients() -> None:
    for client in ("", "a"):
        scheduler = Scheduler(Budget(STEP, STEP, 10**9))
        for number, (arrival_s, priority) in enumerate([(0, 0), (2, -3), (1, 0), (0.5, 1), (3, -2)]):
            request = make_request(str(number), [STEP], client=client, arrival_s=arrival_s, priority=priority)
            scheduler.add(request)
        steps = [scheduler.schedule()[0].request.id for _ in range(5)]
        assert steps == ["1", "0", "2", "4", "3"]


def test_single_requests_of_many_clients_run_in_the_order_of_their_arrival() -> None:
    scheduler = Scheduler(Budget(STEP, STEP, 10**9))
    for number in range(30):
        scheduler.add(make_request(str(number), [50], client=f"client-{number}", arrival_s=number))
    ran = [entry.request.id for _ in range(15) for entry in scheduler.schedule()]
    assert ran == [str(number) for number in range(30)]
    assert len(scheduler.queue) == 0 and scheduler.queue.num_clients == 0


def test_a_client_is_not_charged_for_what_it_ran_while_nobody_else_waited() -> None:
    busy, late = Traffic("busy", [10], 50), Traffic("late", [10], 50)
    device = Device(busy, late)
    device.clients = (busy,)
    device.run(100)
    device.clients = (busy, late)
    device.tokens.clear()
    device.run(40)
    assert device.share("busy") == pytest.approx(0.5, abs=0.05)


def test_a_client_that_was_away_has_saved_nothing() -> None:
    busy, back = Traffic("busy", [10], 50), Traffic("back", [10], 50)
    device = Device(busy, back)
    device.run(10)
    while device.left and back.pending:
        device.clients = (busy,)
        device.run(1)
    device.run(200)
    device.clients = (busy, back)
    device.tokens.clear()
    device.run(20)
    assert device.share("back") == pytest.approx(0.5, abs=0.05)


def test_clients_that_come_once_do_not_starve_one_that_stays() -> None:
    """Each one-time client has run nothing yet, so each goes before the client that stays."""
    steady = Traffic("steady", [50], 4)
    device = Device(steady)
    strangers = itertools.count()
    for _ in range(200):
        for _ in range(2):
            device.scheduler.add(make_request(name := f"s{next(strangers)}", [50], client=name))
            device.left[name] = (Traffic("strangers", [50]), 1, device.num_steps)
        device.run(1)
    assert device.tokens["steady"] >= 200 * STEP / 20


@pytest.mark.parametrize("priority", [-1_000_000, -MAX_LEVELS, 3, 1_000_000])
def test_no_priority_changes_the_shares_of_clients_in_the_long_run(priority: int) -> None:
    one, other = Traffic("one", [10], 40, priority=priority), Traffic("other", [10], 40)
    device = Device(one, other)
    device.scheduler.queue.set_head_start(STEP)
    device.run(MAX_LEVELS)  # let the head start pass
    device.tokens.clear()
    device.run(100)
    assert device.share("one") == pytest.approx(0.5, abs=0.02)


def test_an_urgent_request_goes_before_those_of_other_clients() -> None:
    scheduler = Scheduler(Budget(STEP, STEP, 10**9))
    for number in range(5):
        scheduler.add(make_request(str(number), [STEP], client=f"client-{number}"))
    scheduler.add(make_request("urgent", [STEP], client="urgent", priority=-1))
    assert scheduler.schedule()[0].request.id == "urgent"


def test_a_client_becomes_urgent_with_its_first_request_and_not_with_one_that_is_gone() -> None:
    scheduler = Scheduler(Budget(STEP, STEP, 10**9))
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name, [STEP], client=name))
    scheduler.add(make_request("urgent", [STEP], client="c", priority=-2))
    scheduler.add(make_request("gone", [STEP], client="b", priority=-5))
    scheduler.cancel("gone")
    assert [scheduler.schedule()[0].request.id for _ in range(4)] == ["urgent", "a", "b", "c"]


@pytest.mark.parametrize("level", [1, 5, 1_000_000])
def test_an_urgent_batch_keeps_rows_of_other_clients_waiting_for_a_bounded_time(level: int) -> None:
    device = Device(Traffic("urgent", [10] * 50, 3, priority=-level), Traffic("single", [10], 20))
    device.run(300)
    longest_s = max(device.waits["single"]) * STEP_S
    assert longest_s <= min(level, MAX_LEVELS) + 20 * STEP_S


def test_steps_of_a_flood_stay_short_while_another_client_comes_and_not_for_ever() -> None:
    scheduler = Scheduler(Budget(STEP, STEP, 10**9, is_shared=True))
    scheduler.max_shared_tokens = 40
    for number in range(1000):
        scheduler.add(make_request(str(number), [10], client="flood"))

    def step_tokens() -> int:
        return sum(entry.request.num_tokens for entry in scheduler.schedule())

    assert step_tokens() == STEP
    scheduler.add(make_request("single", [10], client="single"))
    assert [step_tokens() for _ in range(Scheduler.SHORT_STEPS)] == [40] * Scheduler.SHORT_STEPS
    assert "single" not in scheduler.queue and step_tokens() == STEP


def test_steps_of_many_clients_with_little_each_are_full() -> None:
    scheduler = Scheduler(Budget(STEP, STEP, 10**9, is_shared=True))
    scheduler.max_shared_tokens = 40
    for number in range(100):
        scheduler.add(make_request(str(number), [10], client=f"client-{number}"))
        if number % 10 == 9:
            assert sum(entry.request.num_tokens for entry in scheduler.schedule()) == STEP


def test_a_client_with_little_in_a_full_queue_is_taken_and_one_with_much_is_not() -> None:
    scheduler = Scheduler(Budget(STEP, STEP, 1000))
    for number in range(10):
        scheduler.add(make_request(str(number), [100], client="flood"))
    with pytest.raises(QueueFull, match="1000 tokens are waiting and at most 1000"):
        scheduler.add(make_request("more", [10], client="flood"))
    scheduler.add(make_request("light", [100], client="light"))
    with pytest.raises(QueueFull, match="at most 1125"):
        scheduler.add(make_request("another", [100], client="another"))
    with pytest.raises(QueueFull, match="at most 1000"):
        scheduler.add(make_request("more", [10], client="flood"))
    assert "more" not in scheduler.queue and scheduler.queue.num_tokens == 1100


def test_a_client_alone_has_no_more_room_than_the_queue_has() -> None:
    scheduler = Scheduler(Budget(STEP, STEP, 1000))
    scheduler.add(make_request("a", [10], client="alone"))
    with pytest.raises(QueueFull, match="at most 1000"):
        scheduler.add(make_request("b", [1000], client="alone"))


def test_requests_that_hold_blocks_go_on_behind_many_clients_that_wait_for_blocks() -> None:
    pool = BlockPool(10, 10)
    scheduler = Scheduler(Budget(STEP, STEP, 10**9), Chunking(pool, 50))
    scheduler.add(make_request("open", [100], client="open"))
    scheduler.schedule()
    assert pool.available == 0
    for number in range(2 * Scheduler.LOOK_AHEAD):
        scheduler.add(make_request(str(number), [100], client=f"client-{number}"))
    ran = []
    while scheduled := scheduler.schedule():
        ran += [entry.request.id for entry in scheduled]
    assert set(ran) == {"open", *map(str, range(2 * Scheduler.LOOK_AHEAD))}
    assert len(scheduler.queue) == 0 and pool.available == 10


def test_clients_that_have_gone_are_forgotten() -> None:
    scheduler = Scheduler(Budget(STEP, STEP, 10**9))
    for number in range(2000):
        scheduler.add(make_request(str(number), [10], client=f"client-{number}"))
        scheduler.schedule()
    assert len(scheduler.queue._small._clients) < 300


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),  # steps before it arrives
            st.sampled_from("abcd"),
            st.sampled_from([0.5, 1.0, 4.0]),
            st.lists(st.integers(1, 40), min_size=1, max_size=12),
            st.integers(-2, 2),
            st.booleans(),  # whether it is cancelled in the step after its arrival
        ),
        min_size=1,
        max_size=30,
    )
)
@settings(max_examples=num_examples(100), deadline=None)
def test_with_several_clients_every_row_runs_once_and_the_books_are_right(
    stream: list[tuple[int, str, float, list[int], int, bool]],
) -> None:
    scheduler = Scheduler(Budget(32, 5, 10**9, is_shared=True))
    queue, arrivals, to_cancel = scheduler.queue, list(enumerate(stream)), set[str]()
    left: dict[str, set[int]] = {}
    step = due = 0
    while arrivals or len(queue):
        for name in to_cancel:
            scheduler.cancel(name)
            left.pop(name, None)
        to_cancel.clear()
        while arrivals and due + arrivals[0][1][0] <= step:
            index, (gap, client, weight, lengths, priority, cancels) = arrivals.pop(0)
            due += gap
            request = make_request(
                str(index), lengths, priority=priority, arrival_s=float(due), client=client, weight=weight
            )
            scheduler.add(request)
            left[request.id] = set(range(len(lengths)))
            if cancels:
                to_cancel.add(request.id)
        scheduled = scheduler.schedule()
        assert bool(scheduled) or not len(queue), "a step runs something while anything waits"
        for entry in scheduled:
            rows = set(entry.rows.tolist())
            assert rows <= left[entry.request.id]
            left[entry.request.id] -= rows
        waiting = list(queue)
        assert len(queue) == len(waiting) and all(left[queued.request.id] for queued in waiting)
        for client in "abcd":
            own = sum(queued.num_tokens_left for queued in waiting if queued.request.client == client)
            assert queue.num_tokens_of(client) == own
        for large in (False, True):
            clients = {queued.request.client for queued in waiting if queued.is_large is large}
            assert queue._line(large).num_clients == len(clients)
            assert bool(queue.weight(large=large)) == bool(clients)
        step += 1
    assert not any(left.values())


def generation_scheduler(slots: int = 4) -> GenerationScheduler:
    limits = GenerationLimits(slots, 64, 64, 64, 10**6, prefix_caching=False)
    return GenerationScheduler(BlockPool(256, 4), limits)


def test_a_prompt_does_not_wait_for_the_hundreds_that_another_client_has_queued() -> None:
    scheduler = generation_scheduler()
    for number in range(200):
        request = generation_request(f"flood-{number}", [[1, 2, 3]], 4)
        request.client = "flood"
        scheduler.add(request)
    scheduler.schedule(0.0)
    single = generation_request("single", [[1, 2, 3]], 4)
    single.client = "single"
    scheduler.add(single)
    scheduler.cancel("flood-0")  # frees a slot
    scheduler.schedule(0.0)
    running = {scheduler._slots[slot].request.id for slot in scheduler._active.running}
    assert "single" in running
    scheduler.check_integrity()
    scheduler.clear()
    scheduler.check_integrity()


def test_prompts_of_clients_begin_in_turns_by_weight() -> None:
    scheduler = generation_scheduler(slots=12)
    for client, weight in (("a", 1.0), ("b", 2.0)):
        for number in range(40):
            request = generation_request(f"{client}{number}", [[1, 2, 3]], 4)
            request.client, request.weight = client, weight
            scheduler.add(request)
    scheduler.schedule(0.0)
    begun = Counter(scheduler._slots[slot].request.client for slot in scheduler._active.running)
    assert begun == {"a": 4, "b": 8}


def test_a_full_queue_of_prompts_takes_one_of_a_client_that_has_none() -> None:
    limits = GenerationLimits(1, 64, 64, 64, 80, prefix_caching=False)
    scheduler = GenerationScheduler(BlockPool(256, 4), limits)
    for number in range(20):
        request = generation_request(f"flood-{number}", [[1, 2, 3, 4]], 4)
        request.client = "flood"
        scheduler.add(request)
    with pytest.raises(QueueFull, match="80 tokens of prompts are waiting and at most 80"):
        scheduler.check(request)
    light = generation_request("light", [[1, 2, 3, 4]], 4)
    light.client = "light"
    scheduler.add(light)
