from __future__ import annotations

import random
from concurrent.futures import Future

import numpy as np
import pytest

from penstock.engine.loop import EngineCore
from penstock.engine.progress import split_outputs
from penstock.engine.step_stats import StepStats
from penstock.errors import BadValue, DeadlineExceeded, QueueFull, RowFailed
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import Budget, ScheduledRows, Scheduler
from penstock.types import (
    Failure,
    Outcome,
    PooledOutput,
    PooledResult,
    PoolingParams,
    Request,
    StepPlan,
    StepResult,
    Task,
)
from tests.engine.fakes import (
    Clock,
    ManualRunner,
    PoisonedRunner,
    compute,
    expected_values,
    make_core,
    run_to_the_end,
)
from tests.helpers import make_request


def answers(outcomes: list[Outcome]) -> dict[str, list[list[float]]]:
    return {outcome.id: outcome.values.tolist() for outcome in outcomes if isinstance(outcome, PooledOutput)}


def failures(outcomes: list[Outcome]) -> dict[str, Exception]:
    return {outcome.id: outcome.error for outcome in outcomes if isinstance(outcome, Failure)}


def turn_until_done(core: EngineCore, runner: ManualRunner) -> list[Outcome]:
    outcomes = core.step()
    while core.busy:
        runner.finish()
        outcomes += core.step()
    return outcomes


def test_a_request_is_answered_with_its_rows_in_their_own_order() -> None:
    runner = ManualRunner()
    core = make_core(runner)
    request = make_request("a", [5, 1, 9, 1, 3])
    core.add(request)
    assert core.step() == []
    runner.finish()
    assert answers(core.step()) == {"a": expected_values(request)}
    assert not core.busy


@pytest.mark.parametrize("lengths", [[[4], [4], [4]], [[5, 1, 3], [2], [9, 2], [1]]])
def test_token_values_of_a_step_reach_each_request_in_its_own_order(lengths: list[list[int]]) -> None:
    params = PoolingParams(Task.TOKEN_EMBED)
    requests = [
        make_request(str(i), rows, first_token=100 * i, params=params) for i, rows in enumerate(lengths)
    ]
    plan = build_plan([ScheduledRows(r, np.arange(r.num_rows, dtype=np.int32)) for r in requests])
    handed = split_outputs(plan, [plan.token_ids[:, None]])
    assert [piece.request for piece, _ in handed] == requests
    for request, (_, (values,)) in zip(requests, handed, strict=True):
        assert np.concatenate(values)[:, 0].tolist() == request.token_ids.tolist()


def test_rows_that_arrive_over_several_steps_are_put_together_in_order() -> None:
    runner = ManualRunner()
    core = make_core(runner, tokens=10)
    request = make_request("a", [5, 1, 9, 1, 3, 8, 2, 10, 7])
    core.add(request)
    assert answers(turn_until_done(core, runner)) == {"a": expected_values(request)}
    assert len(runner.launched) > 3


def test_many_requests_at_random_are_each_answered_with_their_own_rows() -> None:
    draw = random.Random(7)
    runner = ManualRunner()
    core = make_core(runner, tokens=40, rows=6, depth=2)
    kinds = [PoolingParams(), PoolingParams(dimensions=2), PoolingParams(dimensions=1)]
    requests: dict[str, Request] = {}
    outcomes: list[Outcome] = []
    for number in range(60):
        lengths = [draw.randint(1, 20) for _ in range(draw.randint(1, 8))]
        request = make_request(str(number), lengths, first_token=1000 * number + 1, params=draw.choice(kinds))
        requests[request.id] = request
        core.add(request)
        if draw.random() < 0.6:
            outcomes += core.step()
            if runner.flights:
                runner.finish()
    while core.busy:
        outcomes += core.step()
        if runner.flights:
            runner.finish()
    wanted = {
        name: [row[: request.params.dimensions] for row in expected_values(request)]
        for name, request in requests.items()
    }
    assert answers(outcomes) == wanted


def test_requests_with_different_pooling_parameters_share_a_step() -> None:
    runner = ManualRunner()
    core = make_core(runner)
    whole = make_request("whole", [4, 2])
    cut = make_request("cut", [3, 5], first_token=50, params=PoolingParams(dimensions=2))
    core.add(whole)
    core.add(cut)
    core.step()
    assert len(runner.launched) == 1
    runner.finish()
    assert answers(core.step()) == {
        "whole": expected_values(whole),
        "cut": [row[:2] for row in expected_values(cut)],
    }


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_more_steps_are_in_flight_than_the_depth_allows(depth: int) -> None:
    runner = ManualRunner()
    core = make_core(runner, tokens=10, depth=depth)
    core.add(make_request("a", [10] * 8))
    for _ in range(3):
        core.step()
        assert len(runner.flights) == depth
    assert core.running == depth
    runner.finish()
    core.step()
    assert len(runner.flights) == depth
    assert len(runner.launched) == depth + 1


def test_a_later_step_that_ends_first_waits_for_the_one_before_it() -> None:
    runner = ManualRunner()
    core = make_core(runner, tokens=10, depth=2)
    first, second = make_request("first", [10]), make_request("second", [10], first_token=50)
    core.add(first)
    core.add(second)
    core.step()
    runner.finish(1)
    assert core.step() == []
    runner.finish(0)
    assert list(answers(core.step())) == ["first", "second"]


def test_an_id_that_is_in_use_is_refused_and_the_first_request_is_answered() -> None:
    runner = ManualRunner()
    core = make_core(runner)
    first = make_request("same", [3])
    core.add(first)
    with pytest.raises(BadValue, match="'same' is already in use"):
        core.add(make_request("same", [7]))
    core.step()
    with pytest.raises(BadValue):
        core.add(make_request("same", [7]))
    runner.finish()
    assert answers(core.step()) == {"same": expected_values(first)}
    core.add(make_request("same", [7]))
    core.step()
    assert runner.launched[-1].lengths.tolist() == [7]


def test_a_full_queue_refuses_the_request_and_keeps_no_trace_of_it() -> None:
    runner = ManualRunner()
    core = make_core(runner, queued_tokens=10)
    core.add(make_request("a", [8]))
    with pytest.raises(QueueFull):
        core.add(make_request("b", [8]))
    core.step()
    runner.finish()
    core.step()
    assert not core.busy


def test_a_request_cancelled_before_it_runs_is_never_launched() -> None:
    runner = ManualRunner()
    core = make_core(runner)
    core.add(make_request("a", [3]))
    core.cancel("a")
    assert core.step() == []
    assert runner.launched == []
    assert not core.busy


def test_a_request_cancelled_in_flight_is_dropped_and_the_rest_of_its_step_is_answered() -> None:
    runner = ManualRunner()
    core = make_core(runner)
    kept = make_request("kept", [3, 6], first_token=50)
    core.add(make_request("gone", [4, 4]))
    core.add(kept)
    core.step()
    core.cancel("gone")
    runner.finish()
    assert answers(core.step()) == {"kept": expected_values(kept)}
    assert not core.busy


def test_a_request_cancelled_between_its_steps_runs_no_further() -> None:
    runner = ManualRunner()
    core = make_core(runner, tokens=10)
    core.add(make_request("a", [10] * 5))
    core.step()
    core.cancel("a")
    runner.finish()
    assert core.step() == []
    assert len(runner.launched) == 1
    assert not core.busy


def test_an_id_used_again_while_its_cancelled_rows_are_in_flight_gets_only_its_own_rows() -> None:
    runner = ManualRunner()
    core = make_core(runner, depth=2)
    core.add(make_request("same", [4]))
    core.step()
    core.cancel("same")
    again = make_request("same", [3], first_token=50)
    core.add(again)
    core.step()
    runner.finish()
    assert core.step() == []
    runner.finish()
    assert answers(core.step()) == {"same": expected_values(again)}


def test_cancelling_an_unknown_id_does_nothing() -> None:
    core = make_core(ManualRunner())
    core.cancel("stranger")
    assert not core.busy


def test_a_request_past_its_deadline_fails_and_says_how_long_it_waited() -> None:
    runner, clock = ManualRunner(), Clock()
    core = make_core(runner, tokens=10, clock=clock)
    core.add(make_request("running", [10], arrival_s=100.0))
    core.step()
    core.add(make_request("waiting", [10], arrival_s=100.0, deadline_s=101.5))
    clock.now_s = 101.0
    assert core.step() == []
    clock.now_s = 102.0
    error = failures(core.step())["waiting"]
    assert isinstance(error, DeadlineExceeded)
    assert "2.000 s" in str(error)
    runner.finish()
    assert list(answers(core.step())) == ["running"]
    assert not core.busy


def test_a_request_whose_deadline_passes_between_its_steps_fails_once() -> None:
    runner, clock = ManualRunner(), Clock()
    core = make_core(runner, tokens=10, clock=clock)
    core.add(make_request("a", [10, 10], deadline_s=101.0))
    core.step()
    clock.now_s = 102.0
    runner.finish()
    outcomes = core.step()
    assert list(failures(outcomes)) == ["a"]
    assert len(outcomes) == 1
    assert not core.busy


@pytest.mark.parametrize("how", ["step raises", "launch raises", "nan"])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_a_poisoned_request_fails_alone_and_the_rest_of_its_step_is_answered(how: str, position: int) -> None:
    requests = [make_request(str(i), [3, 5, 2], first_token=100 * i + 1) for i in range(8)]
    runner = PoisonedRunner({100 * position + 4}, how)
    core = make_core(runner)
    for request in requests:
        core.add(request)
    outcomes = run_to_the_end(core)
    good = {request.id: expected_values(request) for request in requests if request.id != str(position)}
    assert answers(outcomes) == good
    assert list(failures(outcomes)) == [str(position)]
    assert isinstance(failures(outcomes)[str(position)], RowFailed)
    assert len(outcomes) == len(requests)
    assert runner.launches <= 1 + 2 * 3, "halving finds it in log2(8) rounds"


def test_several_poisoned_requests_in_one_step_each_fail_alone() -> None:
    requests = [make_request(str(i), [4], first_token=100 * i + 1) for i in range(9)]
    core = make_core(PoisonedRunner({101, 502, 803}, "step raises"))
    for request in requests:
        core.add(request)
    outcomes = run_to_the_end(core)
    assert sorted(failures(outcomes)) == ["1", "5", "8"]
    assert sorted(answers(outcomes)) == ["0", "2", "3", "4", "6", "7"]


def test_a_poisoned_request_over_several_steps_fails_once_and_stops() -> None:
    runner = PoisonedRunner({1}, "step raises")
    core = make_core(runner, tokens=10)
    core.add(make_request("bad", [10] * 6))
    neighbour = make_request("good", [10], first_token=900)
    core.add(neighbour)
    outcomes = run_to_the_end(core)
    assert list(failures(outcomes)) == ["bad"]
    assert answers(outcomes) == {"good": expected_values(neighbour)}
    assert core.scheduler.queue.num_tokens == 0


def test_a_failure_has_the_message_of_the_failed_step() -> None:
    core = make_core(PoisonedRunner({2}, "step raises"))
    core.add(make_request("a", [4]))
    (error,) = failures(run_to_the_end(core)).values()
    assert "ValueError: cannot compute token 2" in str(error)


def test_a_suspect_that_is_cancelled_is_not_run_again() -> None:
    runner = ManualRunner()
    core = make_core(runner)
    for name, first in (("a", 1), ("b", 50)):
        core.add(make_request(name, [4], first_token=first))
    core.step()
    core.cancel("a")
    runner.fail(RuntimeError("no"))
    assert not core.step(), "the cancelled request may have been the poisoned one"
    assert [piece.request.id for piece in runner.launched[1].slices] == ["b"]
    runner.finish()
    assert [outcome.id for outcome in core.step()] == ["b"]


def test_new_requests_are_answered_after_a_failed_step() -> None:
    runner = ManualRunner()
    core = make_core(runner)
    core.add(make_request("bad", [4]))
    core.step()
    runner.fail(MemoryError("no room"))
    core.step()
    later = make_request("later", [2])
    core.add(later)
    core.step()
    runner.finish()
    assert answers(core.step()) == {"later": expected_values(later)}


def test_the_owner_is_woken_when_a_step_ends() -> None:
    runner, woken = ManualRunner(), []
    core = EngineCore(
        runner, Scheduler(Budget(100, 100, 10**9)), clock=Clock(), wake=lambda: woken.append(True)
    )
    core.add(make_request("a", [4]))
    core.step()
    assert not woken
    runner.finish()
    assert woken


def test_each_finished_step_is_observed_with_its_size() -> None:
    clock, seen = Clock(), list[StepStats]()
    runner = ManualRunner()
    core = EngineCore(
        runner, Scheduler(Budget(20, 100, 10**9)), clock=clock, observe=lambda stats: seen.append(stats)
    )
    core.add(make_request("a", [4, 5]))
    core.add(make_request("b", [1], first_token=50))
    core.step()
    clock.now_s += 0.75
    runner.finish()
    core.step()
    assert seen == [StepStats(tokens=10, rows=3, requests=2, fill=0.5, step_s=0.75, device_s=0.5)]


def test_an_answer_tells_how_long_it_queued_and_ran() -> None:
    clock, runner = Clock(), ManualRunner()
    core = make_core(runner, tokens=10, clock=clock)
    core.add(make_request("a", [10, 10], arrival_s=100.0))
    clock.now_s = 103.0
    core.step()
    runner.finish()
    core.step()
    runner.finish()
    (answer,) = core.step()
    assert isinstance(answer, PooledOutput)
    assert answer.timings.queue_s == 3.0
    assert answer.timings.device_s == 1.0


def test_an_answer_does_not_change_when_the_runner_reuses_its_buffer() -> None:
    """A runner reuses its arrays for later steps, so answers must be copies."""

    class ReusingRunner(ManualRunner):
        buffer = np.zeros((64, 3), dtype=np.float32)

        def launch(self, plan: StepPlan) -> Future[StepResult]:
            (values,) = compute(plan).outputs
            self.buffer[: len(values)] = values
            future: Future[StepResult] = Future()
            future.set_result(PooledResult((self.buffer[: len(values)],)))
            return future

    core = make_core(ReusingRunner(), tokens=10)
    requests = [make_request(str(i), [10], first_token=100 * i + 1) for i in range(4)]
    for request in requests:
        core.add(request)
    outcomes = run_to_the_end(core)
    assert answers(outcomes) == {request.id: expected_values(request) for request in requests}


def test_closing_the_core_closes_its_runner() -> None:
    runner = ManualRunner()
    make_core(runner).close()
    assert runner.closed


@pytest.mark.parametrize("task", [Task.EMBED, Task.TOKEN_EMBED])
@pytest.mark.parametrize("lengths", [[4], [5, 1, 3]])
def test_answers_do_not_change_when_the_memory_of_a_step_is_reused(task: Task, lengths: list[int]) -> None:
    runner = ManualRunner()
    core = make_core(runner)
    request = make_request("a", lengths, params=PoolingParams(task))
    core.add(request)
    core.step()
    plan, future = runner.flights.pop()
    pinned = np.repeat(plan.token_ids.astype(np.float32)[:, None], 3, axis=1)
    if task is Task.EMBED:
        pinned = pinned[plan.cu_lengths[:-1]]
    future.set_result(PooledResult((pinned,), device_s=0.1))
    (answer,) = core.step()
    assert isinstance(answer, PooledOutput)
    before = answer.values.copy()
    pinned[:] = -1
    np.testing.assert_array_equal(answer.values, before)
    firsts = request.token_ids if task is Task.TOKEN_EMBED else request.token_ids[request.starts]
    np.testing.assert_array_equal(answer.values[:, 0], firsts)


def test_only_the_request_with_token_values_that_are_not_finite_fails() -> None:
    runner = ManualRunner()
    core = make_core(runner)
    params = PoolingParams(Task.TOKEN_EMBED)
    requests = [make_request(str(i), [3, 2], first_token=10 * i, params=params) for i in range(3)]
    for request in requests:
        core.add(request)
    core.step()
    plan, future = runner.flights.pop()
    values = plan.token_ids.astype(np.float32)[:, None].copy()
    values[plan.token_ids == requests[1].token_ids[3]] = np.inf
    future.set_result(PooledResult((values,), device_s=0.1))
    outcomes = {outcome.id: outcome for outcome in core.step()}
    assert isinstance(outcomes["1"], Failure)
    for request in (requests[0], requests[2]):
        answer = outcomes[request.id]
        assert isinstance(answer, PooledOutput)
        assert answer.values[:, 0].tolist() == request.token_ids.tolist()
