from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.runner.null import NullRunner
from penstock.runner.staging import Staging
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import OutputDtype, PoolingParams, PoolPlan, Task
from tests.helpers import ints, make_request


def plan_of(*params: PoolingParams) -> PoolPlan:
    return build_plan(
        [
            ScheduledRows(make_request(str(i), [3, 1, 2], params=p), ints([0, 1, 2]))
            for i, p in enumerate(params)
        ]
    )


@pytest.mark.parametrize("dtype", OutputDtype)
@pytest.mark.parametrize("dimensions", [None, 24, 5])
def test_the_null_runner_answers_at_once_with_the_promised_shape(
    dtype: OutputDtype, dimensions: int | None
) -> None:
    params = PoolingParams(dimensions=dimensions, dtype=dtype)
    future = NullRunner({Task.EMBED: 32}).launch(plan_of(params))
    assert future.done()
    (values,) = future.result().outputs
    width = dimensions or 32
    assert values.shape == (3, -(-width // 8) if dtype.is_packed else width)
    assert values.dtype == dtype.numpy


def test_the_null_runner_gives_unit_vectors() -> None:
    (values,) = NullRunner({Task.EMBED: 32}).launch(plan_of(PoolingParams())).result().outputs
    np.testing.assert_allclose(np.linalg.norm(values, axis=1), 1, rtol=1e-5)


def test_the_null_runner_answers_every_variant() -> None:
    plan = plan_of(PoolingParams(), PoolingParams(dimensions=4), PoolingParams())
    shapes = [values.shape for values in NullRunner({Task.EMBED: 32}).launch(plan).result().outputs]
    assert shapes == [(6, 32), (3, 4)]


def test_the_null_runner_gives_sparse_terms_in_both_forms() -> None:
    listed, lexical = PoolingParams(Task.SPARSE, top_k=4), PoolingParams(Task.SPARSE, lexical=True)
    runner = NullRunner({Task.SPARSE: 1})
    shapes = [values.shape for values in runner.launch(plan_of(listed, lexical)).result().outputs]
    assert shapes == [(3, 4, 2), (6, 1)]


def test_integers_reach_a_cpu_in_order_and_without_a_copy() -> None:
    staging = Staging(torch.device("cpu"), depth=1)
    first, second = ints([1, 2, 3]), ints([4])
    sent = staging.send([first, second])
    first[0] = 9
    assert [tensor.tolist() for tensor in sent] == [[9, 2, 3], [4]]


def test_results_fetched_on_a_cpu_keep_their_shape_and_type() -> None:
    staging = Staging(torch.device("cpu"), depth=1)
    wide = torch.arange(12.0).view(3, 4)
    cut, bits = staging.fetch([wide[:, :2], wide.bfloat16().view(torch.uint16)])
    assert cut.tolist() == [[0, 1], [4, 5], [8, 9]]
    assert bits.dtype == np.uint16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_integers_and_results_cross_to_a_gpu_and_back() -> None:
    staging = Staging(torch.device("cuda"), depth=1)
    for round_ in range(5):
        short, long = staging.send([ints(range(round_, round_ + 7)), ints([round_] * 5000)])
        outputs = staging.fetch([short.float(), long.view(50, 100)])
        torch.cuda.synchronize()
        assert outputs[0].tolist() == list(range(round_, round_ + 7))
        assert outputs[1].shape == (50, 100) and (outputs[1] == round_).all()
