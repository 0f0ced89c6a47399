"""The ASGI application: every route of every dialect in one table. Never imports torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.api.dialects import (
    chat,
    completions,
    entities,
    maxsim,
    native,
    openai,
    operation,
    ranking,
    tei,
    zero_shot,
)
from penstock.api.endpoint import Call, Endpoint, Reply, RouteSpec
from penstock.api.metrics import ApiMetrics
from penstock.api.schema import openapi
from penstock.api.state import ServerState
from penstock.errors import NotFound

ROUTES = (
    RouteSpec("/v1/embeddings", openai.EmbeddingsRequest, openai.embeddings, "OpenAI"),
    RouteSpec("/v1/completions", completions.CompletionRequest, completions.completions, "OpenAI"),
    RouteSpec("/v1/chat/completions", chat.ChatRequest, chat.chat_completions, "OpenAI"),
    RouteSpec("/v1/models", None, openai.models, "OpenAI"),
    RouteSpec("/pooling", native.PoolingRequest, native.pooling, "native"),
    RouteSpec("/classify", native.ClassifyRequest, native.classify, "native"),
    RouteSpec("/predict", tei.PredictRequest, tei.predict, "native", error_shape=tei.tei_error),
    RouteSpec("/v1/zero-shot", zero_shot.ZeroShotRequest, zero_shot.zero_shot, "native"),
    RouteSpec("/v1/entities", entities.EntitiesRequest, entities.entities, "native"),
    RouteSpec("/v1/sparse", native.SparseRequest, native.sparse, "native"),
    RouteSpec("/score", ranking.ScoreRequest, ranking.score, "ranking"),
    RouteSpec("/v1/score", ranking.ScoreRequest, ranking.score, "ranking"),
    RouteSpec("/rerank", ranking.RerankRequest, ranking.rerank, "ranking", other=tei.RERANK),
    RouteSpec("/v1/rerank", ranking.RerankRequest, ranking.rerank, "ranking"),
    RouteSpec(
        "/v2/rerank",
        ranking.CohereRerankRequest,
        ranking.cohere_rerank,
        "ranking",
        error_shape=ranking.cohere_error,
    ),
    RouteSpec("/similarity", tei.SimilarityRequest, tei.similarity, "ranking", error_shape=tei.tei_error),
    RouteSpec("/v1/maxsim", maxsim.MaxsimRequest, maxsim.maxsim, "ranking"),
    RouteSpec("/tokenize", native.TokenizeRequest, native.tokenize, "native"),
    RouteSpec("/detokenize", native.DetokenizeRequest, native.detokenize, "native"),
    RouteSpec("/live", None, operation.live, "operation", open_to_all=True),
    RouteSpec("/health", None, operation.health, "operation", open_to_all=True),
    RouteSpec("/ready", None, operation.ready, "operation", open_to_all=True),
    RouteSpec("/metrics", None, operation.metrics, "operation", open_to_all=True),
    RouteSpec("/version", None, operation.version, "operation", open_to_all=True),
    RouteSpec("/docs", None, operation.docs, "operation", open_to_all=True),
    RouteSpec("/", None, operation.playground, "operation", open_to_all=True),
)


ALL_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")


class App(Starlette):
    """Routes have no path parameters, so a path is looked up; everything else goes through Starlette."""

    def __init__(self, endpoints: dict[str, Endpoint], **options: Any) -> None:
        super().__init__(routes=[Route(path, endpoint=each) for path, each in endpoints.items()], **options)
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        await (super().__call__ if endpoint is None else endpoint)(scope, receive, send)


def build_app(state: ServerState) -> Starlette:
    metrics = ApiMetrics()
    schema = msgspec.json.encode(openapi(ROUTES))

    async def serve_schema(call: Call) -> Reply:
        return Reply(schema)

    described = RouteSpec("/openapi.json", None, serve_schema, "operation", open_to_all=True)
    endpoints = {route.path: Endpoint(state, metrics, route) for route in (*ROUTES, described)}
    app = App(endpoints, lifespan=partial(_lifespan, state))
    app.router.default = _not_found(state, metrics)
    app.router.redirect_slashes = False
    return app


@asynccontextmanager
async def _lifespan(state: ServerState, app: Any) -> AsyncIterator[None]:
    for model in state.models.values():
        model.engine.start()
    yield
    for model in state.models.values():
        model.engine.close()
        model.text.close()
    await asyncio.sleep(0)


def _not_found(state: ServerState, metrics: ApiMetrics) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    async def refuse(call: Call) -> Reply:
        raise NotFound("no such route; /docs lists all routes")

    route = RouteSpec("other", None, refuse, "operation", open_to_all=True, methods=ALL_METHODS)
    endpoint = Endpoint(state, metrics, route)

    async def default(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await endpoint(scope, receive, send)

    return default
