"""A background step on a CPU lets other steps run between its matrix products, and gives the same vectors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from penstock.layers.yield_points import yield_point
from penstock.runner.interruptible import InterruptibleSteps
from penstock.types import PooledResult, PoolingParams, PoolPlan, StepResult
from tests.runner.small_models import FAMILIES, make_runner, plan_of

WAIT_S = 60
PLAN = plan_of(PoolingParams(), lengths=(2,))


class Steps:
    """A step with some yield points, which it logs."""

    def __init__(self, num_points: int) -> None:
        self.log: list[str] = []
        self.began, self.go_on = Event(), Event()
        self.thread = ThreadPoolExecutor(1)
        self.steps = InterruptibleSteps(self._run, self.thread)
        self._num_points = num_points

    def _run(self, plan: PoolPlan) -> StepResult:
        self.began.set()
        assert self.go_on.wait(WAIT_S)
        for number in range(self._num_points):
            yield_point()
            self.log.append(f"part {number}")
        return PooledResult((np.zeros((1, 1), np.float32),))


@pytest.fixture
def three() -> Iterator[Steps]:
    steps = Steps(3)
    yield steps
    steps.steps.release()
    steps.thread.shutdown()


def test_offered_work_runs_at_the_next_yield_point(three: Steps) -> None:
    result = three.steps.launch(PLAN)
    assert three.began.wait(WAIT_S)
    offered = three.steps.offer(lambda: three.log.append("other"))
    assert offered is not None
    three.go_on.set()
    offered.result(WAIT_S)
    assert result.result(WAIT_S).stretch_s > 0  # type: ignore[union-attr]
    assert three.log == ["other", "part 0", "part 1", "part 2"]


def test_a_held_step_waits_at_a_yield_point_and_advances_one_part_at_a_time(three: Steps) -> None:
    three.steps.hold()
    result = three.steps.launch(PLAN)
    three.go_on.set()
    for number in range(2):
        three.steps.advance()
        seen = three.steps.offer(lambda: list(three.log))
        assert seen is not None and len(seen.result(WAIT_S)) <= number + 1
    assert not result.done()
    three.steps.release()
    result.result(WAIT_S)
    assert three.log == ["part 0", "part 1", "part 2"]


def test_work_offered_after_the_last_yield_point_runs_and_later_work_is_declined(three: Steps) -> None:
    three.go_on.set()
    finished = three.steps.launch(PLAN)
    offered = three.steps.offer(lambda: "done")
    finished.result(WAIT_S)
    assert offered is None or offered.result(WAIT_S) == "done"
    assert three.steps.offer(lambda: None) is None


def test_an_error_of_offered_work_is_its_own(three: Steps) -> None:
    def fail() -> None:
        raise ValueError("poisoned")

    result = three.steps.launch(PLAN)
    assert three.began.wait(WAIT_S)
    offered = three.steps.offer(fail)
    three.go_on.set()
    assert offered is not None
    with pytest.raises(ValueError, match="poisoned"):
        offered.result(WAIT_S)
    result.result(WAIT_S)


@pytest.mark.parametrize("family", ["BertModel", "ModernBertModel", "DebertaV2Model", "Qwen3Model"])
def test_a_step_that_is_interrupted_gives_the_same_vectors(family: str) -> None:
    runner = make_runner(family, "mean", FAMILIES[family])
    long, short = plan_of(PoolingParams(), lengths=(60, 70)), plan_of(PoolingParams(), lengths=(3, 9))
    expected = [runner.forward(plan)[0].numpy() for plan in (long, short)]
    assert runner.background is not None
    runner.background.hold()
    background = runner.background.launch(long)
    interrupting = [runner.launch(short) for _ in range(3)]
    found = [each.result(WAIT_S).outputs[0] for each in interrupting]  # type: ignore[union-attr]
    assert not background.done()
    runner.background.release()
    found.append(background.result(WAIT_S).outputs[0])  # type: ignore[union-attr]
    for got, wanted in zip(found, [expected[1]] * 3 + [expected[0]], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    runner.close()


def test_a_runner_that_is_closed_finishes_its_background_step() -> None:
    runner = make_runner("BertModel", "mean", {})
    assert runner.background is not None
    runner.background.hold()
    held = runner.background.launch(plan_of(PoolingParams(), lengths=(9,)))
    runner.close()
    assert held.done() and held.exception() is None
