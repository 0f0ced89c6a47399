"""Reads config.json: options with several names, and options that a family's wiring relies on."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, cast

from penstock.errors import ModelLoadError
from penstock.layers.rotary import Rope


def option(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The value of the first of these keys that is set; null counts as not set."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise ModelLoadError(f"config.json has no {' or '.join(names)}")
    return default


def with_defaults(config: Mapping[str, Any], **defaults: Any) -> Mapping[str, Any]:
    """The configuration with values for keys that it leaves out. A copy would hide which keys are read."""
    return ChainMap(cast("dict[str, Any]", config), defaults)


def with_values(config: Mapping[str, Any], **values: Any) -> Mapping[str, Any]:
    """The configuration with other values for these keys."""
    return ChainMap(values, cast("dict[str, Any]", config))


def require(config: Mapping[str, Any], **wanted: Any) -> None:
    """Refuse a configuration that sets one of these options to another value."""
    for name, value in wanted.items():
        if config.get(name) is not None and config[name] != value:
            raise ModelLoadError(
                f"config.json has {name} = {config[name]!r}, which is not supported; supported: {value!r}"
            )


def rope_options(
    config: Mapping[str, Any],
    *names: str,
    default: float,
    layer_type: str = "full_attention",
    scaled: bool = True,
) -> Rope:
    """The rotary options of one type of layer, from either form of config.json.

    Newer files have `rope_parameters`, for all layers or by layer type. Older ones have a base under one of
    `names`, and `rope_scaling` for layers that are `scaled`.
    """
    newer: Mapping[str, Any] = config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in newer.values()):
        newer = newer.get(layer_type) or {}
    elif not scaled:
        newer = {}
    base = float(newer.get("rope_theta") or option(config, *names, default=default))
    scaling = dict((config.get("rope_scaling") if scaled else None) or newer)
    if trained := config.get("original_max_position_embeddings"):
        scaling.setdefault("original_max_position_embeddings", trained)
    return Rope(base, scaling)
