"""What loading does before the first request: on CUDA kernels are compiled ahead of the first real steps."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.kernels import language
from penstock.runner import load, warmup
from penstock.types import PooledResult, PoolPlan, StepPlan, StepResult, Task


class Runner:
    """Notes whether each step came while kernels were being compiled."""

    generator = graphs = decode = images = None

    def __init__(self, device: str) -> None:
        self.device = SimpleNamespace(type=device)
        self.ahead = False
        self.steps: list[tuple[bool, int]] = []
        self.broken_ahead = False

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        self.steps.append((self.ahead, plan.num_tokens))
        if self.ahead and self.broken_ahead:
            raise ValueError("numbers that no kernel has written")
        future: Future[StepResult] = Future()
        future.set_result(PooledResult(()))
        return future


def warm_up(runner: Runner, monkeypatch: pytest.MonkeyPatch, able: bool = True) -> list[tuple[bool, int]]:
    @contextmanager
    def compiling() -> Iterator[None]:
        runner.ahead = True
        try:
            yield
        finally:
            runner.ahead = False

    monkeypatch.setattr(language, "precompile", lambda threads: compiling() if able else None)
    settings: Any = SimpleNamespace(max_model_len=100, max_num_batched_tokens=64, chunked=False)
    load.warm_up_runner(runner, SimpleNamespace(), settings, 0, load.Stopwatch())  # type: ignore[arg-type]
    return runner.steps


def test_kernels_are_precompiled_before_the_first_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (1, 17, 64)
    expected = [(True, length) for length in lengths] + [(False, length) for length in lengths]
    assert warm_up(Runner("cuda"), monkeypatch) == expected


@pytest.mark.parametrize("has_skip", [True, False])
def test_warm_up_graphs_take_a_skip_where_the_model_has_instructions(has_skip: bool) -> None:
    plans: list[PoolPlan] = []

    class Launched(Runner):
        def launch(self, plan: StepPlan) -> Future[StepResult]:
            assert isinstance(plan, PoolPlan)
            plans.append(plan)
            return super().launch(plan)

    graphs: Any = SimpleNamespace(capture_on_first_use=nullcontext, captured={})
    runner: Any = Launched("cuda")
    warmup.capture_graphs(runner, graphs, Task.EMBED, 64, 64, has_skip=has_skip)
    assert plans and all((plan.skip is not None) == has_skip for plan in plans)


def test_an_error_during_precompilation_is_ignored_and_the_steps_still_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Runner("cuda")
    runner.broken_ahead = True
    assert warm_up(runner, monkeypatch) == [(True, 1), (False, 1), (False, 17), (False, 64)]


@pytest.mark.parametrize(("device", "able"), [("cpu", True), ("cuda", False)])
def test_steps_run_once_where_precompilation_is_unavailable(
    device: str, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = warm_up(Runner(device), monkeypatch, able)
    assert steps and not any(ahead for ahead, _ in steps) and len(set(steps)) == len(steps)
