"""The scheduled time of each request: Poisson or gamma arrivals at a constant or rising rate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.bench.load.plan import Traffic
from penstock.errors import BadValue


def check(traffic: Traffic) -> None:
    if not traffic.request_rate > 0:
        raise BadValue(f"--request-rate is {traffic.request_rate}; it must be above 0, or inf")
    if not traffic.burstiness > 0:
        raise BadValue(f"--burstiness is {traffic.burstiness}; it must be above 0")
    if traffic.max_concurrency is not None and traffic.max_concurrency < 1:
        raise BadValue(f"--max-concurrency is {traffic.max_concurrency}; it must be at least 1")
    if traffic.duration_s is not None and not traffic.duration_s > 0:
        raise BadValue(f"--duration is {traffic.duration_s}; it must be above 0 seconds")
    if traffic.ramp_up is None:
        return
    if traffic.request_rate != float("inf"):
        raise BadValue("--ramp-up-strategy sets the rate itself; leave out --request-rate")
    if not 0 < traffic.ramp_start <= traffic.ramp_end:
        raise BadValue(
            f"--ramp-up-start-rps {traffic.ramp_start:g} and --ramp-up-end-rps {traffic.ramp_end:g}: "
            "both are needed, above 0, and the start must not exceed the end"
        )


def count_for(traffic: Traffic, requests: int) -> int:
    """Number of requests in a scheduled run: one for each prompt, or as many as fit into the duration."""
    if traffic.duration_s is None:
        return requests
    mean_gap_s = float(np.mean(1 / _rates(traffic, 1000)))
    return max(1, round(traffic.duration_s / mean_gap_s))


def arrivals(traffic: Traffic, count: int) -> NDArray[np.float64]:
    """Seconds after the start, one for each request, ascending.

    At a constant rate the times are scaled so that the last request is due after count / rate seconds:
    randomness then moves requests within a run, but does not change the load of the run.
    """
    rates = _rates(traffic, count)
    if traffic.burstiness == float("inf"):
        gaps = 1 / rates
    else:
        rng = np.random.default_rng(traffic.seed)
        gaps = rng.gamma(shape=traffic.burstiness, scale=1 / (rates * traffic.burstiness))
    due = np.cumsum(gaps)
    if traffic.ramp_up is None and due[-1] > 0:
        due *= count / traffic.request_rate / due[-1]
    return due


def _rates(traffic: Traffic, count: int) -> NDArray[np.float64]:
    """The rate at each request, which may rise over the run."""
    if traffic.ramp_up is None:
        return np.full(count, traffic.request_rate)
    progress = np.arange(count) / max(count - 1, 1)
    if traffic.ramp_up == "linear":
        return traffic.ramp_start + (traffic.ramp_end - traffic.ramp_start) * progress
    return np.asarray(traffic.ramp_start * (traffic.ramp_end / traffic.ramp_start) ** progress, np.float64)
