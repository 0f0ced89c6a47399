"""Observability of a request: its trace, and its line in the access log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import Scope

from penstock.api.access_log import AccessLog
from penstock.api.tracing import Tracer, tracer_for
from penstock.config import ServerConfig

if TYPE_CHECKING:
    from penstock.api.call import Call
    from penstock.api.routes import RouteSpec


class RequestObserver:
    """Begins and ends the trace and the access-log line of a request."""

    def __init__(self, tracer: Tracer | None, access_log: AccessLog | None, *, shows_bodies: bool) -> None:
        self.tracer = tracer
        self.access_log = access_log
        self.shows_bodies = shows_bodies

    def begin(self, call: Call, scope: Scope, route: RouteSpec) -> None:
        if self.access_log is not None:
            self.access_log.begin(scope)
        if self.tracer is not None and route.counts_as_request:
            call.trace = self.tracer.begin(scope, route.path, call.began_s)

    def end(self, call: Call, scope: Scope) -> None:
        if call.trace is not None:
            call.trace.end(call)
        if self.access_log is not None:
            self.access_log.end(call, scope)

    def close(self) -> None:
        if self.tracer is not None:
            self.tracer.close()


def observer_for(config: ServerConfig) -> RequestObserver | None:
    """The observer for the configured traces and access log; None: both are off."""
    tracer = tracer_for(config)
    access_log = AccessLog() if config.logs_requests else None
    if tracer is None and access_log is None:
        return None
    return RequestObserver(tracer, access_log, shows_bodies=config.log_inputs)
