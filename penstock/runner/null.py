"""A runner that computes nothing, for tests and for timing all other code. Steps may take a given time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from penstock.checkpoint.adapters import read_lora
from penstock.errors import PenstockError
from penstock.runner.base import AdapterInfo, AdapterStats, MakeRoom, check_adapters
from penstock.types import (
    Array,
    Comparison,
    Ints,
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
    """Sleep and wake of a runner that holds no memory."""

    default_level = 2
    num_bytes = 0

    def sleep(self, level: int) -> int:
        return 0

    def wake(self, make_room: MakeRoom) -> None:
        return None


class NullAdapters:
    """Adapters that are checked and counted, but change nothing."""

    def __init__(self, num_own: int, max_adapters: int) -> None:
        self.max_adapters = max_adapters
        self.in_use: Callable[[], Collection[int]] = tuple
        self._known = set(range(num_own))

    def load(self, adapter_id: int, folder: str, name: str) -> Future[AdapterInfo]:
        future: Future[AdapterInfo] = Future()
        try:
            spec = read_lora(Path(folder), name)
        except PenstockError as error:
            future.set_exception(error)
            return future
        self._known.add(adapter_id)
        future.set_result(AdapterInfo(spec.rank, spec.kinds, 0))
        return future

    def unload(self, adapter_id: int) -> None:
        self._known.discard(adapter_id)

    def check(self, adapter_ids: Ints) -> None:
        check_adapters(adapter_ids, self._known, self.max_adapters)

    def prefetch(self, adapter_ids: Ints) -> list[Future[Any]]:
        return []

    def stats(self) -> AdapterStats:
        return AdapterStats(len(self._known), 0, 0, 0, 0)


class NullRunner:
    def __init__(self, widths: Mapping[Task, int], step_s: float = 0.0) -> None:
        """Each step takes `step_s` seconds, one after another as on a device."""
        self.widths = widths
        self._step_s = step_s
        self._device = ThreadPoolExecutor(1, thread_name_prefix="null-device") if step_s else None
        self._free_at_s = 0.0  # when the last step ends

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        if self._device is not None:
            return self._device.submit(self._step, plan, time.monotonic())
        future: Future[StepResult] = Future()
        future.set_result(self._result(plan))
        return future

    def _step(self, plan: StepPlan, launched_s: float) -> StepResult:
        self._free_at_s = max(launched_s, self._free_at_s) + self._step_s
        result = self._result(plan)
        time.sleep(max(0.0, self._free_at_s - time.monotonic()))
        return result

    def _result(self, plan: StepPlan) -> StepResult:
        if isinstance(plan, PoolPlan):
            return PooledResult(tuple(self._values(plan, variant) for variant in plan.variants))
        return _sampled(plan.sample)

    def compare(self, comparison: Comparison) -> Future[Array]:
        future: Future[Array] = Future()
        future.set_result(np.ones((len(comparison.pairs), 1), dtype=np.float32))
        return future

    def close(self) -> None:
        if self._device is not None:
            self._device.shutdown()

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
