"""The adapters that a checkpoint carries beside its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.files import inside, positive_integer, read_json, shown
from penstock.errors import ModelLoadError

_MAX_RANK = 1 << 14
# Options of PEFT that change the computation, and the values that leave it as it is here.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (),
    "layer_replication": (),
    "layers_to_transform": (),
    "exclude_modules": (),
    "trainable_token_indices": (),
    "target_parameters": (),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "arrow_config": (),
    "alora_invocation_tokens": (),
}


class PeftAdapter(msgspec.Struct, frozen=True):
    """A low-rank adapter as PEFT saves it, in a folder of its own: W + scale · B A for the target modules."""

    name: str
    file: str
    rank: int
    scale: float
    targets: frozenset[str]  # last parts of the names of modules


def adapter_names(config: Mapping[str, Any], key: str = "lora_adaptations") -> tuple[str, ...]:
    """The task adapters that a request may choose; none once `lora_task` merges one."""
    if config.get("lora_task") is not None:
        return ()
    return tuple(map(str, config.get(key) or ()))


def read_peft_adapter(folder: Path, name: str) -> PeftAdapter:
    """The adapter in adapters/`name`. An option that is not understood is refused."""
    path = inside(folder, f"adapters/{name}", folder / "config.json")
    file = path / "adapter_config.json"
    values = read_json(file)
    for key, accepted in _PLAIN.items():
        if (value := values.get(key)) is not None and value not in accepted:
            raise ModelLoadError(f"{file} has {key} = {shown(value)}, which is not supported", param="model")
    targets = values.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ModelLoadError(
            f"{file} has target_modules = {shown(targets)}; it has to be a list of module names",
            param="model",
        )
    rank, alpha = positive_integer(values, "r", file=file, high=_MAX_RANK), values.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise ModelLoadError(f"{file} has lora_alpha = {shown(alpha)}; it has to be a number", param="model")
    scale = alpha / math.sqrt(rank) if values.get("use_rslora") else alpha / rank
    return PeftAdapter(name, str(path / "adapter_model.safetensors"), rank, scale, frozenset(targets))
