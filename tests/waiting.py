"""Waiting for a condition. The time limit only ends tests that have gone wrong."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 100.0  # far above what a busy machine needs, and below the limit for a whole test


def wait_until(condition: Callable[[], object], explain: Callable[[], str] = lambda: "") -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"the condition did not become true\n{explain()}"
        time.sleep(0.02)
