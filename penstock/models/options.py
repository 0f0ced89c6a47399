"""Reading config.json: options under several names, and those that a family's wiring takes for granted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import ModelLoadError
from penstock.layers.rotary import Rope


def option(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The value of the first of these names that is set; null counts as not set."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise ModelLoadError(f"config.json has no {' or '.join(names)}")
    return default


def require(config: Mapping[str, Any], **wanted: Any) -> None:
    """Refuse a configuration whose options, where they are set, are not these."""
    for name, value in wanted.items():
        if config.get(name) is not None and config[name] != value:
            raise ModelLoadError(f"{name} = {config[name]!r} is not supported; only {value!r} is")


def rope_options(
    config: Mapping[str, Any],
    *names: str,
    default: float,
    layer_type: str = "full_attention",
    scaled: bool = True,
) -> Rope:
    """Angles of one type of layer, in any of the forms that config.json has them in.

    New files have `rope_parameters`, for all layers or by layer type. Old ones have a base under one of
    `names`, and `rope_scaling` for the layers that are `scaled`.
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
