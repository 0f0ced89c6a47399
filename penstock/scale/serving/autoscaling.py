"""Autoscaling of a model's replicas: enough to keep each near a target number of tokens in flight.

Ray Serve copies this module by value into its controller, so it must not import other modules of Penstock.
"""

from __future__ import annotations

import math
from typing import Any

METRIC = "queued_tokens"  # recorded by replicas


class QueuedTokensPolicy:
    """A Ray Serve policy. Serve applies the deployment's bounds and delays to its result."""

    def __init__(self, target_queued_tokens: int) -> None:
        self._target = target_queued_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        by_replica = (context.aggregated_metrics or {}).get(METRIC) or {}
        queued = sum(by_replica.values())
        wanted = wanted_replicas(queued, self._target, context.target_num_replicas, len(by_replica))
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(high, wanted)), {}


def wanted_replicas(queued_tokens: float, target: int, current: int, num_reporting: int) -> int:
    """Compute the number of replicas. It stays the same while no replica has reported."""
    if not num_reporting:
        return current
    return max(1, math.ceil(queued_tokens / target))
