"""The description of a load run, as plain values that are sent to the load processes."""

from __future__ import annotations

from typing import Literal

import msgspec

Reader = Literal["body", "header", "stream"]


class Address(msgspec.Struct, frozen=True):
    """The target of requests. `host` is resolved once, before the measurement."""

    host: str
    port: int
    tls: bool = False
    server_name: str = ""  # for TLS and the Host header


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are spread over time."""

    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    duration_s: float | None = None
    ramp_up: Literal["linear", "exponential"] | None = None
    ramp_start: float = 0.0
    ramp_end: float = 0.0
    keepalive: bool = True
    timeout_s: float = 600.0
    seed: int = 0

    @property
    def is_scheduled(self) -> bool:
        """Whether each request has a scheduled time, instead of being sent after an earlier one is
        answered."""
        return self.request_rate != float("inf") or self.ramp_up is not None


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one load process. File descriptors are inherited with the same numbers."""

    number: int
    processes: int
    address: Address
    store_fd: int  # the requests' bytes, see `store`
    tickets_fd: int | None  # None: run for `duration_s`; each process then numbers its requests itself
    slots: int | None  # maximum number of requests in flight from this process; None: no limit
    duration_s: float | None
    keepalive: bool
    timeout_s: float
    reader: Reader


class Go(msgspec.Struct, frozen=True, tag="go"):
    """The time, on the machine's monotonic clock, at which all processes start."""

    at_s: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Send no more requests, abandon those in flight, and report."""


Command = Go | Stop
