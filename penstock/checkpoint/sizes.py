"""Checks the numbers in config.json: types, ranges, and consistency with one another, with the weight files
and with the machine's memory.

Checkpoints are not trusted. Every number that decides how much is allocated or computed is checked here,
before anything is built from it. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.checkpoint.families import Architecture, Family
from penstock.checkpoint.files import shown, weight_files
from penstock.errors import ModelLoadError


class _Range(NamedTuple):
    low: float
    high: float
    may_be_null: bool = True

    @property
    def words(self) -> str:
        return f"an integer from {self.low:,} to {self.high:,}"


class _Number(NamedTuple):
    low: float  # exclusive
    high: float
    may_be_null: bool = True

    @property
    def words(self) -> str:
        return f"a number above {self.low:g}, up to {self.high:g}"


_HIDDEN, _HEADS, _LAYERS = _Range(1, 1 << 16, False), _Range(1, 1024, False), _Range(1, 1024, False)
_INNER, _POSITIONS = _Range(1, 1 << 20), _Range(1, 1 << 24)
_INTEGERS: dict[str, _Range] = {
    "hidden_size": _HIDDEN,
    "n_embd": _HIDDEN,
    "dim": _HIDDEN,
    "d_model": _HIDDEN,
    "d_kv": _Range(1, 1024),
    "d_ff": _INNER,
    "num_layers": _LAYERS,
    "num_heads": _HEADS,
    "embedding_size": _Range(1, 1 << 16),
    "num_hidden_layers": _LAYERS,
    "n_layers": _LAYERS,
    "n_layer": _LAYERS,
    "num_attention_heads": _HEADS,
    "n_heads": _HEADS,
    "n_head": _HEADS,
    "num_key_value_heads": _Range(1, 1024),
    "head_dim": _Range(1, 1024),
    "global_head_dim": _Range(1, 1024),
    "num_global_key_value_heads": _Range(1, 1024),
    "hidden_size_per_layer_input": _Range(1, 1 << 16),
    "embedding_dim": _Range(1, 1 << 16),
    "intermediate_size": _INNER,
    "hidden_dim": _INNER,
    "n_inner": _INNER,
    "moe_intermediate_size": _INNER,
    "num_experts": _Range(0, 1024),
    "num_local_experts": _Range(0, 1024),
    "num_experts_per_tok": _Range(0, 1024),
    "moe_top_k": _Range(1, 1024),
    "moe_every_n_layers": _Range(0, 1024),
    "decoder_sparse_step": _Range(1, 1024),
    "vocab_size": _Range(1, 1 << 24, False),
    "pad_vocab_size_multiple": _Range(1, 1 << 16),
    "type_vocab_size": _Range(0, 1 << 16, False),
    "max_position_embeddings": _POSITIONS,
    "n_positions": _POSITIONS,
    "n_ctx": _POSITIONS,
    "max_trained_positions": _POSITIONS,
    "original_max_position_embeddings": _POSITIONS,
    "sliding_window": _Range(0, 1 << 24),
    "sliding_window_pattern": _Range(0, 1024),
    "_sliding_window_pattern": _Range(1, 1024),
    "max_window_layers": _Range(0, 1 << 16),
    "no_rope_layer_interval": _Range(1, 1024),
    "local_attention": _Range(2, 1 << 24, False),
    "global_attn_every_n_layers": _Range(1, 1024, False),
    "relative_attention_num_buckets": _Range(4, 1 << 16, False),
    "relative_attention_max_distance": _Range(2, 1 << 16, False),
    "max_relative_positions": _Range(-1, 1 << 16, False),
    "position_buckets": _Range(-1, 1 << 16, False),
    "conv_kernel_size": _Range(0, 1023),
    "conv_groups": _Range(1, 1 << 16),
    "num_hidden_groups": _Range(1, 1024, False),
    "inner_group_num": _Range(1, 64, False),
    "task_type_vocab_size": _Range(1, 1 << 16),
    "conv_L_cache": _Range(1, 1023),
    "block_ff_dim": _INNER,
    "block_multiple_of": _Range(1, 1 << 20),
    "num_labels": _Range(0, 1 << 20),
    "lora_rank": _Range(1, 1 << 16),
}
_EPS, _BASE, _POSITIVE = _Number(0, 1, False), _Number(1, 1e15), _Number(0, 1e9)
_NUMBERS: dict[str, _Number] = {
    "layer_norm_eps": _EPS,
    "layer_norm_epsilon": _EPS,
    "rms_norm_eps": _EPS,
    "norm_eps": _EPS,
    "rope_theta": _BASE,
    "global_rope_theta": _BASE,
    "local_rope_theta": _BASE,
    "rope_local_base_freq": _BASE,
    "rotary_emb_base": _BASE,
    "rotary_scaling_factor": _POSITIVE,
    "query_pre_attn_scalar": _POSITIVE,
    "attn_logit_softcapping": _POSITIVE,
    "final_logit_softcapping": _POSITIVE,
    "temperature": _POSITIVE,
    "embedding_multiplier": _POSITIVE,
    "attention_multiplier": _POSITIVE,
    "residual_multiplier": _POSITIVE,
    "logits_scaling": _POSITIVE,
    "swiglu_alpha": _POSITIVE,
    "swiglu_limit": _POSITIVE,
    "block_ffn_dim_multiplier": _POSITIVE,
    "lora_alpha": _POSITIVE,
}
_ROPE_FACTORS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "mixed_b",
    "original_max_position_embeddings",
)
_ROPE_NUMBERS = dict.fromkeys(_ROPE_FACTORS, _POSITIVE) | {"rope_theta": _BASE}
_TEXTS = (
    "hidden_act",
    "hidden_activation",
    "activation",
    "activation_function",
    "conv_act",
    "feed_forward_proj",
    "feed_forward_type",
    "pooler_hidden_act",
)
_LISTS = (
    "layer_types",
    "no_rope_layers",
    "full_attn_idxs",
    "mlp_only_layers",
    "lora_adaptations",
    "task_names",
)
_OBJECTS = (
    "per_layer_config",
    "id2label",
    "label2id",
    "auto_map",
    "quantization_config",
    "compression_config",
)
_MAX_NESTED_ROPES = 8  # layer types with separate rotary options


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model's parts, checked for consistency."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    embedding: int  # width of the token table
    positions: int
    num_experts: int = 0
    expert_intermediate: int = 0
    is_gated: bool = False
    has_rotary_positions: bool = False
    stored_layers: int | None = None  # if stored layers are repeated

    @property
    def min_parameters(self) -> int:
        """Minimum number of parameters of a model of these sizes."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        mlp = (3 if self.is_gated else 2) * self.hidden * self.intermediate
        if self.num_experts:
            mlp = min(mlp, 3 * self.num_experts * self.hidden * self.expert_intermediate)
        layers = self.layers if self.stored_layers is None else self.stored_layers
        return self.vocabulary * self.embedding + layers * (attention + mlp)

    def rank_parameters(self, ranks: int) -> int:
        """Minimum number of parameters on each rank: the token table and a share of the layers."""
        table = self.vocabulary * self.embedding
        return table + (self.min_parameters - table) // ranks

    @property
    def position_table_bytes(self) -> int:
        """Memory needed to build the rotary tables: angles, cosines and sines in fp32."""
        return 10 * self.positions * self.head_dim if self.has_rotary_positions else 0


def read_sizes(file: Path, family: Family, config: Mapping[str, Any]) -> ModelSizes:
    """Check every number in `config`, which is from `file`, and return the sizes."""
    check_numbers(file, config)
    keys = family.keys
    hidden, heads = _first(file, config, keys.hidden_size), _first(file, config, keys.num_heads)
    is_modern = family.is_decoder and family.has_rotary_positions  # config.json may describe the heads
    kv_heads = config.get("num_key_value_heads") if is_modern else None
    head_dim = (config.get("head_dim") if is_modern else None) or family.default_head_dim
    if keys.head_dim:
        head_dim = _first(file, config, keys.head_dim)
    if head_dim is None:
        if hidden % heads:
            raise ModelLoadError(
                f"{file} has {keys.hidden_size[0]} = {hidden}, which is no multiple of "
                f"{keys.num_heads[0]} = {heads}",
                param="model",
            )
        head_dim = hidden // heads
    if kv_heads is not None and heads % kv_heads:
        raise ModelLoadError(
            f"{file} has num_attention_heads = {heads}, which is no multiple of "
            f"num_key_value_heads = {kv_heads}",
            param="model",
        )
    is_rotary = family.has_rotary_positions or config.get("position_embedding_type") == "rotary"
    if is_rotary and head_dim % 2:
        raise ModelLoadError(
            f"{file} gives heads of {head_dim} numbers; rotary positions need an even number", param="model"
        )
    groups = config.get("conv_groups") or 1
    if config.get("conv_kernel_size") and hidden % groups:
        raise ModelLoadError(
            f"{file} has hidden_size = {hidden}, which is no multiple of conv_groups = {groups}",
            param="model",
        )
    experts, expert_width = _experts(file, family, config)
    return ModelSizes(
        hidden=hidden,
        layers=_first(file, config, keys.num_layers),
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim,
        intermediate=_first(file, config, keys.intermediate_size, default=4 * hidden),
        vocabulary=_first(file, config, ("vocab_size",)),
        embedding=config.get("embedding_size") or hidden,
        positions=family.max_row_length or _first(file, config, keys.max_positions),
        num_experts=experts,
        expert_intermediate=expert_width,
        is_gated=is_modern,
        has_rotary_positions=is_rotary,
        stored_layers=_stored_layers(file, config) if family.shares_layers else None,
    )


def table_sizes(vocabulary: int, width: int) -> ModelSizes:
    """The sizes of a table of token vectors, without layers."""
    return ModelSizes(
        hidden=width,
        layers=0,
        heads=1,
        kv_heads=1,
        head_dim=width,
        intermediate=0,
        vocabulary=vocabulary,
        embedding=width,
        positions=0,
    )


def check_any_sizes(file: Path, architecture: Architecture, config: Mapping[str, Any]) -> None:
    """Refuse a configuration for transformers without a hidden size or a vocabulary size."""
    for keys in (architecture.family.keys.hidden_size, ("vocab_size",)):
        if not any(isinstance(config.get(key), int) for key in keys):
            raise ModelLoadError(
                f"{architecture.name} is not supported because {file} has no {' or '.join(keys)} of a model "
                f"that reads text alone; if it is one, name it with --hf-overrides '{{\"{keys[0]}\": N}}'",
                param="model",
            )


def check_numbers(file: Path, config: Mapping[str, Any]) -> None:
    """Check the type and range of every known key, whether or not this family reads it."""
    for key, accepted in _INTEGERS.items():
        if key in config:
            _check_integer(file, key, config[key], accepted)
    for key, number in _NUMBERS.items():
        if key in config:
            _check_number(file, key, config[key], number)
    for keys, kind, words in (
        (_TEXTS, str, "a string"),
        (_LISTS, list, "a list"),
        (_OBJECTS, dict, "an object"),
    ):
        for key in keys:
            if config.get(key) is not None and not isinstance(config[key], kind):
                raise _wrong(file, key, config[key], words)
    for key in ("rope_scaling", "rope_parameters"):
        _check_rope(file, key, config.get(key))


def check_weight_files(folder: Path, sizes: ModelSizes, min_bits: int = 8) -> None:
    """Refuse a configuration with more parameters than the folder's weight files can hold.

    Each parameter takes at least `min_bits`.
    """
    files = weight_files(folder)
    held = sum(file.stat().st_size for file in files if file.is_file())
    if files and all(file.is_file() for file in files) and sizes.min_parameters * min_bits > 8 * held:
        raise ModelLoadError(
            f"{folder / 'config.json'} describes a model of at least {sizes.min_parameters:,} parameters, "
            f"but the weight files hold only {held:,} bytes; check {_largest(sizes)}",
            param="model",
        )


def check_memory(sizes: ModelSizes, bytes_per_parameter: float, total_bytes: int, *, ranks: int = 1) -> None:
    """Refuse a model that is larger than the device's memory.

    With several tensor-parallel `ranks`, the device holds the share of one rank.
    """
    weights = int(sizes.rank_parameters(ranks) * bytes_per_parameter)
    if weights > total_bytes:
        raise ModelLoadError(
            f"the weights {f'of each of {ranks} ranks ' if ranks > 1 else ''}need at least {_gib(weights)}, "
            f"but the device has {_gib(total_bytes)}; check {_largest(sizes)} in config.json",
            param="model",
        )
    if weights + sizes.position_table_bytes > total_bytes:
        raise ModelLoadError(
            f"tables for max_position_embeddings = {sizes.positions} in config.json need "
            f"{_gib(sizes.position_table_bytes)} beside the weights, but the device has {_gib(total_bytes)}; "
            """lower it, for example with --hf-overrides '{"max_position_embeddings": 8192}'""",
            param="model",
        )


def _first(file: Path, config: Mapping[str, Any], keys: tuple[str, ...], default: int | None = None) -> int:
    """The value of the first key that is set. `check_numbers` has already checked it."""
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if value is None:
        raise ModelLoadError(f"{file} has no integer {' or '.join(keys)}", param="model")
    return int(value)


def _stored_layers(file: Path, config: Mapping[str, Any]) -> int:
    """The number of stored layers of a model that repeats them in groups."""
    groups, layers = config.get("num_hidden_groups") or 1, config.get("num_hidden_layers") or 1
    if layers % groups:
        raise ModelLoadError(
            f"{file} has num_hidden_layers = {layers}, which is no multiple of num_hidden_groups = {groups}",
            param="model",
        )
    return int(groups * (config.get("inner_group_num") or 1))


def _experts(file: Path, family: Family, config: Mapping[str, Any]) -> tuple[int, int]:
    """The number of experts and the width of each; zeros for a family without experts."""
    if not family.has_experts:
        return 0, 0
    count = _first(file, config, ("num_experts", "num_local_experts"))
    chosen = _first(file, config, ("num_experts_per_tok",), default=8)
    if not 1 <= chosen <= count:
        raise ModelLoadError(
            f"{file} has num_experts_per_tok = {chosen}; it has to be from 1 to num_experts = {count}",
            param="model",
        )
    return count, _first(file, config, ("moe_intermediate_size",), default=768)


def _check_integer(file: Path, key: str, value: Any, accepted: _Range) -> None:
    if value is None and accepted.may_be_null:
        return
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not accepted.low <= value <= accepted.high:
        raise _wrong(file, key, value, accepted.words)


def _check_number(file: Path, key: str, value: Any, accepted: _Number) -> None:
    if value is None and accepted.may_be_null:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not accepted.low < value <= accepted.high:
        raise _wrong(file, key, value, accepted.words)


def _check_rope(file: Path, key: str, value: Any) -> None:
    """Rotary options: one object, or one for each layer type."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise _wrong(file, key, value, "an object")
    nested = {name: part for name, part in value.items() if isinstance(part, dict)}
    if len(nested) > _MAX_NESTED_ROPES:
        raise _wrong(file, key, value, f"an object of at most {_MAX_NESTED_ROPES} layer types")
    for path, options in ((key, value), *((f"{key}.{name}", part) for name, part in nested.items())):
        for name, number in _ROPE_NUMBERS.items():
            _check_number(file, f"{path}.{name}", options.get(name), number)
        low, high = options.get("low_freq_factor"), options.get("high_freq_factor")
        if low is not None and high is not None and not low < high:
            raise _wrong(file, f"{path}.high_freq_factor", high, f"above low_freq_factor = {low}")


def _wrong(file: Path, key: str, value: Any, accepted: str) -> ModelLoadError:
    return ModelLoadError(f"{file} has {key} = {shown(value)}; it has to be {accepted}", param="model")


def _largest(sizes: ModelSizes) -> str:
    """The sizes that decide how large the model is, for error messages."""
    parts = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.intermediate,
        "head_dim": sizes.head_dim,
    }
    return ", ".join(f"{name} = {value}" for name, value in parts.items())


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
