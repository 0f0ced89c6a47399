"""A device runs out of memory or is lost: which requests fail, and with which message."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Engine
from penstock.engine.loop import EngineCore
from penstock.engine.recovery.oom import TokenBackoff, halves, num_scheduled_tokens
from penstock.errors import DeviceFailed, DeviceOutOfMemory, EngineUnavailable, RowFailed
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import Failure, PooledOutput, PoolingParams, StepPlan, StepResult
from tests.engine.chunked import LENGTHS, check_no_memory_is_held, chunked, rows
from tests.engine.fakes import ManualRunner, compute, expected_values, make_core, run_to_the_end
from tests.engine.pair_requests import PAIRS, TEXTS, run, score_request
from tests.helpers import ints, make_request
from tests.thinning import num_examples


class SmallRunner:
    """A fake device with memory for some tokens: in one step or, if `together`, in all steps in flight."""

    def __init__(self, memory: int, *, raises: bool = True, together: bool = False) -> None:
        self.memory, self.raises, self.together = memory, raises, together
        self.sizes: list[int] = []
        self.in_flight: list[tuple[StepPlan, Future[StepResult]]] = []

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        used = sum(other.num_tokens for other, _ in self.in_flight) if self.together else 0
        self.sizes.append(plan.num_tokens)
        future: Future[StepResult] = Future()
        if plan.num_tokens + used > self.memory:
            error = DeviceOutOfMemory(f"tried to use {plan.num_tokens}")
            if self.raises:
                raise error
            future.set_exception(error)
        else:
            self.in_flight.append((plan, future))
        return future

    def finish(self) -> None:
        for plan, future in self.in_flight:
            future.set_result(compute(plan))
        self.in_flight.clear()

    def close(self) -> None:
        return None


def run_all(core: EngineCore, runner: SmallRunner) -> dict[str, PooledOutput | Failure]:
    found: dict[str, PooledOutput | Failure] = {}
    for _ in range(10_000):
        if not core.busy:
            return found
        for outcome in core.step():
            assert outcome.id not in found, "a request has two outcomes"
            found[outcome.id] = outcome
        runner.finish()
    raise AssertionError("the core is still busy")


@settings(max_examples=num_examples(150), deadline=None)
@given(
    requests=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=9), min_size=1, max_size=12),
    memory=st.integers(1, 60),
    depth=st.integers(1, 3),
    raises=st.booleans(),
    together=st.booleans(),
)
def test_only_rows_that_do_not_fit_alone_fail_and_all_other_answers_are_right(
    requests: list[list[int]], memory: int, depth: int, raises: bool, together: bool
) -> None:
    runner = SmallRunner(memory, raises=raises, together=together)
    core = make_core(runner, tokens=100, depth=depth)  # type: ignore[arg-type]
    made = [make_request(str(i), lengths, first_token=1000 * i) for i, lengths in enumerate(requests)]
    for request in made:
        core.add(request)
    found = run_all(core, runner)
    assert len(found) == len(made)
    for request in made:
        outcome = found[request.id]
        if max(request.lengths) > memory:
            assert isinstance(outcome, Failure) and isinstance(outcome.error, RowFailed)
            assert "more memory than the device has" in outcome.error.message
        else:
            assert isinstance(outcome, PooledOutput)
            assert outcome.values.tolist() == expected_values(request)


def test_steps_are_smaller_for_a_while_after_memory_ran_out_and_then_full_again() -> None:
    runner = SmallRunner(50)
    core = make_core(runner, tokens=80)  # type: ignore[arg-type]
    core.add(make_request("first", [10] * 8))
    run_all(core, runner)
    assert runner.sizes == [80, 40, 40]
    core.add(make_request("second", [10] * 8))
    run_all(core, runner)
    assert runner.sizes[3:] == [40, 40], "the budget is lower: no step runs twice"
    runner.memory = 1000
    core.add(make_request("third", [10] * 4 * TokenBackoff.PATIENCE))
    run_all(core, runner)
    assert max(runner.sizes[5:]) == 80
    assert core.scheduler.budget.max_tokens == 80


def test_a_row_runs_again_with_nothing_else_in_flight_before_it_fails() -> None:
    runner = SmallRunner(30, together=True)
    core = make_core(runner, tokens=20, depth=2)  # type: ignore[arg-type]
    for name in ("a", "b"):
        core.add(make_request(name, [20], first_token=1 if name == "a" else 100))
    found = run_all(core, runner)
    assert all(isinstance(outcome, PooledOutput) for outcome in found.values())


def test_nothing_is_launched_behind_a_step_that_has_just_failed() -> None:
    runner = SmallRunner(5)
    core = make_core(runner, tokens=10, depth=3)  # type: ignore[arg-type]
    core.add(make_request("a", [5] * 6))
    core.step()
    assert runner.sizes == [10]


def test_halves_keep_every_row_once_and_queries_before_documents() -> None:
    request = score_request("s", [[1] * 4, [2] * 3, [3] * 9, [4] * 2, [5] * 6], ints([0, 1, 0]))
    entry = ScheduledRows(request, ints([4, 2, 0, 3, 1]), cached_documents=ints([3]))
    other = ScheduledRows(make_request("o", [3, 3]), ints([0, 1]))
    parts = halves([entry, other])
    assert parts is not None
    first, second = parts
    assert [s.rows.tolist() for s in first] == [[0, 1, 4]]
    assert [s.rows.tolist() for s in second] == [[2, 3], [0, 1]]
    assert first[0].cached_documents is None and second[0].cached_documents is not None


def test_only_a_row_with_a_block_table_is_halved() -> None:
    request = make_request("a", [10])
    kept = ScheduledRows(request, ints([0]), ints([2]), ints([9]), ([4, 5],))
    parts = halves([kept])
    assert parts is not None
    assert [(int(s.begins[0]), int(s.ends[0])) for p in parts for s in p if s.begins is not None] == [
        (2, 5),
        (5, 9),
    ]
    assert num_scheduled_tokens(parts[0][0]).tolist() == [3]
    assert halves([ScheduledRows(request, ints([0]), ints([0]), ints([10]), (None,))]) is None
    assert halves([ScheduledRows(request, ints([0]))]) is None


def limit_memory(engine: Engine, tokens: int) -> list[int]:
    """Make launches with more tokens fail. Returns the list to which the sizes of refused steps are added."""
    runner = engine.local.engine.core.runner
    launch, refused = runner.launch, []

    def small(plan: StepPlan) -> Future[StepResult]:
        if plan.num_tokens > tokens:
            refused.append(plan.num_tokens)
            raise DeviceOutOfMemory("no room")
        return launch(plan)

    runner.launch = small  # type: ignore[method-assign]
    return refused


@pytest.mark.parametrize("prefixes", [False, True])
def test_chunked_rows_finish_after_memory_ran_out(folder: Path, prefixes: bool) -> None:
    inputs = rows(LENGTHS)
    with chunked(folder) as plain:
        expected, tokens = plain.embed(inputs), plain.token_embed(inputs)
    options = {"enable_prefix_caching": prefixes, "long_prefill_token_threshold": 0}
    with chunked(folder, pipeline_depth=2, **options) as engine:
        refused = limit_memory(engine, 7)
        whole = [i for i, length in enumerate(LENGTHS) if length <= 7 or length > 48 or prefixes]
        np.testing.assert_allclose(engine.embed([inputs[i] for i in whole]), expected[whole], atol=1e-5)
        assert refused
        for i in (9, 10):
            np.testing.assert_allclose(engine.token_embed([inputs[i]])[0], tokens[i], atol=1e-5)
        check_no_memory_is_held(engine)


def test_no_row_reuses_a_prefix_whose_step_failed(folder: Path) -> None:
    (row,) = rows([40])
    with chunked(folder) as plain:
        expected = plain.embed([row])
    with chunked(folder, enable_prefix_caching=True, long_prefill_token_threshold=0) as engine:
        runner = engine.local.engine.core.runner
        launch = runner.launch

        def fail(plan: StepPlan) -> Future[StepResult]:
            raise ValueError("no")

        runner.launch = fail  # type: ignore[method-assign]
        with pytest.raises(RowFailed):
            engine.embed([row])
        runner.launch = launch  # type: ignore[method-assign]
        np.testing.assert_allclose(engine.embed([row]), expected, atol=1e-5)
        check_no_memory_is_held(engine)


@pytest.mark.parametrize("tokens", [7, 9, 14])
def test_scores_are_right_when_queries_and_documents_run_in_different_steps(tokens: int) -> None:
    with Engine() as engine:
        inputs = engine.tokenize(TEXTS)
        expected = run(engine, score_request("plain", inputs, PAIRS, cache_salt="a")).values
        refused = limit_memory(engine, tokens)
        got = run(engine, score_request("small", inputs, PAIRS, cache_salt="b")).values
        assert refused
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_identical_rows_survive_the_request_that_could_not_fit() -> None:
    runner = SmallRunner(10)
    core = make_core(runner, share_identical=True)  # type: ignore[arg-type]
    core.add(make_request("large", [4, 20]))
    core.add(make_request("twin", [4]))
    found = run_all(core, runner)
    assert isinstance(found["large"], Failure)
    assert isinstance(found["twin"], PooledOutput)


def test_a_lost_device_fails_all_requests_with_a_reason_and_runs_nothing_more() -> None:
    runner = ManualRunner()
    core = make_core(runner, tokens=8, depth=2)
    for i in range(4):
        core.add(make_request(str(i), [8], first_token=100 * i, params=PoolingParams()))
    core.step()
    runner.fail(DeviceFailed("the device failed: CUDA error: an illegal memory access was encountered"))
    outcomes = core.step()
    assert sorted(outcome.id for outcome in outcomes) == ["0", "1", "2", "3"]
    assert all(isinstance(o, Failure) and o.error.status == 503 for o in outcomes)
    assert all(isinstance(o, Failure) and "illegal memory access" in o.error.message for o in outcomes)
    assert core.device_failure is not None and not core.busy
    assert len(runner.launched) == 2
    assert run_to_the_end(core) == []


def test_a_lost_device_ends_an_offline_engine_with_the_reason() -> None:
    with Engine() as engine:

        def lost(plan: StepPlan) -> Future[StepResult]:
            raise DeviceFailed("the device failed: gone")

        engine.local.engine.core.runner.launch = lost  # type: ignore[method-assign]
        with pytest.raises(EngineUnavailable, match="gone"):
            engine.embed(["a"])
        with pytest.raises(EngineUnavailable, match="gone"):
            engine.embed(["b"])
