"""The settings of a Ray Serve application: a file or mapping in the format of `penstock serve --config`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from penstock.cli.config_file import MODELS, RAY, Convert, models_in, read_mapping
from penstock.cli.flags import SERVED_ENGINE, SERVED_MODEL, SERVER
from penstock.cli.ray import flag_names
from penstock.cli.serve import model_settings, settings_of_models
from penstock.errors import ConfigError
from penstock.scale.serving.config import AppConfig, app_config

_OF_THE_CLUSTER = ("host", "port")


def app_settings(config: Mapping[str, Any] | str | Path) -> AppConfig:
    """The application described by a YAML file or a mapping."""
    content = config if isinstance(config, Mapping) else read_mapping(str(config))
    shared: dict[str, Any] = {}
    server: dict[str, Any] = {}
    flags = _flags()
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name in (MODELS, RAY) or value is None:
            continue
        if name in _OF_THE_CLUSTER:
            raise ConfigError(
                f"{key} belongs to the cluster: set it in http_options of the Serve config, or with "
                f"`penstock serve --ray --{name}`",
                param=name,
            )
        if name not in flags:
            close = get_close_matches(name, [*flags, MODELS, RAY], 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"the configuration has {key!r}, which is no flag of a server{hint}", param=name
            )
        fields, convert = (shared if flags[name][0] else server), flags[name][1]
        field, converted = convert(value)
        fields[field] = converted
    models = model_settings([], shared, models_in(content, settings_of_models()))
    modules = shared.get("lora_modules", ())
    return app_config(server, models, content.get(RAY), flag_names(), modules)


def _flags() -> dict[str, tuple[bool, Convert]]:
    """Every flag by name, without leading hyphens: (whether it belongs to a model, how to read its value)."""
    return {
        name.lstrip("-"): (group is not SERVER, partial(group.from_file, flag))
        for group in (SERVED_ENGINE, SERVED_MODEL, SERVER)
        for flag in group.flags
        for name in flag.all_names
        if name.startswith("--")
    }
