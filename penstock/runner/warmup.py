"""A few small steps before the first request, so that it does not pay for lazy set-up."""

from __future__ import annotations

import numpy as np

from penstock.core import Request
from penstock.runner.base import Runner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import Share

LENGTHS = (1, 64)
# On CUDA kernels are compiled on their first use: each of these lengths takes another of their forms.
KERNEL_LENGTHS = (1, 17, 64, 256)


def warm_up(runner: Runner, max_tokens: int, lengths: tuple[int, ...] = LENGTHS) -> None:
    for length in sorted({min(length, max_tokens) for length in lengths}):
        tokens = np.ones(length, dtype=np.int32)
        request = Request("warm-up", tokens, np.array([length], dtype=np.int32))
        runner.launch(build_plan([Share(request, np.zeros(1, dtype=np.int32))])).result()
