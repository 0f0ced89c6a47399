"""A few small steps before the first request, so that it does not pay for lazy set-up."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from penstock.core import PoolingParams, Request, SamplingParams, Task
from penstock.kvcache.blocks import BlockPool
from penstock.runner.base import BLOCK_SIZE, Runner
from penstock.scheduler.lane import Lane, LaneLimits
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import Share


class Leaves(Protocol):
    """What of a sampler has to be told afterwards."""

    def leave(self, slot: int) -> None: ...


LENGTHS = (1, 64)
# On CUDA kernels are compiled on their first use: each of these lengths takes another of their forms.
KERNEL_LENGTHS = (1, 17, 64, 256)


def warm_up(runner: Runner, max_tokens: int, lengths: tuple[int, ...] = LENGTHS) -> None:
    for length in sorted({min(length, max_tokens) for length in lengths}):
        tokens = np.ones(length, dtype=np.int32)
        request = Request("warm-up", tokens, np.array([length], dtype=np.int32))
        runner.launch(build_plan([Share(request, np.zeros(1, dtype=np.int32))])).result()


def warm_up_generation(runner: Runner, sampler: Leaves, num_blocks: int, max_tokens: int) -> None:
    """A prompt and a few tokens after it, on blocks and a slot that are free again afterwards."""
    length = min(17, max_tokens)
    lane = Lane(
        BlockPool(num_blocks, BLOCK_SIZE),
        LaneLimits(1, max_tokens, max_tokens, length + 3, length, prefixes=False),
    )
    tokens = np.ones(length, dtype=np.int32)
    sampling = SamplingParams(max_tokens=3, temperature=0)
    lengths = np.array([length], dtype=np.int32)
    lane.add(Request("warm-up", tokens, lengths, PoolingParams(Task.GENERATE), sampling=sampling))
    while (plan := lane.schedule(0.0)) is not None:
        lane.collect(plan, runner.launch(plan).result())
    for slot in lane.left_slots():
        sampler.leave(slot)
