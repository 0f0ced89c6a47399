"""A few small steps before the first request, so that it does not pay for lazy set-up."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.kvcache.blocks import BlockPool
from penstock.runner.base import BLOCK_SIZE, Runner
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolingParams, PoolPlan, Request, SampledResult, SamplerParams, Task

if TYPE_CHECKING:
    from penstock.runner.decode import DecodeGraphs, Key
    from penstock.runner.graphs import Graphs

log = logging.getLogger("penstock.warmup")


class Leaves(Protocol):
    """What of a sampler has to be told afterwards."""

    def leave(self, slot: int) -> None: ...


LENGTHS = (1, 64)
# On CUDA kernels are compiled on their first use: each of these lengths takes another of their forms.
KERNEL_LENGTHS = (1, 17, 64, 256)
# Steps that are captured before the first request: lone rows, and short ones that come together. Others
# are captured when they are seen to come again; small ones borrow the next larger of these until then.
SHAPES = (
    *((1, 16), (1, 32), (1, 64), (1, 128), (1, 256), (1, 512)),
    *((16, 32), (32, 32), (64, 32), (4, 64), (8, 64), (16, 64)),
)
CAPTURE_S = 3.0


def warm_up(runner: Runner, max_tokens: int, lengths: tuple[int, ...] = LENGTHS) -> None:
    for length in sorted({min(length, max_tokens) for length in lengths}):
        runner.launch(_plan(1, length, PoolingParams())).result()


def warm_up_memory(runner: Runner, block_size: int) -> None:
    """A piece of a row that was begun before and goes on: what it leaves in memory nobody reads."""
    length, begin, end = 3 * block_size, block_size, 2 * block_size
    request = Request("warm-up", np.ones(length, dtype=np.int32), np.array([length], dtype=np.int32))
    row, first, stop = (np.array([number], dtype=np.int32) for number in (0, begin, end))
    share = ScheduledRows(request, row, first, stop, ([0, 1, 2],))
    runner.launch(build_plan([share], block_size)).result()


def capture_graphs(
    runner: Runner,
    graphs: Graphs,
    task: Task,
    longest: int,
    max_tokens: int,
    *,
    skips: bool = False,
    seconds: float = CAPTURE_S,
) -> None:
    """Those of the model's first task, as many as can be had in so many seconds. `skips`: its texts begin
    with what the pooling leaves out; such graphs serve others too."""
    began = time.perf_counter()
    shapes = [(rows, length) for rows, length in SHAPES if length <= longest and rows * length <= max_tokens]
    with graphs.capture_on_first_use():
        for done, (rows, length) in enumerate(shapes):
            if time.perf_counter() - began > seconds:
                break
            runner.launch(_plan(rows, length, PoolingParams(task), skips)).result()
            _show(done + 1, len(shapes))
    took = time.perf_counter() - began
    log.info("captured %d of %d graphs in %.1f s", len(graphs.captured), len(shapes), took)


def capture_decoding(graphs: DecodeGraphs, keys: Sequence[Key], seconds: float = CAPTURE_S) -> None:
    """Steps that continue rows, as many as can be had in so many seconds."""
    began = time.perf_counter()
    for done, key in enumerate(keys):
        if time.perf_counter() - began > seconds:
            break
        graphs.ensure(key)
        _show(done + 1, len(keys))
    took = time.perf_counter() - began
    log.info("captured %d of %d graphs that continue rows in %.1f s", len(graphs.captured), len(keys), took)


def _show(done: int, total: int) -> None:
    """A bar, where somebody is looking."""
    if sys.stderr.isatty():
        bar = "█" * (20 * done // total)
        end = "\n" if done == total else ""
        print(f"\rcapturing graphs {bar:<20} {done}/{total}", end=end, file=sys.stderr, flush=True)  # noqa: T201


def _plan(rows: int, length: int, params: PoolingParams, skips: bool = False) -> PoolPlan:
    tokens = np.ones(rows * length, dtype=np.int32)
    skip = np.zeros(rows, dtype=np.int32) if skips else None
    request = Request("warm-up", tokens, np.full(rows, length, dtype=np.int32), params, skip=skip)
    return build_plan([ScheduledRows(request, np.arange(rows, dtype=np.int32))])


def warm_up_generation(runner: Runner, sampler: Leaves, num_blocks: int, max_tokens: int) -> None:
    """A prompt and a few tokens after it, on blocks and a slot that are free again afterwards."""
    length = min(17, max_tokens)
    generation = GenerationScheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        GenerationLimits(1, max_tokens, max_tokens, length + 3, length, prefix_caching=False),
    )
    tokens = np.ones(length, dtype=np.int32)
    sampling = SamplerParams(max_tokens=3, temperature=0)
    lengths = np.array([length], dtype=np.int32)
    generation.add(Request("warm-up", tokens, lengths, PoolingParams(Task.GENERATE), sampling=sampling))
    while (plan := generation.schedule(0.0)) is not None:
        result = runner.launch(plan).result()
        assert isinstance(result, SampledResult)
        generation.collect(plan, result)
    for slot in generation.take_freed_slots():
        sampler.leave(slot)
