"""The Prometheus metrics of the supervisor. Imported late: the server starts without it."""

from __future__ import annotations

from prometheus_client import Counter

RESTARTS = Counter(
    "penstock_restarts",
    "Processes that were replaced, by kind (engine, api) and reason (exited, killed, hung)",
    ["process", "reason"],
)


def show_restarts() -> None:
    """Show every combination from the start, so that a rate sees the first restart."""
    for process in ("engine", "api"):
        for reason in ("exited", "killed", "hung"):
            RESTARTS.labels(process, reason)
