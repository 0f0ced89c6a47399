"""The configuration of a Ray Serve application: a server's configuration plus the section `ray`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import EngineConfig, LoraModule, ModelConfig, ServerConfig, from_mapping
from penstock.errors import ConfigError
from penstock.serving.model_settings import model_config

MAX_REPLICAS = 1000


class ReplicaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine replicas of one model."""

    min_replicas: int = 1
    max_replicas: int | None = None  # None: `min_replicas`, without autoscaling
    target_queued_tokens: int = 16_384  # in flight per replica; above this, replicas are added
    cpus: float = 1.0  # CPUs reserved per replica
    gpu_share: float | None = None  # share of a GPU per replica; None: 1 with device cuda, otherwise 0
    upscale_delay_s: float = 5.0
    downscale_delay_s: float = 120.0
    max_surge_percent: int = 0  # percent of replicas that an update starts before it stops as many old ones

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= MAX_REPLICAS:
            raise ValueError(f"min_replicas is {self.min_replicas}; use 1 to {MAX_REPLICAS}")
        if self.max_replicas is not None and not self.min_replicas <= self.max_replicas <= MAX_REPLICAS:
            raise ValueError(
                f"max_replicas is {self.max_replicas}; use min_replicas, {self.min_replicas}, or more"
            )
        if self.target_queued_tokens < 1:
            raise ValueError(f"target_queued_tokens is {self.target_queued_tokens}; use 1 or more")
        if not self.cpus >= 0:
            raise ValueError(f"cpus is {self.cpus}; use 0 or more")
        if self.gpu_share is not None and not 0 <= self.gpu_share <= 1:
            raise ValueError(
                f"gpu_share is {self.gpu_share:g}; use 0 to 1: an engine replica uses one GPU at most"
            )
        for name in ("upscale_delay_s", "downscale_delay_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use 0 or more seconds")
        if not 0 <= self.max_surge_percent <= 100:
            raise ValueError(f"max_surge_percent is {self.max_surge_percent}; use 0 to 100")

    @property
    def is_scaled(self) -> bool:
        return self.max_replicas is not None and self.max_replicas > self.min_replicas


class IngressConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ingress replicas, which serve HTTP."""

    ingress_replicas: int = 1
    ingress_cpus: float = 1.0
    wait_for_replica_s: float = 10.0  # longest wait of a request for an engine replica, then 503

    def __post_init__(self) -> None:
        if not 1 <= self.ingress_replicas <= MAX_REPLICAS:
            raise ValueError(f"ingress_replicas is {self.ingress_replicas}; use 1 to {MAX_REPLICAS}")
        if not self.ingress_cpus >= 0:
            raise ValueError(f"ingress_cpus is {self.ingress_cpus}; use 0 or more")
        if not 0 <= self.wait_for_replica_s <= 3600:
            raise ValueError(f"wait_for_replica_s is {self.wait_for_replica_s}; use 0 to 3600 seconds")


class DeployedModel(msgspec.Struct, frozen=True):
    """A model of the application."""

    config: ModelConfig
    replicas: ReplicaConfig
    deployment: str  # the name of its Serve deployment

    @property
    def gpu_share(self) -> float:
        if self.replicas.gpu_share is not None:
            return self.replicas.gpu_share
        return 1.0 if self.config.engine.device == "cuda" else 0.0


class ReplicaLaunch(msgspec.Struct, frozen=True):
    """The configuration of an engine replica. An update restarts the replicas whose configuration changes."""

    engine: EngineConfig
    cpus: float
    gpu_share: float
    log_level: str
    log_format: str
    step_timeout_s: float  # 0: no limit
    is_cached: bool  # results are cached, so replicas must agree on the revision


class AppConfig(msgspec.Struct, frozen=True):
    """The whole application."""

    server: ServerConfig
    models: tuple[DeployedModel, ...]
    ingress: IngressConfig
    lora_modules: tuple[LoraModule, ...] = ()  # given for all models together

    def replica_launch(self, model: DeployedModel) -> ReplicaLaunch:
        server = self.server
        return ReplicaLaunch(
            engine=model.config.engine,
            cpus=model.replicas.cpus,
            gpu_share=model.gpu_share,
            log_level=server.log_level,
            log_format=server.log_format,
            step_timeout_s=server.engine_step_timeout_s,
            is_cached=server.result_cache_mb > 0,
        )

    def for_ingress(self) -> AppConfig:
        """The configuration of an ingress replica, without the settings of engine replicas."""
        models = (msgspec.structs.replace(model, replicas=ReplicaConfig()) for model in self.models)
        return msgspec.structs.replace(self, models=tuple(models))


REFUSED = {
    **dict.fromkeys(
        ("uds", "uds_permissions", "admin_port", "admin_host"),
        "the proxies of Ray Serve have one port, which `host` and `port` set",
    ),
    **dict.fromkeys(
        (
            *("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_keyfile_password_file"),
            *("ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
        ),
        "the proxies of Ray Serve speak TLS; http_options of the Serve config has their files",
    ),
    "api_server_count": "`ingress_replicas` in the section `ray` says how many processes speak HTTP",
    **dict.fromkeys(
        (
            *("max_connections", "max_connections_per_address", "max_header_bytes", "max_headers"),
            *("max_url_bytes", "header_timeout_s", "body_timeout_s", "min_body_rate", "write_timeout_s"),
            *("idle_timeout_s", "allowed_hosts"),
        ),
        "connections belong to the proxies of Ray Serve",
    ),
    **dict.fromkeys(
        ("sleep_after_s", "max_awake_models", "wake_timeout_s", "standby_engine"),
        "engine replicas do not sleep; Ray starts and stops them",
    ),
    **dict.fromkeys(
        (
            *("batch_folder", "max_batch_file_mb", "max_batch_lines"),
            *("batch_quota_gb", "batch_retention_days"),
        ),
        "files and batches are kept on the disk of one machine",
    ),
    "lora_root": "engine replicas take the adapters of lora_modules alone",
    "engine_hang_timeout_s": "Ray Serve checks the health of replicas",
    "shared_memory_mb": "Ray carries large results",
}


def replica_settings(given: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a section `ray` into settings of replicas and of the ingress. Unknown keys are refused."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must map names to values, as in min_replicas: 2", param="ray")
    known = {
        **dict.fromkeys(ReplicaConfig.__struct_fields__),
        **dict.fromkeys(IngressConfig.__struct_fields__),
    }
    for key in given:
        if key not in known:
            raise ConfigError(f"{where} has {key!r}; use {', '.join(known)}", param="ray")
    plain = {key: value for key, value in given.items() if value is not None}
    own = {key: value for key, value in plain.items() if key in ReplicaConfig.__struct_fields__}
    return own, {key: value for key, value in plain.items() if key not in own}


def app_config(
    server: Mapping[str, Any],
    models: Sequence[Mapping[str, Any]],
    ray: Mapping[str, Any] | None,
    flags: Mapping[str, str] | None = None,
    modules: Sequence[LoraModule] = (),
) -> AppConfig:
    """Build the configuration of an application.

    `server` has fields of `ServerConfig`. Each of `models` has fields of `ModelConfig` and `EngineConfig`,
    and its own section `ray`. `ray` is the section for all models. `flags` maps fields to the names that
    errors show. `modules` are the adapters given for all models together.
    """
    for field, why in REFUSED.items():
        if field in server:
            name = (flags or {}).get(field, field)
            raise ConfigError(f"{name} cannot be used with Ray: {why}; leave it out", param=field)
    server_config = from_mapping(ServerConfig, dict(server))
    shared, ingress = replica_settings(ray or {}, "ray")
    deployed: list[DeployedModel] = []
    for settings in models:
        own, misplaced = replica_settings(
            settings.get("ray") or {}, f"ray of model {settings.get('model')!r}"
        )
        if misplaced:
            raise ConfigError(
                f"{next(iter(misplaced))} is for all models: set it in the section `ray` of the whole file",
                param="ray",
            )
        config = model_config({key: value for key, value in settings.items() if key != "ray"}, server_config)
        if config.sleep_after_s:
            raise ConfigError(
                f"sleep_after cannot be used with Ray: {REFUSED['sleep_after_s']}", param="sleep_after_s"
            )
        _refuse_parallel(config)
        replicas = from_mapping(ReplicaConfig, {**shared, **own})
        name = deployment_name(config.engine, [each.deployment for each in deployed])
        deployed.append(_checked(DeployedModel(config, replicas, name)))
    return AppConfig(server_config, tuple(deployed), from_mapping(IngressConfig, ingress), tuple(modules))


def _refuse_parallel(config: ModelConfig) -> None:
    for owner, field, why in (
        (config, "data_parallel_size", "min_replicas in the section `ray` says how many engines there are"),
        (config.engine, "tensor_parallel_size", "an engine replica uses one device"),
    ):
        if (size := getattr(owner, field)) != 1:
            raise ConfigError(f"{field} is {size}, which cannot be used with Ray: {why}", param=field)


def _checked(model: DeployedModel) -> DeployedModel:
    device, share = model.config.engine.device, model.gpu_share
    if device.startswith("cuda:"):
        raise ConfigError(f"device is {device!r}; with Ray use cuda, as Ray assigns the GPUs", param="device")
    if device in ("cpu", "null") and share:
        raise ConfigError(f"gpu_share is {share:g}, but device is {device}; leave one out", param="ray")
    if device == "cuda" and not share:
        raise ConfigError("device is cuda, but gpu_share is 0; use a share such as 0.5", param="ray")
    return model


def deployment_name(engine: EngineConfig, taken: Sequence[str]) -> str:
    """Derive the name of a model's deployment from its served name."""
    given = engine.model_names[0] if engine.model_names else (engine.model or "default")
    if Path(given).is_absolute():
        given = Path(given).name
    plain = "".join(each if each.isalnum() or each in "-_." else "-" for each in given.rstrip("/"))
    name = f"engine-{plain.strip('-') or 'model'}"
    number = 2
    while name in taken:
        name, number = f"{name.removesuffix(f'-{number - 1}')}-{number}", number + 1
    return name
