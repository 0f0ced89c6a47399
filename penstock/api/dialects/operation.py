"""Routes for operators and browsers: health, readiness, metrics, version, schema, pages."""

from __future__ import annotations

from importlib import resources
from typing import Literal

import msgspec
import orjson

from penstock import __version__
from penstock.api.endpoint import Call, Reply
from penstock.api.metrics import render
from penstock.api.routes import RouteSpec
from penstock.errors import NotFound, shown

HTML = b"text/html; charset=utf-8"
JAVASCRIPT = b"text/javascript; charset=utf-8"


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
    text = render(call.state.in_flight, call.state.ready)
    return Reply(text, b"text/plain; version=0.0.4; charset=utf-8")


async def version(call: Call) -> Reply:
    """Show the version of this server."""
    return Reply(orjson.dumps({"version": __version__}))


def page(name: str) -> bytes:
    return (resources.files("penstock.api") / "pages" / name).read_bytes()


async def playground(call: Call) -> Reply:
    """Show a page to try the server from."""
    return Reply(page("playground.html"), HTML)


async def docs(call: Call) -> Reply:
    """Show the API reference."""
    return Reply(page("docs.html"), HTML)


_FOREVER = (b"cache-control", b"public, max-age=31536000, immutable")  # the name has the version
_GZIP = (b"content-encoding", b"gzip")  # all browsers take it
_DOCS_FILES: dict[str, list[tuple[bytes, bytes]]] = {
    "docs.js": [(b"cache-control", b"no-cache")],
    "scalar-1.72.1.js": [_FOREVER, _GZIP],
}


async def docs_file(call: Call) -> Reply:
    """Show a file of the API reference's page."""
    name = call.path_value.rpartition("/")[2]
    if (headers := _DOCS_FILES.get(name)) is None:
        raise NotFound(f"/docs has no file {shown(name)}")
    stored = f"reference/{name}.gz" if _GZIP in headers else f"reference/{name}"
    return Reply(page(stored), JAVASCRIPT, headers=list(headers))


class StatusAnswer(msgspec.Struct, kw_only=True):
    status: Literal["alive", "healthy", "ready"]


class VersionAnswer(msgspec.Struct, kw_only=True):
    version: str


ROUTES = tuple(
    RouteSpec(path, None, handler, "operation", answer, open_to_all=True, media=media)
    for path, handler, answer, media in (
        ("/live", live, StatusAnswer, ()),
        ("/health", health, StatusAnswer, ()),
        ("/ready", ready, StatusAnswer, ()),
        ("/metrics", metrics, None, ("text/plain",)),
        ("/version", version, VersionAnswer, ()),
        ("/docs", docs, None, ("text/html",)),
        ("/", playground, None, ("text/html",)),
    )
)
ROUTES += (RouteSpec("/docs/{file}", None, docs_file, "operation", open_to_all=True, is_listed=False),)
