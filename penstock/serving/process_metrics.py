"""The Prometheus metrics of the supervisor. Imported late: the server starts without it."""

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
    """Show every combination from the start, so that a rate sees the first restart. `engines` has the model
    and the number of each."""
    for reason in ("exited", "killed", "hung"):
        RESTARTS.labels("api", reason, "", "")
        for model, number in engines:
            RESTARTS.labels("engine", reason, model, str(number))
