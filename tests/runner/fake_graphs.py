"""A model, a runner and a fake graph capture that only stores its work, for tests of CUDA graphs without a
GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.pooling import PoolingSpec
from penstock.layers.batch import Batch
from penstock.layers.head import TaskHead
from penstock.pooling.build import Pooler
from penstock.runner.capture import Work
from penstock.runner.graphs import Graphs
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolingParams, PoolPlan, Task
from tests.helpers import ints, make_request

CPU = torch.device("cpu")


def plan_of(*lengths: int, params: PoolingParams | None = None, **more: Any) -> PoolPlan:
    request = make_request("r", lengths, params=params, **more)
    return build_plan([ScheduledRows(request, ints(range(len(lengths))))])


class Model:
    """Computes each token alone. Padding tokens become NaN, like uninitialised memory."""

    hidden_size = 8
    causal = False
    prunes_last_layer = True
    ignored_tensors = ()

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.words, self.places = torch.randn(2000, 8, generator=draw), torch.randn(600, 8, generator=draw)
        weight = torch.randn(3, 8, generator=draw)
        self.heads = {Task.CLASSIFY: TaskHead("cls", lambda x: x @ weight.T, 3)}
        self.seen: list[Batch] = []

    def __call__(self, batch: Batch) -> Tensor:
        self.seen.append(batch)
        hidden = self.words[batch.token_ids] + self.places[batch.positions]
        if batch.type_ids is not None:
            hidden = hidden + batch.type_ids[:, None]
        used = torch.arange(len(hidden)) < batch.cu_lengths[-1]
        return batch.select_outputs(hidden.masked_fill(~used[:, None], float("nan")), hidden)[0]


def fake(work: Work) -> tuple[Callable[[], None], list[Tensor]]:
    """A fake capture. A replay runs the work again and writes into the first results."""
    kept = [tensor.clone() for tensor in work()]

    def replay() -> None:
        for old, new in zip(kept, work(), strict=True):
            old.copy_(new)

    return replay, kept


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_runner(method: str = "mean", capture: Any = fake, clock: Any = None) -> tuple[ModelRunner, Graphs]:
    model = Model()
    spec = SimpleNamespace(
        pooling=PoolingSpec((method,), normalize=True),
        config={"num_labels": 3},
        sparse=None,
        late=None,
        multi_vector=None,
        score=None,
    )
    pooler = Pooler(spec, model.heads, [])  # type: ignore[arg-type]
    runner = ModelRunner(model, pooler, CPU, 2)  # type: ignore[arg-type]
    graphs = Graphs(model, pooler, runner.staging, capture, clock or Clock())  # type: ignore[arg-type]
    return runner, graphs


def replayed(runner: ModelRunner, graphs: Graphs, plan: PoolPlan) -> Any:
    key = graphs.key_of(plan)
    assert key is not None
    with graphs.capture_on_first_use():
        results = runner._replay(graphs, key, plan)
    assert results is not None
    return results
