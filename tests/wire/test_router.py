from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from penstock.errors import BadValue, EngineUnavailable, PenstockError
from penstock.types import (
    DecodedTokens,
    Failure,
    GeneratedTokens,
    Outcome,
    PooledOutput,
    PooledRows,
    SequenceIds,
    Timings,
)
from penstock.wire.router import OutcomeRouter, Subscribers


def pooled(request_id: str) -> PooledOutput:
    return PooledOutput(request_id, np.zeros((1, 2), dtype=np.float32), Timings())


def generated(request_id: str, row: int, token_id: int, finish: str | None = None) -> GeneratedTokens:
    return GeneratedTokens(request_id, row, np.array([token_id], dtype=np.int32), finish)


def decoded(rows: SequenceIds, *token_ids: int) -> DecodedTokens:
    return DecodedTokens(rows, np.array(token_ids, dtype=np.int32))


def nothing_generates(request_id: str) -> bool:
    return False


def describe(outcome: Outcome) -> tuple[Any, ...]:
    if isinstance(outcome, DecodedTokens):
        return ("decoded", *zip(outcome.rows, outcome.token_ids.tolist(), strict=True))
    if isinstance(outcome, PooledRows):
        return ("rows", *zip(outcome.ids, outcome.values[:, 0].tolist(), outcome.queue_s, strict=True))
    return (type(outcome).__name__, outcome.id)


def joined(*ids: str) -> PooledRows:
    values = np.arange(len(ids), dtype=np.float32).repeat(2).reshape(-1, 2)
    return PooledRows(ids, values, [10.0 + at for at in range(len(ids))], 0.5)


class TestOutcomeRouter:
    def test_joined_answers_are_divided_among_their_owners_and_forgotten(self) -> None:
        router: OutcomeRouter[str] = OutcomeRouter()
        for request_id, owner in (("a", "one"), ("b", "two"), ("c", "one")):
            router.add(request_id, owner)
        routed = router.route([joined("a", "b", "cancelled", "c")], nothing_generates)
        assert {owner: [describe(each) for each in theirs] for owner, theirs in routed.items()} == {
            "one": [("rows", ("a", 0.0, 10.0), ("c", 3.0, 13.0))],
            "two": [("rows", ("b", 1.0, 11.0))],
        }
        assert len(router) == 0

    def test_joined_answers_of_one_owner_are_not_copied(self) -> None:
        router: OutcomeRouter[str] = OutcomeRouter()
        for request_id in ("a", "b"):
            router.add(request_id, "one")
        answers = joined("a", "b")
        assert router.route([answers], nothing_generates) == {"one": [answers]}

    def test_each_owner_gets_its_own_outcomes_with_failures_last(self) -> None:
        router: OutcomeRouter[str] = OutcomeRouter()
        for request_id, owner in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "two")):
            router.add(request_id, owner)
        outcomes = [
            Failure("a", BadValue("no")),
            pooled("b"),
            generated("c", 0, 5, "stop"),
            pooled("unknown"),
            Failure("unknown too", BadValue("no")),
        ]
        routed = router.route(outcomes, nothing_generates)
        assert {owner: [describe(each) for each in theirs] for owner, theirs in routed.items()} == {
            "one": [("GeneratedTokens", "c"), ("Failure", "a")],
            "two": [("PooledOutput", "b")],
        }
        assert "d" in router and len(router) == 1

    def test_a_generation_request_is_forgotten_when_its_last_sequence_finishes(self) -> None:
        router: OutcomeRouter[str] = OutcomeRouter()
        router.add("a", "one")
        router.route([generated("a", 0, 5, "stop")], lambda request_id: True)
        assert "a" in router
        router.route([generated("a", 1, 5)], nothing_generates)
        assert "a" in router, "the tokens finish no sequence"
        routed = router.route([generated("a", 1, 5, "stop"), generated("a", 2, 5, "stop")], nothing_generates)
        assert len(routed["one"]) == 2 and "a" not in router

    def test_decoded_tokens_are_divided_by_owner(self) -> None:
        router: OutcomeRouter[str] = OutcomeRouter()
        router.add("a", "one")
        router.add("b", "two")
        rows: SequenceIds = (("a", 0), ("b", 0), ("gone", 0), ("a", 1))
        routed = router.route([decoded(rows, 5, 6, 7, 8)], nothing_generates)
        assert describe(routed["one"][0]) == ("decoded", (("a", 0), 5), (("a", 1), 8))
        assert describe(routed["two"][0]) == ("decoded", (("b", 0), 6))

    def test_the_division_is_computed_once_while_the_sequences_stay_the_same(self) -> None:
        router: OutcomeRouter[str] = OutcomeRouter()
        router.add("a", "one")
        router.add("b", "two")
        rows: SequenceIds = (("a", 0), ("b", 0))
        first, second = (
            router.route([decoded(rows, *token_ids)], nothing_generates)["two"][0]
            for token_ids in ((1, 2), (3, 4))
        )
        assert isinstance(first, DecodedTokens) and isinstance(second, DecodedTokens)
        assert first.rows is second.rows and second.token_ids.tolist() == [4]

    def test_an_owner_of_all_sequences_gets_the_tokens_without_a_copy(self) -> None:
        router: OutcomeRouter[str] = OutcomeRouter()
        router.add("a", "one")
        step = decoded((("a", 0), ("a", 1)), 5, 6)
        assert router.route([step], nothing_generates) == {"one": [step]}

    def test_when_the_engine_is_gone_every_request_fails_and_is_forgotten(self) -> None:
        router: OutcomeRouter[str] = OutcomeRouter()
        for request_id, owner in (("a", "one"), ("b", "two"), ("c", "one")):
            router.add(request_id, owner)
        routed = router.fail_all("it is gone")
        assert {owner: {each.id for each in theirs} for owner, theirs in routed.items()} == {  # type: ignore[union-attr]
            "one": {"a", "c"},
            "two": {"b"},
        }
        assert len(router) == 0


class RecordingListener:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.finished = False

    def on_token(self, row: int, token_id: int) -> None:
        self.calls.append((row, token_id))

    def on_tokens(self, parts: list[GeneratedTokens]) -> None:
        self.calls.append([(part.row, *part.token_ids.tolist()) for part in parts])

    def on_error(self, error: PenstockError) -> None:
        self.calls.append(error.message)


class TestSubscribers:
    def test_tokens_reach_their_listener_in_order(self) -> None:
        subscribers, a, b = Subscribers(), RecordingListener(), RecordingListener()
        subscribers.add_listener("a", a)
        subscribers.add_listener("b", b)
        rows: SequenceIds = (("a", 0), ("b", 0), ("a", 1))
        subscribers.deliver(
            [
                generated("a", 0, 1),
                generated("b", 0, 2),
                generated("a", 1, 3),
                decoded(rows, 4, 5, 6),
                generated("b", 0, 7, "stop"),
                Failure("a", BadValue("no")),
            ]
        )
        assert a.calls == [[(0, 1), (1, 3)], (0, 4), (1, 6), "no"]
        assert b.calls == [[(0, 2)], (0, 5), [(0, 7)]]

    def test_a_listener_that_leaves_or_joins_between_steps_is_noticed(self) -> None:
        subscribers, first, second = Subscribers(), RecordingListener(), RecordingListener()
        rows: SequenceIds = (("a", 0),)
        subscribers.add_listener("a", first)
        subscribers.deliver([decoded(rows, 1)])
        assert subscribers.remove_listener("a") is first
        subscribers.deliver([decoded(rows, 2), generated("a", 0, 3), Failure("a", BadValue("no"))])
        subscribers.add_listener("a", second)
        subscribers.deliver([decoded(rows, 4)])
        assert (first.calls, second.calls) == ([(0, 1)], [(0, 4)])

    def test_futures_get_outputs_and_errors_and_those_given_up_are_ignored(self) -> None:
        async def scene() -> None:
            subscribers, loop = Subscribers(), asyncio.get_running_loop()
            futures = {name: loop.create_future() for name in ("a", "b", "c")}
            for name, future in futures.items():
                subscribers.add_future(name, future)
            futures["c"].cancel()
            answer = pooled("a")
            subscribers.deliver([answer, Failure("b", BadValue("no")), pooled("c"), pooled("unknown")])
            assert await futures["a"] is answer
            with pytest.raises(BadValue, match="no"):
                await futures["b"]
            assert futures["c"].cancelled()

        asyncio.run(scene())

    def test_only_unfinished_requests_fail_when_the_engine_is_gone(self) -> None:
        async def scene() -> None:
            subscribers, loop = Subscribers(), asyncio.get_running_loop()
            done, pending = loop.create_future(), loop.create_future()
            done.set_result(pooled("done"))
            subscribers.add_future("done", done)
            subscribers.add_future("pending", pending)
            finished, unfinished = RecordingListener(), RecordingListener()
            finished.finished = True
            subscribers.add_listener("finished", finished)
            subscribers.add_listener("unfinished", unfinished)
            assert subscribers.fail_all("it is gone") == 2
            with pytest.raises(EngineUnavailable, match="it is gone"):
                await pending
            assert (finished.calls, unfinished.calls) == ([], ["it is gone"])

        asyncio.run(scene())
