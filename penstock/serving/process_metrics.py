"""The Prometheus metrics of the supervisor. Imported late, so that it does not delay the server's start."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter

RESTARTS = Counter(
    "penstock_restarts",
    "Processes that were replaced, by kind (engine, api) and reason (exited, killed, hung); engines also by "
    "their model and number",
    ["process", "reason", "model", "engine"],
)


def show_restarts(engines: Iterable[tuple[str, int]]) -> None:
    """Export every label combination from the start, so that `rate()` counts the first restart. `engines` has
    the model and number of each engine."""
    for reason in ("exited", "killed", "hung"):
        RESTARTS.labels("api", reason, "", "")
        for model, number in engines:
            RESTARTS.labels("engine", reason, model, str(number))
