"""Penstock on Ray Serve: one application with an ingress and, for each model, engine replicas.

`build_app` creates the application from a configuration. A Serve config file refers to it as
`import_path: penstock.scale.serve:build_app`, with the configuration as `args`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from penstock.scale.serving.config import AppConfig, DeployedModel
from penstock.scale.serving.engine_replica import EngineReplica
from penstock.scale.serving.ingress import Ingress

EXTRA_REQUESTS = 64  # above the limit of the ingress, so that Penstock answers 429 before Serve does
MAX_ENGINE_REQUESTS = 100_000  # the engine's limit on queued tokens is reached before this
HEALTH_PERIOD_S = 5.0
LOOK_BACK_S = 15.0  # window for the mean of queued tokens; Serve requires more than 10
LOGGING = {"enable_access_log": False}  # Penstock writes its own access log


def build_app(config: Mapping[str, Any] | str | Path) -> Application:
    """Build the application from a mapping or a YAML file.

    The format is that of `penstock serve --config`, with an additional section `ray`. Raises `ConfigError`
    for unknown settings.
    """
    from penstock.cli.settings import app_settings

    return bind(app_settings(config))


def bind(config: AppConfig) -> Application:
    """Build the application from a resolved configuration."""
    engines = [
        _engine_deployment(config, model).bind(msgspec.json.encode(config.replica_launch(model)))
        for model in config.models
    ]
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=config.ingress.ingress_replicas,
        ray_actor_options={"num_cpus": config.ingress.ingress_cpus},
        max_ongoing_requests=config.server.max_concurrent_requests + EXTRA_REQUESTS,
        max_surge_percent=max(model.replicas.max_surge_percent for model in config.models),
        graceful_shutdown_timeout_s=config.server.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD_S,
        logging_config=LOGGING,
    )
    return ingress.bind(msgspec.json.encode(config.for_ingress()), *engines)


def _engine_deployment(config: AppConfig, model: DeployedModel) -> Any:
    replicas = model.replicas
    options: dict[str, Any] = {"num_replicas": replicas.min_replicas}
    if replicas.is_scaled:
        options = {"autoscaling_config": _autoscaling(model)}
    return serve.deployment(
        EngineReplica,
        name=model.deployment,
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": model.gpu_share},
        max_ongoing_requests=MAX_ENGINE_REQUESTS,
        max_surge_percent=replicas.max_surge_percent,
        graceful_shutdown_timeout_s=config.server.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD_S,
        logging_config=LOGGING,
        request_router_config=RequestRouterConfig(
            request_router_class="penstock.scale.serving.router.QueuedTokensRouter"
        ),
        **options,
    )


def _autoscaling(model: DeployedModel) -> AutoscalingConfig:
    replicas = model.replicas
    policy = AutoscalingPolicy(
        policy_function="penstock.scale.serving.autoscaling:QueuedTokensPolicy",
        policy_kwargs={"target_queued_tokens": replicas.target_queued_tokens},
    )
    return AutoscalingConfig(
        min_replicas=replicas.min_replicas,
        max_replicas=replicas.max_replicas,
        upscale_delay_s=replicas.upscale_delay_s,
        downscale_delay_s=replicas.downscale_delay_s,
        look_back_period_s=LOOK_BACK_S,
        policy=policy,
    )
