"""Routes for operators: health, readiness, metrics, version."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import msgspec
import orjson

from penstock import __version__
from penstock.api.call import Call, Reply
from penstock.api.metrics import render
from penstock.api.routes import Door, Handler, RouteSpec
from penstock.types import Task


async def live(call: Call) -> Reply:
    """Report that this process is alive, whatever the engine does."""
    return Reply(b'{"status":"alive"}')


async def health(call: Call) -> Reply:
    """Report whether requests can be served; 503 with the reason otherwise."""
    call.state.check_engines()
    return Reply(b'{"status":"healthy"}')


async def ready(call: Call) -> Reply:
    """Report whether the engine can serve; 503 with the reason otherwise."""
    call.state.check_engines()
    return Reply(b'{"status":"ready"}')


async def metrics(call: Call) -> Reply:
    """Show the Prometheus metrics of all processes of this server."""
    call.metrics.publish()
    state = call.state
    engines_up = {name: model.engines_ready for name, model in state.models.items()}
    kinds = {name: kind for name, model in state.models.items() if (kind := tei_kind(model.spec.tasks))}
    text = render(state.in_flight, engines_up, state.config.metric_aliases, kinds)
    return Reply(text, b"text/plain; version=0.0.4; charset=utf-8")


def tei_kind(tasks: Collection[Task]) -> str:
    """What TEI would do with a model of these tasks; empty if TEI would not serve it."""
    if Task.GENERATE in tasks:
        return ""
    if Task.EMBED in tasks:
        return "embed"
    return "predict" if Task.CLASSIFY in tasks or Task.SCORE in tasks else ""


async def version(call: Call) -> Reply:
    """Show the version of this server."""
    return Reply(orjson.dumps({"version": __version__}))


class StatusAnswer(msgspec.Struct, kw_only=True):
    status: Literal["alive", "healthy", "ready"]


class ServerVersion(msgspec.Struct, kw_only=True):
    version: str


_TABLE: tuple[tuple[str, Handler, Any, Door, tuple[str, ...]], ...] = (
    ("/live", live, StatusAnswer, "both", ()),
    ("/health", health, StatusAnswer, "both", ()),
    ("/ready", ready, StatusAnswer, "both", ()),
    ("/metrics", metrics, None, "admin", ("text/plain",)),
    ("/version", version, ServerVersion, "admin", ()),
)
ROUTES = tuple(
    RouteSpec(path, None, handler, "operation", answer, open_to_all=True, on=on, media=media)
    for path, handler, answer, on, media in _TABLE
)
