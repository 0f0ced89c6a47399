"""Routes for the operator: load, unload, put to sleep and wake models. They need the admin key."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec

from penstock.api.call import Call, Reply
from penstock.api.routes import RouteSpec
from penstock.errors import BadValue, NotPossible, shown
from penstock.serving.control import Action, OrderAnswer

DIALECT = "native"
MODELS = "/v1/admin/models"


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An order for a model."""


class LoadRequest(Body, kw_only=True):
    """Body of `POST /v1/admin/models/load`."""

    model: str
    served_model_name: str | None = None
    aliases: list[str] = []
    settings: dict[str, Any] = {}


class UnloadRequest(Body, kw_only=True):
    """Body of `POST /v1/admin/models/unload`."""

    model: str


class SleepRequest(Body, kw_only=True):
    """Body of `POST /v1/admin/models/sleep`."""

    model: str
    level: Literal[1, 2] | None = None


class WakeRequest(Body, kw_only=True):
    """Body of `POST /v1/admin/models/wake`."""

    model: str


class OrderReply(msgspec.Struct, kw_only=True):
    """The state of a model after an order."""

    model: str  # its first name
    state: Literal["awake", "asleep", "unloaded"]
    seconds: float  # how long the order took


async def load_model(call: Call, body: LoadRequest) -> Reply:
    """Load a model, and answer when it can serve."""
    settings = dict(body.settings)
    for name in ("served_model_name", "aliases"):
        if given := getattr(body, name):
            if name in settings:
                raise BadValue(f"{name} is given twice: in the body and in settings", param=name)
            settings[name] = given
    return await _ordered(call, "load", body.model, settings=settings)


async def unload_model(call: Call, body: UnloadRequest) -> Reply:
    """Unload a model: it gets no further requests, and its engine stops when those it has are answered."""
    return await _ordered(call, "unload", body.model)


async def sleep_model(call: Call, body: SleepRequest) -> Reply:
    """Put a model to sleep: it finishes its requests and frees its memory. The next request wakes it."""
    return await _ordered(call, "sleep", body.model, level=body.level)


async def wake_model(call: Call, body: WakeRequest) -> Reply:
    """Wake a model, and answer when it can serve."""
    return await _ordered(call, "wake", body.model)


async def _ordered(
    call: Call,
    action: Action,
    model: str,
    *,
    level: int | None = None,
    settings: dict[str, Any] | None = None,
) -> Reply:
    follower = call.state.follower
    if follower is None:
        raise NotPossible("the models of this server cannot be changed")
    if action != "load":
        model = call.state.named(model).spec.name
    return order_reply(await follower.order(action, model, level=level, settings=settings))


def order_reply(answer: OrderAnswer) -> Reply:
    described = {"model": answer.model, "state": answer.state, "seconds": round(answer.seconds, 3)}
    return Reply(msgspec.json.encode(described))


# vLLM's routes have the model in the URL. Without one, they apply to all models.


async def sleep(call: Call) -> Reply:
    """Put the model of `?model=`, or all models, to sleep; `level` is 1 or 2."""
    query = _query(call, "level", "mode", "model")
    level = query.get("level")
    if level not in (None, "1", "2"):
        raise BadValue(f"level is {shown(level)}; use 1 or 2", param="level")
    if query.get("mode", "wait") != "wait":
        raise BadValue("mode is wait: requests that run are finished first", param="mode")
    for name in _named(call, query):
        await _ordered(call, "sleep", name, level=None if level is None else int(level))
    return Reply(b"", b"text/plain")


async def wake_up(call: Call) -> Reply:
    """Wake the model of `?model=`, or all models."""
    query = _query(call, "tags", "model")
    if "tags" in query:
        raise BadValue("tags cannot be given: weights and caches wake together", param="tags")
    for name in _named(call, query):
        await _ordered(call, "wake", name)
    return Reply(b"", b"text/plain")


class SleepingAnswer(msgspec.Struct, kw_only=True):
    is_sleeping: bool


async def is_sleeping(call: Call) -> Reply:
    """Report whether the model of `?model=`, or every model, sleeps."""
    names = _named(call, _query(call, "model"))
    states = [call.state.named(name).state for name in names]
    answer = SleepingAnswer(is_sleeping=all(state in ("asleep", "waking") for state in states))
    return Reply(msgspec.json.encode(answer))


def _query(call: Call, *known: str) -> dict[str, str]:
    """The parameters of the URL; others are refused by name."""
    given = dict(parse_qsl(call.query_string.decode("latin-1"), keep_blank_values=True))
    if unknown := sorted(given.keys() - set(known)):
        raise BadValue(f"{shown(unknown[0])} is unknown; use {', '.join(known)}", param=unknown[0])
    return given


def _named(call: Call, query: dict[str, str]) -> list[str]:
    return [query["model"]] if "model" in query else list(call.state.models)


ROUTES = (
    RouteSpec(
        f"{MODELS}/load",
        LoadRequest,
        load_model,
        DIALECT,
        OrderReply,
        example={"model": "BAAI/bge-small-en-v1.5", "aliases": ["small"]},
        admin=True,
    ),
    RouteSpec(
        f"{MODELS}/unload",
        UnloadRequest,
        unload_model,
        DIALECT,
        OrderReply,
        example={"model": "small"},
        admin=True,
    ),
    RouteSpec(
        f"{MODELS}/sleep",
        SleepRequest,
        sleep_model,
        DIALECT,
        OrderReply,
        example={"model": "small"},
        admin=True,
    ),
    RouteSpec(
        f"{MODELS}/wake", WakeRequest, wake_model, DIALECT, OrderReply, example={"model": "small"}, admin=True
    ),
    RouteSpec("/sleep", None, sleep, "vLLM", admin=True, methods=("POST",), media=("text/plain",)),
    RouteSpec("/wake_up", None, wake_up, "vLLM", admin=True, methods=("POST",), media=("text/plain",)),
    RouteSpec("/is_sleeping", None, is_sleeping, "vLLM", SleepingAnswer, admin=True),
)
