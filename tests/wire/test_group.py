"""Several engines behind one handle: which engine gets a request, and what happens when an engine is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import BadValue, EngineUnavailable, PenstockError
from penstock.handle import EngineHandle, EngineStats, StreamListener, Unsubscribe
from penstock.types import (
    Comparison,
    EngineSleep,
    GeneratedTokens,
    PooledOutput,
    Request,
    SamplerParams,
    Timings,
)
from penstock.wire.group import MIXED, EngineGroup
from penstock.wire.status import EngineStatus, GroupStatus, StatusReader, StatusWriter, create_status_page
from tests.waiting import PATIENCE_S

SETTINGS = {
    "max_num_batched_tokens": 100,
    "share_identical": True,
    "prefix_caching": False,
    "generate_prefixes": True,
}
LOST = EngineUnavailable("the engine is lost")


class FakeClient(EngineHandle):
    """An engine that answers when the test calls `answer_all`. The value of a row is its first token."""

    def __init__(self, status: StatusReader | None = None) -> None:
        self.status = status
        self.is_up = True
        self.holds_requests = False
        self.loaded = "a"
        self.requests: dict[str, tuple[Request, asyncio.Future[PooledOutput]]] = {}
        self.streams: dict[str, StreamListener] = {}
        self.seen: list[str] = []
        self.on_ready: Callable[[int], None] = lambda pid: None

    @property
    def ready(self) -> bool:
        return self.is_up

    @property
    def unavailable_reason(self) -> str:
        return "" if self.is_up else "it restarts"

    @property
    def revision(self) -> str:
        return self.loaded if self.is_up else ""

    @property
    def engine_settings(self) -> dict[str, Any]:
        return SETTINGS if self.is_up else {}

    def stats(self) -> EngineStats:
        return EngineStats(len(self.requests))

    async def run(self, request: Request) -> PooledOutput:
        return await self._answer(request.id, request)

    async def compare(self, comparison: Comparison) -> PooledOutput:
        return await self._answer(comparison.id, comparison)

    async def _answer(self, name: str, work: Any) -> PooledOutput:
        self.seen.append(name)
        future: asyncio.Future[PooledOutput] = asyncio.get_running_loop().create_future()
        self.requests[name] = work, future
        try:
            return await future
        finally:
            del self.requests[name]

    def stream(self, request: Request, listener: StreamListener) -> Unsubscribe:
        self.seen.append(request.id)
        self.streams[request.id] = listener
        return lambda: self.streams.pop(request.id, None) and None

    def answer_all(self) -> None:
        for request, future in self.requests.values():
            first = request.token_ids[request.starts[request.num_queries :]]
            timings = Timings(0.1 * len(first), 0.2)
            future.set_result(PooledOutput(request.id, first[:, None].astype(np.float32), timings))

    def die(self, error: PenstockError = LOST) -> None:
        self.is_up = False
        for _, future in self.requests.values():
            future.set_exception(error)
        for listener in list(self.streams.values()):
            listener.on_error(error)

    def come_up(self, revision: str = "a") -> None:
        self.is_up, self.loaded = True, revision
        self.on_ready(1)

    def close(self) -> None:
        self.die(EngineUnavailable("closing"))


def make_group(count: int = 2) -> tuple[EngineGroup, list[FakeClient]]:
    clients = [FakeClient() for _ in range(count)]
    group = EngineGroup(clients, "some-model")
    group.retry_patience_s = 0.0
    for client in clients:
        client.come_up()
    return group, clients


def request_of(*lengths: int, name: str = "r", first: int = 0, **fields: Any) -> Request:
    """A request whose rows have the first tokens `first`, `first` + 1, …"""
    rows = np.arange(first, first + len(lengths), dtype=np.int32)
    sizes = np.array(lengths, dtype=np.int32)
    return Request(name, np.repeat(rows, sizes), sizes, **fields)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Awaitable[None]) -> None:
    async def main() -> None:
        await test

    asyncio.run(main())


async def begin(group: EngineGroup, request: Request) -> asyncio.Task[PooledOutput]:
    task = asyncio.ensure_future(group.run(request))
    await settle()
    return task


def test_requests_go_to_the_engine_with_the_fewest_tokens_in_flight() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        tasks = [
            await begin(group, request_of(size, name=name))
            for name, size in (("long", 90), ("1", 40), ("2", 40), ("3", 15), ("4", 5))
        ]
        assert a.seen == ["long", "4"] and b.seen == ["1", "2", "3"]
        assert group.tokens_in_flight == [95, 95] and group.stats().num_requests == 5
        a.answer_all()
        b.answer_all()
        await asyncio.gather(*tasks)
        assert group.tokens_in_flight == [0, 0]

    run(test())


def test_background_work_is_in_nobodys_way_but_its_own() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        await begin(group, request_of(90, name="background", is_background=True))
        await begin(group, request_of(20, name="1"))
        await begin(group, request_of(10, name="2"))
        await begin(group, request_of(10, name="3"))
        assert a.seen == ["background", "2", "3"] and b.seen == ["1"]
        await begin(group, request_of(90, name="more", is_background=True))
        assert b.seen == ["1", "more"] and group.tokens_in_flight == [110, 110]

    run(test())


def test_what_other_processes_have_queued_counts_and_a_sleeping_engine_is_spared(tmp_path: Path) -> None:
    async def test() -> None:
        clients, pages = [], []
        for number in range(2):
            create_status_page(file := tmp_path / str(number))
            pages.append(StatusWriter(file))
            pages[-1].publish(EngineStatus(pid=1))
            clients.append(FakeClient(StatusReader(file)))
        group = EngineGroup(clients)
        for client in clients:
            client.come_up()
        pages[0].publish(EngineStatus(pid=1, queued_tokens=30, queued_prompt_tokens=20))
        await begin(group, request_of(20, name="1"))
        pages[0].publish(EngineStatus(pid=1))
        pages[1].publish(EngineStatus(pid=1, state=EngineSleep.ASLEEP))
        await begin(group, request_of(20, name="2"))
        await begin(group, request_of(20, name="3"))
        assert clients[1].seen == ["1"] and clients[0].seen == ["2", "3"]

    run(test())


def test_a_request_of_a_lost_engine_runs_once_more_elsewhere() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        retries: list[int] = []
        group.on_retry = lambda: retries.append(1)
        task = await begin(group, request_of(10, name="first"))
        a.die()
        await settle()
        b.answer_all()
        assert (await task).values.tolist() == [[0.0]] and len(retries) == 1
        assert a.seen == b.seen == ["first"] and group.tokens_in_flight == [0, 0]

    run(test())


def test_a_poisoned_request_never_reaches_a_third_engine() -> None:
    async def test() -> None:
        group, clients = make_group(3)
        task = await begin(group, request_of(10, name="poisoned"))
        for _ in range(2):
            next(client for client in clients if "poisoned" in client.requests).die()
            await settle()
        with pytest.raises(EngineUnavailable):
            await task
        assert sum("poisoned" in client.seen for client in clients) == 2
        assert group.ready and group.num_ready == 1

    run(test())


def test_with_no_engine_left_a_request_in_flight_waits_for_one_to_come_back() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        group.retry_patience_s = PATIENCE_S
        b.die()
        task = await begin(group, request_of(10))
        a.die()
        await settle()
        assert not task.done()
        a.come_up()
        while not a.requests:  # noqa: ASYNC110 (the group polls)
            await asyncio.sleep(0.005)
        a.answer_all()
        assert (await task).values.tolist() == [[0.0]] and a.seen == ["r", "r"] and not b.seen

    run(test())


def test_an_error_of_the_request_itself_is_not_tried_again() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        task = await begin(group, request_of(10))
        a.requests["r"][1].set_exception(BadValue("a bad value"))
        with pytest.raises(BadValue):
            await task
        assert not b.seen

    run(test())


def test_a_cancelled_request_frees_its_place() -> None:
    async def test() -> None:
        group, (a, _) = make_group()
        task = await begin(group, request_of(10))
        task.cancel()
        await settle()
        assert not a.requests and group.tokens_in_flight == [0, 0]

    run(test())


def test_the_group_serves_while_one_engine_does_and_gives_the_reason_when_none_does() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        a.die()
        assert group.ready and group.engines_ready == [False, True] and group.revision == "a"
        task = await begin(group, request_of(10))
        assert b.seen == ["r"]
        b.die()
        with pytest.raises(EngineUnavailable, match="the engine is lost"):
            await task
        assert not group.ready and group.unavailable_reason == "it restarts" and group.revision == ""
        assert group.engine_settings == {}
        with pytest.raises(EngineUnavailable, match="it restarts"):
            await group.run(request_of(10))
        group.close()

    run(test())


def test_requests_wait_where_no_engine_is_connected_yet() -> None:
    async def test() -> None:
        group, clients = make_group()
        for client in clients:
            client.is_up = False
        with pytest.raises(EngineUnavailable, match="it restarts"):
            await group.run(request_of(3))
        clients[0].holds_requests = clients[1].holds_requests = True
        first = await begin(group, request_of(5, name="first"))
        second = await begin(group, request_of(4, name="second"))
        assert [client.seen for client in clients] == [["first"], ["second"]]
        clients[1].come_up()
        third = await begin(group, request_of(4, name="third"))
        assert clients[1].seen == ["second", "third"]
        for client in clients:
            client.answer_all()
        await asyncio.gather(first, second, third)

    run(test())


def test_an_engine_of_another_revision_gets_nothing_while_others_have_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        b.die()
        with caplog.at_level(logging.WARNING, logger="penstock.client"):
            b.come_up("changed")
        assert "engine 1 of some-model has loaded other files" in caplog.text
        assert group.engines_ready == [True, False] and group.revision == "a"
        for number in range(3):
            await begin(group, request_of(10, name=str(number)))
        assert a.seen == ["0", "1", "2"] and not b.seen
        a.die()
        assert group.revision == "changed", "no engine of the first revision is left"
        await begin(group, request_of(10, name="3"))
        assert b.seen[-1] == "3"

    run(test())


def test_a_comparison_is_balanced_and_tried_again_too() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        vectors, one = np.ones((2, 4), dtype=np.float32), np.array([2], dtype=np.int32)
        comparison = Comparison("c", vectors, one, vectors, one, np.zeros(1, dtype=np.int32))
        task = asyncio.ensure_future(group.compare(comparison))
        await settle()
        a.die()
        await settle()
        b.requests["c"][1].set_result(PooledOutput("c", vectors, Timings()))
        assert (await task).values is vectors and b.seen == ["c"]

    run(test())


def test_nothing_is_tried_again_while_the_group_closes() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        task = await begin(group, request_of(10))
        group.close()
        a.is_up = b.is_up = True
        with pytest.raises(EngineUnavailable, match="closing"):
            await task
        with pytest.raises(EngineUnavailable, match="closing"):
            await group.run(request_of(10))

    run(test())


# Affinity.


def pair_request(name: str, query: int, document_tokens: int = 10) -> Request:
    request = request_of(4, document_tokens, name=name, first=query)
    request.pairs = np.zeros(1, dtype=np.int32)
    return request


def test_the_same_query_prefers_the_engine_that_has_seen_it() -> None:
    async def test() -> None:
        group, clients = make_group(4)
        for number in range(12):
            tasks = [await begin(group, pair_request(f"{number}-{query}", 100 * query)) for query in range(3)]
            for client in clients:
                client.answer_all()
            await asyncio.gather(*tasks)
        for query in range(3):
            users = [client for client in clients if any(name.endswith(f"-{query}") for name in client.seen)]
            assert len(users) == 1

    run(test())


def test_a_query_leaves_its_engine_when_too_much_waits_there() -> None:
    async def test() -> None:
        group, clients = make_group()
        for number in range(4):
            await begin(group, pair_request(str(number), 7, document_tokens=60))
        assert sorted(len(client.seen) for client in clients) == [2, 2]

    run(test())


def prompt(name: str, *tokens: int) -> Request:
    ids = np.array(tokens, dtype=np.int32)
    sizes = np.array([len(ids)], dtype=np.int32)
    return Request(name, ids, sizes, reuse_prefix=True, sampling=SamplerParams(max_tokens=1))


class Heard(StreamListener):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.errors: list[PenstockError] = []

    @property
    def finished(self) -> bool:
        return bool(self.errors)

    def on_token(self, row: int, token_id: int) -> None:
        self.tokens.append(token_id)

    def on_tokens(self, parts: list[GeneratedTokens]) -> None:
        self.tokens += [int(token) for part in parts for token in part.token_ids]

    def on_error(self, error: PenstockError) -> None:
        self.errors.append(error)


def test_a_conversation_returns_to_the_engine_that_has_its_prefix() -> None:
    group, clients = make_group(4)
    turns: list[list[int]] = [[number] * 200 for number in range(6)]
    used: list[set[int]] = [set() for _ in turns]
    for _ in range(4):
        for number, turn in enumerate(turns):
            name = f"{number}-{len(turn)}"
            end = group.stream(prompt(name, *turn), Heard())
            used[number] |= {index for index, client in enumerate(clients) if name in client.seen}
            end()
            turn += [50 + number] * 70
    assert all(len(engines) == 1 for engines in used)


# Streams.


def test_a_stream_without_a_token_begins_again_on_another_engine() -> None:
    group, (a, b) = make_group()
    heard = Heard()
    end = group.stream(prompt("s", 1, 2), heard)
    first, second = (a, b) if a.seen else (b, a)
    first.die()
    assert second.seen == ["s"] and not heard.errors and not first.streams
    second.streams["s"].on_token(0, 9)
    assert heard.tokens == [9] and sum(group.tokens_in_flight) == 3
    second.die()
    assert [str(error.message) for error in heard.errors] == ["the engine is lost"], "it has begun to answer"
    end()
    end()
    assert group.tokens_in_flight == [0, 0]


def test_a_stream_fails_with_its_second_engine() -> None:
    group, clients = make_group(3)
    heard = Heard()
    end = group.stream(prompt("s", 1, 2), heard)
    for _ in range(2):
        next(client for client in clients if client.streams).die()
    assert len(heard.errors) == 1 and sum(bool(client.seen) for client in clients) == 2
    end()


def test_a_stream_waits_for_an_engine_that_comes_back() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        group.retry_patience_s = PATIENCE_S
        b.die()
        heard, dropped = Heard(), Heard()
        group.stream(prompt("s", 1, 2), heard)
        end = group.stream(prompt("dropped", 1, 2), dropped)
        a.die()
        await settle()
        end()
        assert not heard.errors and not a.streams and not b.streams
        a.come_up()
        while not a.streams:  # noqa: ASYNC110 (the group polls)
            await asyncio.sleep(0.005)
        await settle()
        assert list(a.streams) == ["s"] and not dropped.errors
        a.streams["s"].on_token(0, 9)
        assert heard.tokens == [9]

    run(test())


def test_a_stream_fails_if_no_engine_comes_back() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        b.die()
        heard = Heard()
        group.stream(prompt("s", 1, 2), heard)
        a.die()
        await settle()
        assert [type(error) for error in heard.errors] == [EngineUnavailable]
        assert group.tokens_in_flight == [0, 0]

    run(test())


# Large requests.


def test_a_large_request_is_divided_among_the_engines_and_put_together_in_order() -> None:
    async def test() -> None:
        group, clients = make_group(3)
        busy = await begin(group, request_of(60, name="other"))
        task = await begin(group, request_of(*[10] * 84))
        parts = [[work.num_tokens for work, _ in client.requests.values()] for client in clients]
        assert [sum(each) for each in parts] == [300, 300, 300]
        for client in reversed(clients):
            client.answer_all()
        output = await task
        assert output.values[:, 0].tolist() == list(range(84)) and output.id == "r"
        assert output.timings.queue_s == pytest.approx(3.0)
        await busy

    run(test())


def test_documents_are_divided_with_the_queries_of_their_pairs() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        request = request_of(*[2] * 2, *[20] * 40)
        request.pairs = np.array([0, 1] * 20, dtype=np.int32)
        task = await begin(group, request)
        parts = [work for client in (a, b) for work, _ in client.requests.values()]
        assert [part.num_queries for part in parts] == [2, 2]
        assert np.concatenate([part.pairs for part in parts]).tolist() == request.pairs.tolist()
        for client in (a, b):
            client.answer_all()
        assert (await task).values[:, 0].tolist() == list(range(2, 42))

    run(test())


def test_a_part_of_a_lost_engine_runs_elsewhere_unless_weights_have_changed() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        task = await begin(group, request_of(*[10] * 40))
        a.die()
        await settle()
        b.answer_all()
        assert (await task).values[:, 0].tolist() == list(range(40))
        a.come_up()
        task = await begin(group, request_of(*[10] * 40))
        b.answer_all()
        await settle()
        b.is_up, b.loaded = False, "changed"
        b.come_up("changed")
        a.die()
        await settle()
        b.answer_all()
        with pytest.raises(EngineUnavailable, match=MIXED[:40]):
            await task

    run(test())


def test_a_failed_part_fails_the_request_and_cancels_the_others() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        task = await begin(group, request_of(*[10] * 40))
        next(iter(a.requests.values()))[1].set_exception(BadValue("no"))
        with pytest.raises(BadValue):
            await task
        await settle()
        assert not b.requests and group.tokens_in_flight == [0, 0]

    run(test())


def test_a_request_of_a_step_or_two_is_not_divided() -> None:
    async def test() -> None:
        group, (a, b) = make_group()
        await begin(group, request_of(*[10] * 19))
        assert len(a.seen) + len(b.seen) == 1

    run(test())


# Status of several engines.


def test_several_pages_read_as_one(tmp_path: Path) -> None:
    ready = [True, True, False]
    readers, writers = [], []
    for number in range(3):
        create_status_page(file := tmp_path / str(number))
        readers.append(StatusReader(file))
        writers.append(StatusWriter(file))
    status = GroupStatus(readers, lambda: ready)
    writers[0].publish(EngineStatus(pid=1, queued_tokens=100, tokens_per_s=50.0, small_weight=1.0))
    writers[1].publish(EngineStatus(pid=2, state=EngineSleep.ASLEEP))
    writers[2].publish(EngineStatus(pid=3, queued_tokens=1000))
    assert not status.has_backlog, "an engine has nothing to do"
    read = status.read()
    assert (read.queued_tokens, read.tokens_per_s) == (100, 100.0)
    assert read.sleep_state is EngineSleep.AWAKE and read.backlog.wait_s(is_large=True) == 1.0
    writers[1].publish(EngineStatus(pid=2, queued_tokens=20, state=EngineSleep.ASLEEP))
    assert status.has_backlog
    ready[0] = False
    assert status.read().sleep_state is EngineSleep.ASLEEP
