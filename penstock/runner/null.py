"""A runner that computes nothing and answers at once, for tests and for timing everything else."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np

from penstock.runner.base import MakeRoom
from penstock.types import (
    Array,
    Comparison,
    OutputDtype,
    PooledResult,
    PoolPlan,
    SampledResult,
    SamplePlan,
    StepPlan,
    StepResult,
    Task,
    TokenLogprobs,
    Variant,
)


class NullSleeper:
    """Nothing is held, so nothing is freed."""

    default_level = 2
    num_bytes = 0

    def sleep(self, level: int) -> int:
        return 0

    def wake(self, make_room: MakeRoom) -> None:
        return None


class NullRunner:
    def __init__(self, widths: Mapping[Task, int]) -> None:
        self.widths = widths

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        if isinstance(plan, PoolPlan):
            outputs = tuple(self._values(plan, variant) for variant in plan.variants)
            future.set_result(PooledResult(outputs))
        else:
            future.set_result(_sampled(plan.sample))
        return future

    def compare(self, comparison: Comparison) -> Future[Array]:
        future: Future[Array] = Future()
        future.set_result(np.ones((len(comparison.pairs), 1), dtype=np.float32))
        return future

    def close(self) -> None:
        return None

    def _values(self, plan: PoolPlan, variant: Variant) -> Array:
        if variant.pairs is not None:
            return np.ones((len(variant.pairs.pair_queries), 1), dtype=np.float32)
        rows = plan.num_rows if variant.rows is None else len(variant.rows)
        if variant.params.per_token:
            rows = plan.num_tokens if variant.tokens is None else len(variant.tokens)
        if variant.params.task is Task.SPARSE and not variant.params.per_token:
            terms = np.arange(variant.params.top_k or 1, dtype=np.float32)
            return np.tile(np.stack([terms, np.ones_like(terms)], axis=-1), (rows, 1, 1))
        width = variant.params.dimensions or self.widths[variant.params.task]
        width *= max(1, variant.params.num_labels)
        dtype = variant.params.dtype
        if dtype.is_packed:
            return np.zeros((rows, -(-width // 8)), dtype=dtype.numpy)
        value = 1 / np.sqrt(width) if dtype in (OutputDtype.FLOAT32, OutputDtype.FLOAT16) else 1
        return np.full((rows, width), value, dtype=dtype.numpy)


def _sampled(sample: SamplePlan) -> SampledResult:
    """Token 1 for every row, with probability 1."""
    ids = np.ones(len(sample.sampled_rows), dtype=np.int32)
    asked = sample.num_logprobs[sample.num_logprobs >= 0]
    if not len(asked):
        return SampledResult(ids)
    shape = (len(asked), 1 + int(asked.max()))
    ranks = np.ones(len(asked), dtype=np.int32)
    values = np.zeros(shape, dtype=np.float32)
    return SampledResult(ids, TokenLogprobs(np.ones(shape, dtype=np.int32), values, ranks))
