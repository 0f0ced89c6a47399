"""Host time that Python code spends on the rows of a step, and its growth with the number of rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from penstock.engine.progress import split_outputs
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolingParams, PoolPlan, Request, Task, split_rows

ROWS = (1, 64, 1024)
TOKENS, WIDTH = 32, 128  # tokens per row, and components per token vector


@dataclass(frozen=True, slots=True, eq=False)
class HostCase:
    kernel: str
    rows: int
    run: Callable[[], object]


class HostMeasured(msgspec.Struct, frozen=True):
    kernel: str
    rows: int
    host_us: float
    growth: float  # host time relative to that of one row


def pooling_all() -> Iterator[HostCase]:
    """Split token vectors into rows, with one slice per row; the lengths are on the host."""
    for rows in ROWS:
        lengths = np.full(rows, TOKENS, dtype=np.int32)
        values = np.zeros((rows * TOKENS, WIDTH), dtype=np.float32)
        yield HostCase("pooling all", rows, partial(split_rows, values, lengths))


def step_all() -> Iterator[HostCase]:
    """Split a step's token vectors between requests with one row each, as the engine does before pooling
    method `all`."""
    for rows in ROWS:
        values = np.zeros((rows * TOKENS, WIDTH), dtype=np.float32)
        yield HostCase("step all", rows, partial(split_outputs, _plan(rows), [values]))


def _plan(rows: int) -> PoolPlan:
    params, lengths = PoolingParams(Task.TOKEN_EMBED), np.full(1, TOKENS, dtype=np.int32)
    tokens = np.ones(TOKENS, dtype=np.int32)
    requests = [Request(str(i), tokens, lengths, params) for i in range(rows)]
    return build_plan([ScheduledRows(request, np.zeros(1, dtype=np.int32)) for request in requests])


HOST: dict[str, Callable[[], Iterator[HostCase]]] = {"pooling_all": pooling_all, "step_all": step_all}


def measure_host(cases: Iterator[HostCase], min_time_s: float) -> list[HostMeasured]:
    found: list[HostMeasured] = []
    for case in cases:
        host_us = host_clock(case.run, min_time_s) * 1e6
        first = found[0].host_us if found else host_us
        found.append(HostMeasured(case.kernel, case.rows, host_us, host_us / first))
    return found


def host_clock(run: Callable[[], object], min_time_s: float) -> float:
    """Seconds of one call: the 10th percentile, because other processes can only add time."""
    times: list[int] = []
    until = time.perf_counter() + min_time_s
    while len(times) < 20 or time.perf_counter() < until:
        began = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - began)
    return sorted(times)[len(times) // 10] / 1e9
