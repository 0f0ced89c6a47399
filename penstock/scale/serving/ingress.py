"""The ingress: Penstock's HTTP application in a Ray Serve replica. Does not import torch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from penstock.api.adapters import ServedAdapter
from penstock.api.admission import Admission
from penstock.api.app import build_app
from penstock.api.metrics import RETRIED
from penstock.api.process import tokenizer_threads
from penstock.api.state import ServedModel, ServerState
from penstock.checkpoint.describe import describe
from penstock.checkpoint.spec import with_max_model_len
from penstock.config import ServerConfig
from penstock.errors import ConfigError, NotServed
from penstock.logs import configure
from penstock.scale.serving.adapters import configured_adapters
from penstock.scale.serving.config import AppConfig, DeployedModel
from penstock.scale.serving.fingerprint import fingerprint
from penstock.scale.serving.handle import RayEngineHandle
from penstock.serving.adapters import check_base_names
from penstock.serving.control import Action, OrderAnswer
from penstock.serving.launch import EngineState, ModelLaunch
from penstock.tasks.model import TextModel


class ReplicatedModel(ServedModel):
    """A model whose engine runs as replicas."""

    __slots__ = ()

    def _engine_state(self) -> EngineState:
        has_served = isinstance(self.engine, RayEngineHandle) and self.engine.has_served
        return EngineState("restarting" if has_served else "starting", self.engine.unavailable_reason)


class FixedModels:
    """Refuses all orders about models and adapters: an application on Ray changes only by deployment."""

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    async def order(
        self, action: Action, model: str, *, level: int | None = None, settings: dict[str, Any] | None = None
    ) -> OrderAnswer:
        if action in ("load_adapter", "unload_adapter"):
            raise NotServed(
                "a server on Ray has the adapters of its configuration: replicas that Ray starts later would "
                "not have others; deploy it with other lora_modules"
            )
        raise NotServed(
            f"a server on Ray takes no order to {action} a model; deploy it with another configuration"
        )


class Ingress:
    """Serves all routes of all dialects. Its engines are replicas of other deployments."""

    def __init__(self, config: bytes, *handles: DeploymentHandle[Any]) -> None:
        """`config` is an encoded `AppConfig`; `handles` are those of its models, in order."""
        app = msgspec.json.decode(config, type=AppConfig)
        server = app.server
        configure(
            level=server.log_level,
            format=server.log_format,
            process="api",
            shows_values=server.log_inputs,
        )
        threads = tokenizer_threads(max(1, int(app.ingress.ingress_cpus)), 1)
        os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
        models = [
            served_model(model, handle, server, app.ingress.wait_for_replica_s)
            for model, handle in zip(app.models, handles, strict=True)
        ]
        check_names(models)
        described = [(each.config, model.spec) for each, model in zip(app.models, models, strict=True)]
        check_base_names(app.lora_modules, described)
        self._state = ServerState(server, {}, follower=FixedModels())
        self._state.serve_models(models)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return build_app(self._state)


def served_model(
    model: DeployedModel, handle: DeploymentHandle[Any], server: ServerConfig, wait_for_replica_s: float
) -> ServedModel:
    config = model.config
    described = describe(config.engine)
    spec = with_max_model_len(described, config.engine.max_model_len or described.max_model_len)
    adapters = configured_adapters(config.engine, spec, config.aliases)
    engine = RayEngineHandle(handle, spec.name, fingerprint(spec, adapters), wait_for_replica_s)
    engine.uses_affinity = server.engine_affinity
    engine.on_retry = RETRIED.labels(spec.name).inc
    launch = ModelLaunch(0, config, spec, engines=())
    return ReplicatedModel(
        text=TextModel(spec, chat_template=config.chat_template or server.chat_template),
        engine=engine,
        created_s=int(time.time()),
        admission=Admission(),
        auto_truncate=config.auto_truncate,
        default_chunking=config.default_chunking,
        aliases=launch.names[1:],
        takes_adapters=config.engine.enable_lora,
        adapters={each.name: ServedAdapter(each) for each in adapters},
    )


def check_names(models: Sequence[ServedModel]) -> None:
    """Refuse two models with the same name."""
    taken: set[str] = set()
    for model in models:
        names = {model.spec.name, *model.aliases}
        if clash := taken & names:
            raise ConfigError(
                f"two models have the name {min(clash)!r}; give one another with served_model_name",
                param="served_model_name",
            )
        taken |= names
