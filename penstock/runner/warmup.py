"""One small step before the first request, so that it does not pay for lazy set-up."""

from __future__ import annotations

import numpy as np

from penstock.core import Request
from penstock.runner.base import Runner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import Share


def warm_up(runner: Runner, max_tokens: int) -> None:
    for length in {1, min(64, max_tokens)}:
        tokens = np.ones(length, dtype=np.int32)
        request = Request("warm-up", tokens, np.array([length], dtype=np.int32))
        runner.launch(build_plan([Share(request, np.zeros(1, dtype=np.int32))])).result()
