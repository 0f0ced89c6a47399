"""How a model's token states become one vector: what modules.json says, else the family's default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.dense import DenseSpec, read_dense
from penstock.checkpoint.families import Architecture
from penstock.checkpoint.files import CheckpointFiles
from penstock.config import PoolerConfig
from penstock.errors import ModelLoadError

# In the order in which sentence-transformers concatenates several methods that these flags turn on.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_METHOD_NAMES = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "avg": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "mean_sqrt_len": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "weighted_mean": "weighted_mean",
    "lasttoken": "last",
    "last": "last",
}
POOLING_METHODS = tuple(dict.fromkeys(_METHOD_NAMES.values()))
# Published without `include_prompt`: sentence-transformers too knows them by name.
_INSTRUCTORS = frozenset({"instructor-base", "instructor-large", "instructor-xl"})
# Pooling types of `--pooler-config` that add a task and leave the vectors alone.
SPLADE, STEP = "splade", "step"


class PoolingSpec(msgspec.Struct, frozen=True):
    methods: tuple[str, ...]  # several are concatenated
    include_prompt: bool = True
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    after: str | None = None  # the mean starts after this text


def read_pooling(
    files: CheckpointFiles, architecture: Architecture, pooler: PoolerConfig, *, is_late: bool
) -> PoolingSpec:
    """`is_late`: Dense modules project token vectors of a late-interaction model, not the pooled one."""
    if files.modules:
        pooling = _from_modules(files, is_late=is_late)
    else:
        pooling = default_pooling(architecture, files.config)
    if pooler.pooling_type is not None and not any(is_pooling_type(pooler, kind) for kind in (SPLADE, STEP)):
        pooling = msgspec.structs.replace(pooling, methods=(pooling_method(pooler.pooling_type),))
    if pooler.normalize is not None:
        pooling = msgspec.structs.replace(pooling, normalize=pooler.normalize)
    return pooling


def default_pooling(architecture: Architecture, config: Mapping[str, Any]) -> PoolingSpec:
    """For a checkpoint without modules.json. Decoders are pooled as their embedding models are trained."""
    family = architecture.family
    if not family.is_decoder:
        return PoolingSpec(methods=(family.pooling,), normalize=False)
    if family.is_causal(config):
        return PoolingSpec(methods=(family.causal_pooling,), normalize=True)
    method = pooling_method(str(config.get("pooling", family.pooling)))
    after = family.embed_mark if method == "mean" else None
    return PoolingSpec(methods=(method,), normalize=True, after=after)


def pooling_method(name: str) -> str:
    """The method that a file or `--pooler-config` means by `name`."""
    key = name.lower()
    if key not in _METHOD_NAMES:
        raise ModelLoadError(
            f"pooling method {name!r} is not supported; "
            f"supported: {', '.join(POOLING_METHODS)}, {SPLADE}, {STEP}"
        )
    return _METHOD_NAMES[key]


def is_pooling_type(pooler: PoolerConfig, kind: str) -> bool:
    return pooler.pooling_type is not None and pooler.pooling_type.lower() == kind


def _from_modules(files: CheckpointFiles, *, is_late: bool) -> PoolingSpec:
    methods: tuple[str, ...] = ("mean",)
    include_prompt, normalize, dense = True, False, []
    for module in files.modules:
        if module.kind == "Pooling":
            values = files.module_config(module)
            methods = _methods(values, files.folder / module.path / "config.json")
            include_prompt = bool(values.get("include_prompt", not _is_instructor(files.folder)))
        elif module.kind == "Dense" and not is_late:
            if normalize:
                raise ModelLoadError(
                    f"{files.folder / 'modules.json'} has the Dense module {module.path} after a Normalize "
                    "module, which is not supported; Dense modules have to come first"
                )
            dense.append(read_dense(files.folder, module.path))
        elif module.kind == "Normalize":
            normalize = True
    return PoolingSpec(methods, include_prompt, tuple(dense), normalize)


def _is_instructor(folder: Path) -> bool:
    """Whether a folder, or a repository in the hub's cache, has the name of an INSTRUCTOR model."""
    return any(name.rpartition("--")[2] in _INSTRUCTORS for name in folder.parts)


def _methods(values: Mapping[str, Any], file: Path) -> tuple[str, ...]:
    if (mode := values.get("pooling_mode")) is not None:
        modes = [mode] if isinstance(mode, str) else list(mode)
        return tuple(pooling_method(str(name)) for name in modes)
    if methods := tuple(method for flag, method in _FLAGS.items() if values.get(flag)):
        return methods
    raise ModelLoadError(f"{file} turns on no pooling method; set pooling_mode or one of {', '.join(_FLAGS)}")
