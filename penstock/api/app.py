"""The ASGI application: every route of every dialect in one table. Never imports torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.batch_service import BatchService
from penstock.api.call import Call, Reply
from penstock.api.dialects import (
    admin,
    cohere,
    hugging_face,
    infinity,
    jina,
    native,
    ollama,
    openai,
    operation,
    pages,
    tei,
    vllm,
    voyage,
)
from penstock.api.endpoint import Endpoint
from penstock.api.invocations import INVOCATIONS, InvocationEndpoint
from penstock.api.metrics import ApiMetrics
from penstock.api.routes import RouteSpec, VariantTable
from penstock.api.schema import openapi
from penstock.api.state import ServerState
from penstock.api.watched_files import watch_files
from penstock.errors import NotFound

DIALECTS: tuple[ModuleType, ...] = (
    openai,
    vllm,
    native,
    cohere,
    tei,
    hugging_face,
    jina,
    voyage,
    infinity,
    ollama,
    operation,
    admin,
    pages,
)


def with_variants(routes: Iterable[RouteSpec], variants: VariantTable) -> tuple[RouteSpec, ...]:
    """The routes, with the variants that dialects add to the paths of others."""
    table = {route.path: route for route in routes if route.body is not None}
    for path, variant in variants:
        if path not in table:
            raise ValueError(f"{variant.body.__name__} is a variant of {path}, which no dialect has")
        own = set(table[path].body.__struct_fields__)  # type: ignore[union-attr]
        if clash := own.intersection(variant.markers):
            raise ValueError(f"{path} has the fields {clash}, which cannot mark {variant.body.__name__}")
        table[path] = replace(table[path], variants=(*table[path].variants, variant))
    return tuple(route if route.body is None else table[route.path] for route in routes)


ROUTES = with_variants(
    [*(route for dialect in DIALECTS for route in dialect.ROUTES), INVOCATIONS],
    tuple(variant for dialect in DIALECTS for variant in getattr(dialect, "VARIANTS", ())),
)
_MOVED = "this route is on the port of --admin-port"
ALL_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
EXPOSED_HEADERS = (
    "x-request-id",
    "x-ignored-fields",
    "x-truncated-rows",
    "x-cache-hits",
    "x-tokenize-ms",
    "x-queue-ms",
    "x-device-ms",
    "x-total-ms",
    "metadata",
    "retry-after",
)


class PathEndpoint:
    """The routes of one path, which differ by method."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._first = endpoints[0]
        self._by_method = {method: each for each in endpoints for method in each.methods}
        for each in endpoints:
            each.allowed = tuple(self._by_method)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._by_method.get(scope["method"], self._first)(scope, receive, send)


class App(Starlette):
    """Looks up the endpoint of a path. Other requests fall through to Starlette and its default endpoint."""

    def __init__(self, endpoints: Sequence[Endpoint], **options: Any) -> None:
        super().__init__(**options)
        by_path: dict[str, list[Endpoint]] = {}
        for endpoint in endpoints:
            by_path.setdefault(endpoint.path, []).append(endpoint)
        self._paths: dict[str, ASGIApp] = {}
        self._prefixes: list[tuple[str, str, ASGIApp]] = []  # (prefix, suffix, app), longest suffix first
        for path, same in by_path.items():
            found = same[0] if len(same) == 1 else PathEndpoint(same)
            if (prefix := same[0].prefix) is None:
                self._paths[path] = found
            else:
                self._prefixes.append((prefix, same[0].suffix, found))
        self._prefixes.sort(key=lambda each: -len(each[1]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http":
            endpoint = self._paths.get(scope["path"]) or self._find(scope["path"])
        await (super().__call__ if endpoint is None else endpoint)(scope, receive, send)

    def _find(self, path: str) -> ASGIApp | None:
        """The endpoint of a path with trailing slashes, or with a parameter."""
        if path.endswith("/") and (endpoint := self._paths.get(path.rstrip("/"))) is not None:
            return endpoint
        path = path.rstrip("/")
        for prefix, suffix, endpoint in self._prefixes:
            if path.startswith(prefix) and path.endswith(suffix) and len(path) > len(prefix) + len(suffix):
                return endpoint
        return None


def under(root: str, app: ASGIApp) -> ASGIApp:
    """Wrap an application so that it also answers below the path `root`."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path == root or path.startswith(root + "/"):
            scope = {**scope, "path": path[len(root) :] or "/"}
        await app(scope, receive, send)

    return serve


def build_app(state: ServerState, metrics: ApiMetrics | None = None) -> ASGIApp:
    """The application of the public port: all routes, except those that are only on an admin port."""
    metrics = metrics or ApiMetrics()
    plain = [route for route in (*public_routes(state), _schema_route(state)) if route is not INVOCATIONS]
    endpoints = [Endpoint(state, metrics, route) for route in plain]
    invoked = InvocationEndpoint(state, metrics, INVOCATIONS, endpoints)
    moved = dict.fromkeys(route.path for route in ROUTES if route.path not in {each.path for each in plain})
    elsewhere = [_refusal(state, metrics, path, _MOVED) for path in moved if path != INVOCATIONS.path]
    if state.config.batch_folder is not None:
        state.batches = BatchService(state, metrics, openai.batch_endpoints(endpoints))
    app = App([*endpoints, *elsewhere, invoked], lifespan=partial(_lifespan, state))
    return _served(state, app, _refusal(state, metrics, "other", "no such route; /docs lists all routes"))


def build_admin_app(state: ServerState, metrics: ApiMetrics) -> ASGIApp:
    """The application of the admin port. Only the public one, in the same process, has a lifespan."""
    routes = [route for route in ROUTES if route.is_for_operators]
    app = App([Endpoint(state, metrics, route) for route in routes])
    paths = ", ".join(dict.fromkeys(route.path for route in routes))
    other = _refusal(state, metrics, "other", f"no such route; the admin port has {paths}")
    return _served(state, app, other)


def public_routes(state: ServerState) -> tuple[RouteSpec, ...]:
    if state.config.admin_port is None:
        return ROUTES
    return tuple(route for route in ROUTES if route.is_public)


def _served(state: ServerState, app: App, other: Endpoint) -> ASGIApp:
    """Add the root path and CORS to an application. `other` answers paths without a route."""
    app.router.default = _default(other)
    app.router.redirect_slashes = False
    served: ASGIApp = under(state.config.root_path, app) if state.config.root_path else app
    if not state.config.allowed_origins:
        return served
    return CORSMiddleware(
        served,
        allow_origins=state.config.allowed_origins,
        allow_methods=("*",),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
    )


def _schema_route(state: ServerState) -> RouteSpec:
    """The route of the OpenAPI schema, which is built on first use."""

    @cache
    def schema() -> bytes:
        config, names = state.config, state.names
        document = openapi(
            (*public_routes(state), route),
            strict_fields=config.strict_fields,
            needs_key=config.needs_key,
            model=names[0] if names else None,
        )
        return msgspec.json.encode(document)

    async def openapi_document(call: Call) -> Reply:
        """Show the OpenAPI description of this server."""
        return Reply(await asyncio.to_thread(schema))

    route = RouteSpec("/openapi.json", None, openapi_document, "operation", dict[str, Any], open_to_all=True)
    return route


@asynccontextmanager
async def _lifespan(state: ServerState, app: Any) -> AsyncIterator[None]:
    if state.follower is not None:
        await state.follower.start()
    for model in state.models.values():
        model.engine.start()
    watch = asyncio.create_task(watch_files(state.watched))
    if state.batches is not None:
        await state.batches.start()
    yield
    if state.batches is not None:
        await state.batches.close()
    if state.follower is not None:
        await state.follower.close()
    watch.cancel()
    for model in state.models.values():
        model.engine.close()
        model.text.close()
    if state.observer is not None:
        await asyncio.to_thread(state.observer.close)
    if state.result_cache is not None:
        await state.result_cache.close()
    await asyncio.sleep(0)


def _refusal(state: ServerState, metrics: ApiMetrics, path: str, message: str) -> Endpoint:
    """An endpoint that answers 404 to every method."""

    async def refuse(call: Call) -> Reply:
        raise NotFound(message)

    route = RouteSpec(path, None, refuse, "operation", open_to_all=True, methods=ALL_METHODS)
    return Endpoint(state, metrics, route)


def _default(endpoint: Endpoint) -> ASGIApp:
    """The ASGI application for paths without a route."""

    async def default(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await endpoint(scope, receive, send)

    return default
