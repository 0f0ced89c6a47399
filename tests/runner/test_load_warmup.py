"""Warm-up before the first request: on CUDA, kernels are compiled before the first real steps."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.checkpoint.pooling import PoolingSpec
from penstock.kernels import language
from penstock.runner import load_warmup, warmup
from penstock.runner.buckets import Bucket
from penstock.runner.graph_history import GraphHistory
from penstock.runner.graph_keys import Key
from penstock.runner.stopwatch import Stopwatch
from penstock.types import PooledResult, PoolingParams, StepPlan, StepResult, Task
from tests.runner.fake_graphs import make_runner, plan_of


class Runner:
    """Records for each step whether kernels were being precompiled."""

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
    load_warmup.warm_up_runner(runner, SimpleNamespace(), settings, 0, Stopwatch())  # type: ignore[arg-type]
    return runner.steps


def test_kernels_are_precompiled_before_the_first_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (1, 17, 64)
    expected = [(True, length) for length in lengths] + [(False, length) for length in lengths]
    assert warm_up(Runner("cuda"), monkeypatch) == expected


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


def test_shapes_of_earlier_runs_are_captured_before_those_of_natural_texts(tmp_path: Path) -> None:
    runner, graphs = make_runner()
    known = [graphs.key_of(plan_of(*lengths)) for lengths in ((7, 300), (3,) * 9, (20,))]
    foreign = PoolingParams(Task.SPARSE)  # a task that the model does not support
    history = runner.graph_history = GraphHistory("model", tmp_path)
    history.save([(key, 5) for key in known if key is not None])
    history.save([(Key(Bucket(64, 4, 64), False, False, foreign), 9), *((key, 5) for key in known if key)])
    spec: Any = SimpleNamespace(reads_labels=False, tasks=[Task.EMBED], pooling=PoolingSpec(("mean",)))
    settings: Any = SimpleNamespace(
        max_model_len=512, max_num_batched_tokens=1024, max_num_seqs=64, graph_capture_seconds=60.0
    )
    load_warmup.capture_likely_graphs(runner, graphs, spec, settings)
    first, *rest = graphs.captured
    assert first.bucket.tokens == max(key.bucket.tokens for key in graphs.captured), "for its memory"
    assert [key for key in rest if key in known] == rest[:3] == known
    assert len(rest) > 20 and all(key.params == PoolingParams() for key in graphs.captured)
    assert not graphs.policy.uses, "the steps of a warm-up are no history"


def test_without_time_nothing_is_captured_before_the_first_request() -> None:
    runner, graphs = make_runner()
    spec: Any = SimpleNamespace(reads_labels=False, tasks=[Task.EMBED], pooling=PoolingSpec(("mean",)))
    settings: Any = SimpleNamespace(
        max_model_len=512, max_num_batched_tokens=1024, max_num_seqs=64, graph_capture_seconds=0.0
    )
    load_warmup.capture_likely_graphs(runner, graphs, spec, settings)
    assert not graphs.captured and graphs.has_idle_work


def test_the_keys_that_compile_kernels_are_graphs_of_this_engine() -> None:
    _, graphs = make_runner()
    for max_tokens in (64, 1024, 16_384):
        settings: Any = SimpleNamespace(max_num_batched_tokens=max_tokens)
        keys = warmup.kernel_keys(PoolingParams(), settings)
        assert keys and all(graphs.can_capture(key) and key.bucket.tokens <= max_tokens for key in keys)
    graphs.compile_ahead(warmup.kernel_keys(PoolingParams(), SimpleNamespace(max_num_batched_tokens=1024)))  # type: ignore[arg-type]
    assert not graphs.captured
