"""From a model's settings (command line, file or operator's order) to its configuration and spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.checkpoint.describe import describe
from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, ModelConfig, ServerConfig, check_settings, from_mapping
from penstock.errors import ConfigError
from penstock.inputs.chat import ModelTemplate
from penstock.serving.adapters import check_lora_modules

_OWN = frozenset(ModelConfig.__struct_fields__) - {"engine"}  # all other settings belong to `EngineConfig`


def model_config(settings: Mapping[str, Any], server: ServerConfig) -> ModelConfig:
    """Build a model's configuration from one mapping with fields of `ModelConfig` and `EngineConfig`."""
    engine = from_mapping(EngineConfig, {name: value for name, value in settings.items() if name not in _OWN})
    own = {name: value for name, value in settings.items() if name in _OWN}
    if engine.pooler_config.enable_chunked_processing:
        own["default_chunking"] = "mean"
    config = msgspec.structs.replace(from_mapping(ModelConfig, {**own, "engine": {}}), engine=engine)
    cuts = server.auto_truncate if config.auto_truncate is None else config.auto_truncate
    if cuts and (config.default_chunking or server.default_chunking) != "none":
        raise ConfigError(
            "--auto-truncate cuts long texts and --default-chunking embeds them whole; give only one",
            param="default_chunking",
        )
    if engine.enable_lora and server.any_model_name:
        raise ConfigError(
            "--enable-lora and --any-model-name contradict each other: a request for an adapter that is not "
            "loaded would be answered without it; give only one",
            param="enable_lora",
        )
    return config


def describe_model(settings: Mapping[str, Any], server: ServerConfig) -> tuple[ModelConfig, ModelSpec]:
    """Return a model's configuration and its spec, read from its files. Downloads them if needed."""
    config = model_config(settings, server)
    spec = describe(config.engine)
    check_settings(config.engine, spec.facts)
    check_lora_modules(config.engine, spec, config.aliases)
    template = config.chat_template or server.chat_template
    if template is not None:
        _ = ModelTemplate(spec.path, template).template  # raises if it is not valid
    return config, spec


def describe_loaded(
    model: str, settings: Mapping[str, Any], defaults: Mapping[str, Any], server: ServerConfig
) -> tuple[ModelConfig, ModelSpec]:
    """Describe a model that an operator loads. The server's own flags are the defaults of its settings."""
    if refused := sorted(settings.keys() & {"model", "profile", "download_dir"}):
        raise ConfigError(f"settings cannot have {refused[0]}; leave it out", param="settings")
    not_shared = ("model", "served_model_name", "lora_modules", "base_model")
    shared = {name: value for name, value in defaults.items() if name not in not_shared}
    return describe_model({**shared, **settings, "model": model}, server)
