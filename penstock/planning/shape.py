"""The work of a model per token: matrix products, attention and memory traffic."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import msgspec

from penstock.checkpoint.families import find_architecture
from penstock.checkpoint.files import weight_files
from penstock.checkpoint.sizes import ModelSizes
from penstock.checkpoint.spec import ModelSpec
from penstock.checkpoint.tensors import StoredTensor, stored_tensors
from penstock.errors import BadValue

# Encoders with a gated feed-forward block, which has a third matrix.
_GATED = frozenset({"modernbert", "gte", "new", "nomic_bert", "JinaBert"})
# Families whose config.json is not sufficient: layers differ, or experts have special keys.
_COUNTED_IN_FILES = frozenset(
    {
        *("embedding_gemma2", "embedding_gemma2_text", "gpt_oss", "lfm2", "lfm2_bidirectional"),
        *("nvembed", "openai_privacy_filter"),
    }
)
_LAYER = re.compile(r"(^|\.)(layers?|h|blocks?|albert_layers|encoder_layers)\.\d+\.")
_BF16_BYTES = 2


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The sizes that determine the cost of a token. A multiply-add counts as two FLOPs."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    is_gated: bool = False
    is_causal: bool = False
    active_experts: int = 0  # experts per token and layer; 0: the model has none
    expert_intermediate: int = 0
    local_layers: int = 0  # layers that attend to a window
    window: int = 0  # tokens in the window of local layers
    head_weights: int = 0  # weights of a matrix after the layers, applied to every token
    # Weights counted in the files: of the layers' matrices, and of a token's experts. None: use the sizes.
    dense_weights: int | None = None
    expert_weights: int | None = None

    @cached_property
    def dense_flops(self) -> float:
        """FLOPs per token in the matrix products that apply to every token."""
        if self.dense_weights is not None:
            return 2.0 * (self.dense_weights + self.head_weights)
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        mlp = 0 if self.active_experts else (3 if self.is_gated else 2) * self.hidden * self.intermediate
        return 2.0 * (self.layers * (attention + mlp) + self.head_weights)

    @cached_property
    def expert_flops(self) -> float:
        """FLOPs per token in its experts."""
        if self.expert_weights is not None:
            return 2.0 * self.expert_weights
        return 2.0 * self.layers * 3 * self.hidden * self.active_experts * self.expert_intermediate

    def attention_flops(self, length: float) -> float:
        """Compute the mean FLOPs per token for attention in a row of `length` tokens: scores and weighted
        sum of values."""
        share = 0.5 if self.is_causal else 1.0
        seen = (self.layers - self.local_layers) * share * length
        seen += self.local_layers * min(share * length, self.window)
        return 4.0 * self.heads * self.head_dim * seen

    @cached_property
    def moved_bytes(self) -> float:
        """Bytes of bf16 activations per token that are written to and read from memory."""
        inner = self.active_experts * self.expert_intermediate or self.intermediate
        inner *= 2 if self.is_gated else 1
        numbers = 2 * self.hidden + (self.heads + 2 * self.kv_heads) * self.head_dim + inner
        return 2.0 * _BF16_BYTES * self.layers * numbers

    @property
    def same_work(self) -> tuple[Any, ...]:
        """A key that is equal for shapes with the same cost."""
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.is_causal)
        return (*sizes, self.local_layers, round(self.dense_flops / 1e5), round(self.expert_flops / 1e5))

    def step_bytes(self, tokens: int) -> float:
        """Estimate the bytes of activations at the widest point of a step."""
        inner = self.active_experts * self.expert_intermediate or self.intermediate
        widest = max((self.heads + 2 * self.kv_heads) * self.head_dim, inner * (3 if self.is_gated else 2))
        return float(_BF16_BYTES * tokens * (3 * self.hidden + widest))


def model_shape(spec: ModelSpec) -> ModelShape:
    """Read the shape of a model from its config.json and the headers of its weight files."""
    if spec.static is not None:
        raise BadValue(
            f"{spec.name} holds static embeddings, for which no rates are recorded: a CPU is enough. "
            "Measure it with --measure, or give --rate",
            param="--model",
        )
    family = find_architecture(spec.architecture, spec.config).family
    sizes = spec.sizes
    active, experts = _experts(spec.config, sizes)
    counted = _count_weights(spec, sizes, active / experts if experts else 0.0)
    needs_files = family.name in _COUNTED_IN_FILES or bool(spec.config.get("moe_every_n_layers"))
    if counted is None and needs_files:
        raise BadValue(
            f"the weights of {spec.architecture} are counted in its files, and {spec.path} has none that are "
            "stored unquantised as safetensors; measure with --measure, or give --rate",
            param="--model",
        )
    local, window = _windows(spec.config, sizes.layers)
    return ModelShape(
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate=sizes.intermediate,
        is_gated=_is_gated(family.name, spec.config, sizes),
        is_causal=spec.is_causal,
        active_experts=active,
        expert_intermediate=sizes.expert_intermediate or (sizes.intermediate if active else 0),
        local_layers=local,
        window=window,
        head_weights=_head_weights(spec, sizes),
        dense_weights=None if counted is None else counted[0],
        expert_weights=None if counted is None or not active else counted[1],
    )


def _is_gated(family: str, config: dict[str, Any], sizes: ModelSizes) -> bool:
    return sizes.is_gated or family in _GATED or "gated" in str(config.get("feed_forward_proj", ""))


def _experts(config: dict[str, Any], sizes: ModelSizes) -> tuple[int, int]:
    """Return the numbers of experts per token and per layer; zeros for a model without experts."""
    count = sizes.num_experts or int(config.get("num_local_experts") or config.get("num_experts") or 0)
    if count < 2:
        return 0, 0
    chosen = config.get("num_experts_per_tok") or config.get("moe_top_k") or (8 if sizes.num_experts else 1)
    return min(int(chosen), count), count


def _windows(config: dict[str, Any], layers: int) -> tuple[int, int]:
    """Return the number of layers with local attention, and their window. Windows that config.json describes
    in other ways count as full attention."""
    types = config.get("layer_types")
    if isinstance(types, list) and config.get("sliding_window"):
        return types[:layers].count("sliding_attention"), int(config["sliding_window"])
    every = config.get("global_attn_every_n_layers")
    if every and config.get("local_attention"):  # ModernBERT: layer 0 is global
        return layers - -(-layers // int(every)), int(config["local_attention"])
    return 0, 0


def _head_weights(spec: ModelSpec, sizes: ModelSizes) -> int:
    """Return the weights of the vocabulary projection, which SPLADE applies to every token; otherwise 0."""
    is_splade = spec.sparse is not None and spec.sparse.kind == "splade"
    return sizes.vocabulary * sizes.hidden if is_splade else 0


def _count_weights(spec: ModelSpec, sizes: ModelSizes, active_share: float) -> tuple[int, int] | None:
    """Count the weights of the layers' matrices that apply to a token: shared ones, and those of its experts.
    None if the files cannot be counted."""
    files = weight_files(spec.path)
    is_readable = files and all(file.is_file() and file.suffix == ".safetensors" for file in files)
    if not is_readable or spec.config.get("quantization_config"):
        return None
    dense = experts = 0
    for file in files:
        for name, tensor in stored_tensors(file).items():
            if not _is_layer_matrix(name, tensor):
                continue
            if "experts" in name:
                experts += _numbers(tensor)
            else:
                dense += _numbers(tensor)
    if not dense:
        return None
    repeats = sizes.layers / sizes.stored_layers if sizes.stored_layers else 1
    return round(dense * repeats), round(experts * repeats * active_share)


def _is_layer_matrix(name: str, tensor: StoredTensor) -> bool:
    is_matrix = len(tensor.shape) in (2, 3) and min(tensor.shape[-2:]) > 1
    return is_matrix and _LAYER.search(name) is not None and "lora" not in name and "embed" not in name


def _numbers(tensor: StoredTensor) -> int:
    count = 1
    for length in tensor.shape:
        count *= length
    return count
