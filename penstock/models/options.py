"""Reads options of config.json, under any of their names, and checks the values that a family requires."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, cast

from penstock.errors import ModelLoadError
from penstock.layers.rotary import Rope


def option(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The value of the first of these keys that is set. Null counts as not set."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise ModelLoadError(f"config.json has no {' or '.join(names)}")
    return default


def with_defaults(config: Mapping[str, Any], **defaults: Any) -> Mapping[str, Any]:
    """The configuration with defaults for missing keys. It is not copied, so that read keys are recorded."""
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
    layer_type: str | None = None,
    scaled: bool = True,
) -> Rope:
    """The rotary options of all layers, or of layers of one type, from either form of config.json.

    Newer files have `rope_parameters`, by layer type in families that pass `layer_type`. Older files have a
    base under one of `names`, and `rope_scaling` for layers that are `scaled`. If a file has both forms,
    `rope_scaling` replaces `rope_parameters` or, with layer types, overrides its keys, as in transformers.
    """
    newer = _newer_rope(config, layer_type)
    older: Mapping[str, Any] = (config.get("rope_scaling") if scaled else None) or {}
    scaling = dict(older or newer) if layer_type is None else {**newer, **older}
    base = float(scaling.get("rope_theta") or option(config, *names, default=default))
    if older and base != float(newer.get("rope_theta") or base) and layer_type is None:
        raise ModelLoadError(
            f"config.json has both rope_scaling and rope_parameters: with the first, the base is {base:g}, "
            f"with the second rope_theta = {newer['rope_theta']:g}. Give rope_scaling the right rope_theta"
        )
    _check_trained_length(config, scaling)
    return Rope(base, scaling)


def _check_trained_length(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> None:
    """Refuse a trained length outside the rotary options, because transformers ignores it there."""
    name, limit = "original_max_position_embeddings", config.get("max_position_embeddings")
    needs_length = (scaling.get("rope_type") or scaling.get("type")) in ("yarn", "llama3")
    outside = config.get(name)
    if needs_length and not scaling.get(name) and outside not in (None, limit):
        raise ModelLoadError(
            f"config.json has {name} = {outside} beside its rotary options, which do not have it; "
            "put it into rope_parameters or rope_scaling"
        )


def _newer_rope(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """`rope_parameters` of these layers; empty in older files."""
    found: Mapping[str, Any] = config.get("rope_parameters") or {}
    is_by_type = any(isinstance(value, Mapping) for value in found.values())
    if found and is_by_type is not (layer_type is not None):
        wanted = "one object for all layers" if layer_type is None else "an object for each layer type"
        raise ModelLoadError(f"rope_parameters in config.json has to be {wanted} in this family")
    return found if layer_type is None else found.get(layer_type) or {}
