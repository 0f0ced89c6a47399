"""How token states are pooled to one vector: as modules.json says, otherwise the family's default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.dense import (
    DenseSpec,
    LayerNormSpec,
    ModuleSpec,
    UnitSpec,
    check_normalize,
    read_dense,
    read_layer_norm,
    refuse_unknown_keys,
)
from penstock.checkpoint.families import Architecture
from penstock.checkpoint.files import QUANTIZER_MODULE, CheckpointFiles
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
_AFTER_STATIC = ("Dense", "LayerNorm", "Normalize", "Dropout")
_POOLING_KEYS = ("pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension", *_FLAGS)
# Published without `include_prompt`. sentence-transformers, too, recognises them by name.
_INSTRUCTORS = frozenset({"instructor-base", "instructor-large", "instructor-xl"})
# Pooling types of `--pooler-config` that add a task and do not change the vectors.
SPLADE, STEP = "splade", "step"


class PoolingSpec(msgspec.Struct, frozen=True):
    methods: tuple[str, ...]  # several are concatenated
    include_prompt: bool = True
    modules: tuple[ModuleSpec, ...] = ()  # applied to the pooled vector, in this order
    normalize: bool = False  # scale to unit length, after all modules
    after: str | None = None  # the mean starts after this text
    activates: bool | None = None  # whether label scores are activated by default; None: the task decides
    quantizes: bool = False  # a component x becomes the integer round(127 · tanh(x)), as in pplx-embed


def read_pooling(
    files: CheckpointFiles, architecture: Architecture, pooler: PoolerConfig, *, is_late: bool
) -> PoolingSpec:
    """Read how the model pools. If `is_late`, Dense modules project token vectors, not the pooled vector."""
    if files.modules and not architecture.family.has_own_pooling:
        pooling = pooling_of_modules(files, is_late=is_late)
        if architecture.family.is_dual:
            pooling = msgspec.structs.replace(pooling, methods=(architecture.family.pooling,))
    else:
        pooling = default_pooling(architecture, files.config)
    if pooler.pooling_type is not None and not any(is_pooling_type(pooler, kind) for kind in (SPLADE, STEP)):
        pooling = msgspec.structs.replace(pooling, methods=(pooling_method(pooler.pooling_type),))
    if pooler.normalize is not None:
        pooling = msgspec.structs.replace(pooling, normalize=pooler.normalize)
    if pooler.use_activation is not None:
        pooling = msgspec.structs.replace(pooling, activates=pooler.use_activation)
    return pooling


def static_pooling(files: CheckpointFiles, pooler: PoolerConfig, *, normalize: bool) -> PoolingSpec:
    """The mean of token vectors, then the modules after the table. `normalize` applies without modules."""
    if pooler.pooling_type is not None and pooler.pooling_type.lower() not in ("mean", "avg"):
        raise ModelLoadError(
            f"pooling_type is {pooler.pooling_type!r}, but static embeddings are averaged; use mean",
            param="pooler_config",
        )
    pooling = (
        pooling_of_modules(files, is_late=False)
        if files.modules
        else PoolingSpec(("mean",), normalize=normalize)
    )
    for module in files.modules[1:]:
        if module.kind not in _AFTER_STATIC:
            raise ModelLoadError(
                f"{files.root / 'modules.json'} has a {module.kind} module after a StaticEmbedding, which "
                f"is not supported; supported: {', '.join(_AFTER_STATIC)}",
                param="model",
            )
    if pooler.normalize is not None:
        pooling = msgspec.structs.replace(pooling, normalize=pooler.normalize)
    return pooling


def default_pooling(architecture: Architecture, config: Mapping[str, Any]) -> PoolingSpec:
    """The pooling without modules.json. Decoders get the method that their embedders are trained with."""
    family = architecture.family
    if not family.is_decoder:
        return PoolingSpec(methods=(family.pooling,), normalize=family.is_dual)
    if family.is_causal(config):
        return PoolingSpec(methods=(family.causal_pooling,), normalize=True)
    method = pooling_method(str(config.get("pooling", family.pooling)))
    after = family.embed_mark if method == "mean" else None
    return PoolingSpec((method,), include_prompt=family.pools_prompt, normalize=True, after=after)


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


def pooling_of_modules(files: CheckpointFiles, *, is_late: bool) -> PoolingSpec:
    """The pooling that modules.json describes."""
    methods: tuple[str, ...] = ("mean",)
    include_prompt = True
    quantizes = files.has_module(QUANTIZER_MODULE)
    if quantizes and files.modules[-1].kind != QUANTIZER_MODULE:
        raise ModelLoadError(
            f"{files.root / 'modules.json'} has a module after {QUANTIZER_MODULE}, which is not supported"
        )
    for module in files.modules_of("Pooling"):
        file, values = files.root / module.path / "config.json", files.module_config(module)
        refuse_unknown_keys(file, values, _POOLING_KEYS)
        methods = _methods(values, file)
        include_prompt = bool(values.get("include_prompt", not _is_instructor(files.root)))
    if is_late:
        return PoolingSpec(methods, include_prompt, normalize=files.has_module("Normalize"))
    modules = list(_after_pooling(files))
    normalize = bool(modules) and isinstance(modules[-1], UnitSpec)
    while modules and isinstance(modules[-1], UnitSpec):
        modules.pop()  # repeated normalisation changes nothing
    return PoolingSpec(methods, include_prompt, tuple(modules), normalize, quantizes=quantizes)


def _after_pooling(files: CheckpointFiles) -> Iterator[ModuleSpec]:
    """The modules applied to a pooled vector, in the order of modules.json as in sentence-transformers."""
    for number, module in enumerate(files.modules):
        if module.kind not in ("Dense", "LayerNorm", "Normalize"):
            continue
        if any(later.kind == "Pooling" for later in files.modules[number:]):
            raise ModelLoadError(
                f"{files.root / 'modules.json'} has the {module.kind} module {module.path} before a Pooling "
                "module, which is not supported; it has to come after it",
                param="model",
            )
        if module.kind == "Dense":
            yield read_dense(files.root, module.path)
        elif module.kind == "LayerNorm":
            yield read_layer_norm(files.root, module.path)
        else:
            check_normalize(files.root, module.path)
            yield UnitSpec()


def check_widths(files: CheckpointFiles, pooling: PoolingSpec, width: int) -> int:
    """Check that the sizes of the modules match, and return the size of the final vector."""
    for module in pooling.modules:
        expected = None
        if isinstance(module, DenseSpec):
            expected = module.in_features
        elif isinstance(module, LayerNormSpec):
            expected = module.size
        if expected is not None and expected != width:
            path = "" if isinstance(module, UnitSpec) else module.folder
            raise ModelLoadError(
                f"{files.root / path} reads vectors of {expected} numbers, but it is given {width}",
                param="model",
            )
        width = module.out_features if isinstance(module, DenseSpec) else width
    return width


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
