"""A pytest plugin for tests that share one device: each worker sees its share of the free memory.

An engine gives most of the free memory to its KV cache, so the first one would leave nothing to others.
"""

from __future__ import annotations

import os

import pytest
import torch

KEPT_FREE = 0.5  # for weights and activations, which no engine counts ahead


def pytest_configure(config: pytest.Config) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1 or not hasattr(config, "workerinput"):
        return
    of_device = torch.cuda.mem_get_info

    def of_worker(device: torch.device | int | None = None) -> tuple[int, int]:
        free, total = of_device(device)
        return min(free, int(total * KEPT_FREE / workers)), total

    torch.cuda.mem_get_info = of_worker
