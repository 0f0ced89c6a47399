"""The dialect of vLLM's routes for LoRA adapters: load and unload them while the server runs. They need the
admin key, because loading an adapter makes the server read a folder."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.api.call import Call, Reply
from penstock.api.fields import NoEffect
from penstock.api.routes import RouteSpec
from penstock.api.state import ServedModel
from penstock.errors import AdapterNotFound, BadValue, NotPossible, shown
from penstock.serving.adapters import ENABLE
from penstock.serving.control import Action

TEXT = b"text/plain; charset=utf-8"


class AdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The adapter that an order is about."""

    lora_name: str | None = None
    model: str | None = None  # needed if several models take adapters


class LoadAdapterRequest(AdapterBody, kw_only=True):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_path: str | None = None
    load_inplace: bool = False


class UnloadAdapterRequest(AdapterBody, kw_only=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_int_id: Annotated[int | None, NoEffect("an adapter is known by its name")] = None


async def load_adapter(call: Call, body: LoadAdapterRequest) -> Reply:
    """Load a LoRA adapter, and answer when every engine and every API process has it."""
    if not body.lora_name or not body.lora_path:
        missing = "lora_path" if body.lora_name else "lora_name"
        raise BadValue("Both 'lora_name' and 'lora_path' must be provided.", param=missing)
    model = _model(call, body.model)
    settings = {"name": body.lora_name, "path": body.lora_path, "replaces": body.load_inplace}
    await _order(call, "load_adapter", model, settings)
    return Reply(f"Success: LoRA adapter '{body.lora_name}' added successfully.".encode(), TEXT)


async def unload_adapter(call: Call, body: UnloadAdapterRequest) -> Reply:
    """Unload a LoRA adapter. Requests that run with it are finished."""
    name = body.lora_name
    if not name:
        raise BadValue("'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")
    model = _holder(call, name) if body.model is None else call.state.named(body.model)
    await _order(call, "unload_adapter", model, {"name": name})
    return Reply(f"Success: LoRA adapter '{name}' removed successfully.".encode(), TEXT)


async def _order(call: Call, action: Action, model: ServedModel, settings: dict[str, Any]) -> None:
    follower = call.state.follower
    if follower is None:
        raise NotPossible("the adapters of this server cannot be changed")
    await follower.order(action, model.spec.name, settings=settings)


def _model(call: Call, name: str | None) -> ServedModel:
    """The model that an adapter is for; without a name, the one that takes adapters."""
    if name is not None:
        return call.state.named(name)
    able = [model for model in call.state.models.values() if model.takes_adapters]
    if len(able) == 1:
        return able[0]
    if not able:
        raise NotPossible(f"this server takes no LoRA adapters; {ENABLE}")
    names = ", ".join(model.spec.name for model in able)
    raise BadValue(f"several models take adapters; set model to one of {names}", param="model")


def _holder(call: Call, name: str) -> ServedModel:
    """The model with an adapter of this name."""
    holders = [model for model in call.state.models.values() if name in model.adapters]
    if len(holders) == 1:
        return holders[0]
    if not holders:
        loaded = ", ".join(call.state.adapter_names) or "none"
        raise AdapterNotFound(
            f"The lora adapter {shown(name)} cannot be found. This server has: {loaded}", param="lora_name"
        )
    names = ", ".join(model.spec.name for model in holders)
    raise BadValue(f"several models have this adapter; set model to one of {names}", param="model")


ROUTES = (
    RouteSpec(
        "/v1/load_lora_adapter",
        LoadAdapterRequest,
        load_adapter,
        "vLLM",
        example={"lora_name": "tenant-a", "lora_path": "/adapters/tenant-a"},
        admin=True,
        media=("text/plain",),
    ),
    RouteSpec(
        "/v1/unload_lora_adapter",
        UnloadAdapterRequest,
        unload_adapter,
        "vLLM",
        example={"lora_name": "tenant-a"},
        admin=True,
        media=("text/plain",),
    ),
)
