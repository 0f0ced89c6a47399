"""Whether a model supports tensor parallelism, and with how many ranks. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.families import FAMILIES, find_architecture
from penstock.checkpoint.quantization import stored_format
from penstock.checkpoint.sizes import ModelSizes
from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.errors import ConfigError

_PARAM = "tensor_parallel_size"


def check_shards(spec: ModelSpec, settings: Resolved) -> None:
    """Refuse models and options without tensor parallelism, and sizes that do not divide the model evenly."""
    size = settings.tensor_parallel_size
    if size == 1 or settings.device == "null":
        return
    if (why := _why_whole(spec, settings)) is not None:
        raise ConfigError(f"tensor_parallel_size is {size}, but {why}; leave it at 1", param=_PARAM)
    sizes, inner = spec.sizes, _divided_widths(spec)
    if _fits(size, sizes, inner):
        return
    accepted = [number for number in range(1, sizes.heads + 1) if _fits(number, sizes, inner)]
    parts = [f"{sizes.heads} attention heads"]
    if sizes.kv_heads != sizes.heads:
        parts.append(f"{sizes.kv_heads} key and value heads")
    parts += [f"{name} = {count}" for name, count in inner.items()]
    raise ConfigError(
        f"tensor_parallel_size is {size}, but {spec.architecture} has {', '.join(parts)}, which "
        f"{size} ranks cannot divide evenly; use {_listed(accepted)}",
        param=_PARAM,
    )


def _why_whole(spec: ModelSpec, settings: Resolved) -> str | None:
    """Why a model can only run on one device; None if it can be divided."""
    if spec.static is not None:
        return "static embeddings are a table, which is not divided"
    if settings.model_impl == "transformers":
        return "models that transformers runs are not divided"
    if spec.adapters:
        return f"{spec.architecture} has task adapters, which are not divided"
    if (stored := stored_format(spec.config)) is not None:
        return f"its weights are stored quantised ({stored.method}), and such weights are not divided"
    family = find_architecture(spec.architecture, spec.config).family
    if not family.is_divided:
        return f"{spec.architecture} is not divided; tensor parallel works with {_divided_families()}"
    return None


def _divided_widths(spec: ModelSpec) -> Mapping[str, int]:
    """The sizes that are divided besides attention heads, by their key in config.json: the width of
    feed-forward blocks, and the number of experts."""
    config, sizes = spec.config, spec.sizes
    experts = sizes.num_experts or int(config.get("num_experts") or 0)
    if not experts:
        return {"intermediate_size": sizes.intermediate}
    return {"num_experts": experts} | (
        {"intermediate_size": sizes.intermediate} if _has_dense_layers(sizes, config) else {}
    )


def _has_dense_layers(sizes: ModelSizes, config: Mapping[str, Any]) -> bool:
    """Whether a model with experts also has layers without experts."""
    if not sizes.num_experts:  # NomicBERT, in which at most every other layer has experts
        return True
    return bool(config.get("mlp_only_layers")) or (config.get("decoder_sparse_step") or 1) != 1


def _fits(size: int, sizes: ModelSizes, widths: Mapping[str, int]) -> bool:
    """Whether heads and `widths` divide evenly by `size`. Several ranks may share a key and value head."""
    kv_heads = sizes.kv_heads
    shares_kv = kv_heads % size == 0 if kv_heads >= size else size % kv_heads == 0
    return shares_kv and not any(count % size for count in (sizes.heads, *widths.values()))


def _divided_families() -> str:
    return ", ".join(sorted(family.class_prefix for family in FAMILIES.values() if family.is_divided))


def _listed(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
