"""Identical rows in flight run once, whatever happens to the request that runs them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Engine
from penstock.types import Failure, Outcome, PooledOutput, PooledRows, PoolingParams, Request, Task
from tests.engine.fakes import ManualRunner, PoisonedRunner, expected_values, make_core, run_to_the_end
from tests.thinning import num_examples
from tests.waiting import PATIENCE_S


def request(
    name: str,
    *rows: list[int],
    priority: int = 0,
    salt: str = "",
    task: Task = Task.EMBED,
    client: str = "",
) -> Request:
    return Request(
        name,
        np.array([token for row in rows for token in row], dtype=np.int32),
        np.array([len(row) for row in rows], dtype=np.int32),
        PoolingParams(task),
        priority=priority,
        cache_salt=salt,
        client=client,
    )


def values(outcomes: list[Outcome]) -> dict[str, list[list[float]]]:
    assert all(isinstance(outcome, PooledOutput) for outcome in outcomes), outcomes
    return {o.id: o.values.tolist() for o in outcomes if isinstance(o, PooledOutput)}


def test_equal_rows_of_one_request_run_once() -> None:
    runner = ManualRunner()
    core = make_core(runner, share_identical=True)
    asked = request("a", [1, 2], [3], [1, 2], [1, 2])
    core.add(asked)
    core.step()
    assert runner.launched[0].num_rows == 2
    runner.finish()
    assert values(core.step()) == {"a": expected_values(asked)}
    assert core.dedup is not None and core.dedup.shared_rows == 2


def test_a_request_follows_rows_of_another_that_is_in_flight() -> None:
    runner = ManualRunner()
    core = make_core(runner, share_identical=True)
    core.add(first := request("a", [1, 2], [3]))
    core.step()
    core.add(second := request("b", [3]))
    core.add(third := request("c", [7, 7], [1, 2]))
    core.step()
    runner.finish()
    assert values(core.step()) == {"a": expected_values(first), "b": expected_values(second)}
    assert runner.launched[1].token_ids.tolist() == [7, 7]
    runner.finish()
    assert values(core.step()) == {"c": expected_values(third)}
    assert not core.busy


def test_clients_share_rows_that_run_soon_and_wait_for_no_others() -> None:
    runner = ManualRunner()
    core = make_core(runner, share_identical=True)
    budget = core.scheduler.budget
    core.add(request("a", [1, 2], client="a"))
    core.add(request("b", [1, 2], client="b"))
    assert core.scheduler.queue.num_rows == 1, "they share the row"
    for number in range(3):
        core.add(
            request(f"long-{number}", list(range(10 * number, budget.max_tokens + 10 * number)), client="a")
        )
    core.add(request("c", [1, 2], client="c"))
    core.add(request("own", [1, 2], client="a"))
    assert core.scheduler.queue.num_rows == 5, "only the client with much to run waits for its own"


def test_identical_requests_share_one_array_and_no_other_request_does() -> None:
    runner = ManualRunner()
    core = make_core(runner, share_identical=True)
    rows = ([1, 2], [3])
    for name in "abc":
        core.add(request(name, *rows))
    core.add(turned := request("d", *reversed(rows)))
    core.add(part := request("e", [3]))
    core.step()
    runner.finish()
    found = {outcome.id: outcome.values for outcome in core.step() if isinstance(outcome, PooledOutput)}
    assert found["a"] is found["b"] is found["c"]
    assert not found["a"].flags.writeable
    for each in (turned, part):
        assert found[each.id].tolist() == expected_values(each)
        assert not np.shares_memory(found[each.id], found["a"])


def test_every_offline_caller_gets_an_array_of_its_own() -> None:
    with Engine(device="null") as engine:
        asked = [request(name, list(range(1, 30))) for name in "abc"]
        futures = [engine.local.engine.submit(each) for each in asked]
        arrays = [future.result(timeout=PATIENCE_S).values for future in futures]
        for i, array in enumerate(arrays):
            array[:] = i  # type: ignore[call-overload]
        assert [float(array[0, 0]) for array in arrays] == [0.0, 1.0, 2.0]  # type: ignore[arg-type]


def test_nothing_is_shared_after_the_answer_nor_across_salts_priorities_and_tasks() -> None:
    runner = ManualRunner()
    core = make_core(runner, share_identical=True)
    core.add(request("a", [1, 2], priority=5))
    core.add(request("b", [1, 2], priority=0))  # more urgent than `a`, so it must not wait for it
    core.add(request("c", [1, 2], priority=5, salt="x"))
    core.add(request("d", [1, 2], priority=5, task=Task.CLASSIFY))
    core.step()
    assert runner.launched[0].num_rows == 4
    runner.finish()
    core.step()
    core.add(request("e", [1, 2]))
    core.step()
    assert runner.launched[1].num_rows == 1


def test_a_follower_outlives_a_leader_that_is_cancelled() -> None:
    runner = ManualRunner()
    core = make_core(runner, share_identical=True)
    core.add(request("a", [1, 2]))
    core.step()
    core.add(second := request("b", [1, 2], [4]))
    core.cancel("a")
    runner.finish()
    outcomes = core.step()
    while core.busy:
        runner.finish()
        outcomes += core.step()
    assert values(outcomes) == {"b": expected_values(second)}


def test_a_follower_does_not_share_the_failure_of_its_leader() -> None:
    runner = PoisonedRunner({9}, "nan")
    core = make_core(runner, tokens=2, share_identical=True)
    core.add(request("a", [1, 2], [9]))
    core.add(good := request("b", [1, 2]))
    core.add(request("c", [9]))
    outcomes = run_to_the_end(core)
    assert {o.id for o in outcomes if isinstance(o, Failure)} == {"a", "c"}
    assert values([o for o in outcomes if isinstance(o, PooledOutput)]) == {"b": expected_values(good)}


ROWS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=2), min_size=1, max_size=4)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ROWS),
        st.just("step"),
        st.just("finish"),
        st.just("fail"),
        st.just("cancel"),
    ),
    max_size=30,
)


@settings(max_examples=num_examples(150), deadline=None)
@given(actions=ACTIONS, tokens=st.integers(1, 6), depth=st.integers(1, 2))
def test_any_mix_of_arrivals_failures_and_cancellations_ends_every_request_once(
    actions: list[object], tokens: int, depth: int
) -> None:
    runner = ManualRunner()
    core = make_core(runner, tokens=tokens, depth=depth, share_identical=True)
    asked: dict[str, Request] = {}
    cancelled: set[str] = set()
    outcomes: list[Outcome] = []
    failed = False
    for action in actions:
        if isinstance(action, tuple):
            name = f"r{len(asked)}"
            asked[name] = request(name, *action[1])
            core.add(asked[name])
        elif action == "step":
            outcomes += core.step()
        elif action == "finish" and runner.flights:
            runner.finish()
        elif action == "fail" and runner.flights:
            failed = True
            runner.fail(RuntimeError("no"))
        elif action == "cancel" and asked:
            name = next(iter(asked))
            if not any(outcome.id == name for outcome in outcomes):
                core.cancel(name)
                cancelled.add(name)
    for _ in range(300):
        outcomes += core.step()
        if not core.busy:
            break
        if runner.flights:
            runner.finish()
    assert not core.busy
    ended = [outcome.id for outcome in outcomes]
    assert sorted(ended) == sorted(set(asked) - cancelled)
    for outcome in outcomes:
        if isinstance(outcome, PooledOutput):
            assert outcome.values.tolist() == expected_values(asked[outcome.id])
        else:
            assert failed


def test_requests_of_one_row_are_answered_together_but_not_those_with_followers() -> None:
    runner = ManualRunner()
    core = make_core(runner, share_identical=True)
    core.pending.joins_answers = True
    alone = [request("a", [1, 2]), request("b", [5]), request("c", [9, 8, 7])]
    for each in (*alone, led := request("d", [3]), two := request("e", [4], [6])):
        core.add(each)
    core.add(follower := request("f", [3]))
    core.step()
    runner.finish()
    joined, *others = core.step()
    assert isinstance(joined, PooledRows)
    assert values(list(joined.parts())) == {each.id: expected_values(each) for each in alone}
    assert values(others) == {each.id: expected_values(each) for each in (led, two, follower)}
    assert not core.pending and not core.busy
    core.add(again := request("g", [1, 2]))  # the earlier request with this row is gone
    core.step()
    runner.finish()
    assert values(core.step()) == {"g": expected_values(again)}
