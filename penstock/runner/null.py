"""A runner that computes nothing: the right shapes at once, for tests and for timing all the rest."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np

from penstock.types import (
    Array,
    Comparison,
    OutputDtype,
    SamplePlan,
    StepPlan,
    StepResult,
    Task,
    Variant,
)


class NullRunner:
    def __init__(self, widths: Mapping[Task, int]) -> None:
        self.widths = widths

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        if plan.sample is not None:
            future.set_result(StepResult(_sampled(plan.sample), 0.0))
            return future
        future.set_result(StepResult(tuple(self._fill(plan, variant) for variant in plan.variants), 0.0))
        return future

    def compare(self, comparison: Comparison) -> Future[Array]:
        future: Future[Array] = Future()
        future.set_result(np.ones((len(comparison.pairs), 1), dtype=np.float32))
        return future

    def close(self) -> None:
        return None

    def _fill(self, plan: StepPlan, variant: Variant) -> Array:
        if variant.pairs is not None:
            return np.ones((len(variant.pairs.pair_queries), 1), dtype=np.float32)
        rows = plan.num_rows if variant.rows is None else len(variant.rows)
        if variant.params.per_token:
            rows = plan.num_tokens if variant.tokens is None else len(variant.tokens)
        if variant.params.task is Task.SPARSE and not variant.params.per_token:
            terms = np.arange(variant.params.top_k or 1, dtype=np.float32)
            return np.tile(np.stack([terms, np.ones_like(terms)], axis=-1), (rows, 1, 1))
        width = variant.params.dimensions or self.widths[variant.params.task]
        dtype = variant.params.dtype
        if dtype.is_packed:
            return np.zeros((rows, -(-width // 8)), dtype=dtype.numpy)
        value = 1 / np.sqrt(width) if dtype in (OutputDtype.FLOAT32, OutputDtype.FLOAT16) else 1
        return np.full((rows, width), value, dtype=dtype.numpy)


def _sampled(sample: SamplePlan) -> tuple[Array, ...]:
    """Token 1 for every row, as sure as can be."""
    ids: Array = np.ones(len(sample.rows), dtype=np.int32)
    asked = sample.asked[sample.asked >= 0]
    if not len(asked):
        return (ids,)
    shape = (len(asked), 1 + int(asked.max()))
    ranks = np.ones(len(asked), dtype=np.int32)
    return ids, np.ones(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32), ranks
