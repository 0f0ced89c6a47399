"""The encoders of T5 and mT5: sentence-t5, gtr-t5, INSTRUCTOR. Pre-norm, without biases. Positions enter only
as a bias on attention scores, which all layers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.attention import AttentionKind, attend_fused
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.distance_bias import DistanceBias, distance_bucket
from penstock.layers.head import TaskHead
from penstock.layers.mlp import MLP, GatedMLP
from penstock.layers.norm import RMSNorm
from penstock.layers.residual import pre_norm_residual
from penstock.models.options import require, with_defaults
from penstock.types import Task

IGNORED = ("decoder.", "lm_head.")


class T5Layer:
    is_last = False  # whether this is the model's last layer, whose output only a pooler reads

    def __init__(
        self, build: LayerBuilder, prefix: str, config: Mapping[str, Any], kind: AttentionKind
    ) -> None:
        hidden, width = config["d_model"], config["num_heads"] * config["d_kv"]
        own = prefix + "layer.0.SelfAttention."
        self.heads: int = config["num_heads"]
        self.kind = kind
        self.qkv = build.linear([own + name for name in "qkv"], hidden, width, bias=False)
        self.out = build.linear(own + "o", width, hidden, bias=False)
        self.mlp_norm = build.rms_norm(prefix + "layer.1.layer_norm", hidden, _eps(config))
        self.mlp = _mlp(build, prefix + "layer.1.DenseReluDense.", config)
        self.mlp_norm.quantize_for(self.mlp.input_layer)

    def __call__(
        self, hidden: Tensor, normed: Activations, batch: Batch, next_norm: RMSNorm
    ) -> tuple[Tensor, Activations]:
        context = attend_fused(self.qkv(normed), self.heads, batch, self.kind)
        if self.is_last:
            context, hidden = batch.select_outputs(context, hidden)
        hidden, normed = pre_norm_residual(self.out, self.mlp_norm, context, hidden)
        return pre_norm_residual(self.mlp, next_norm, normed, hidden)


class T5Encoder:
    """token ids → hidden states [tokens, hidden]."""

    def __init__(self, build: LayerBuilder, config: Mapping[str, Any]) -> None:
        hidden: int = config["d_model"]
        self.prefix = build.weights.prefix_of("encoder.final_layer_norm.weight") + "encoder."
        self.embedding = _words(build, self.prefix, config["vocab_size"], hidden)
        self.adapted_words = build.adapted_table(self.prefix + "embed_tokens", self.embedding)
        kind = AttentionKind(scale=1.0, bias=_bias(build, self.prefix + "block.0.", config))
        count = config["num_layers"]
        self.layers = [T5Layer(build, f"{self.prefix}block.{i}.", config, kind) for i in range(count)]
        self.layers[-1].is_last = True
        # Norm i feeds the attention of layer i; it runs together with layer i - 1.
        names = [*(f"block.{i}.layer.0.layer_norm" for i in range(count)), "final_layer_norm"]
        self.norms = [build.rms_norm(self.prefix + name, hidden, _eps(config)) for name in names]
        for before, layer in zip(self.norms[1:], self.layers[1:], strict=False):  # the last feeds no layer
            before.quantize_for(layer.qkv)
        self.hidden_size = hidden
        self.is_causal = False
        self.prunes_last_layer = True
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors = IGNORED

    def __call__(self, batch: Batch) -> Tensor:
        hidden = F.embedding(batch.token_ids, self.embedding)
        if self.adapted_words is not None:
            self.adapted_words.change_(hidden, batch.token_ids)
        normed: Activations = self.norms[0](hidden)
        for layer, next_norm in zip(self.layers, self.norms[1:], strict=True):
            hidden, normed = layer(hidden, normed, batch, next_norm)
        return dequantize(normed)


def t5(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> T5Encoder:
    if build.weights.dtype == torch.float16:
        raise ModelLoadError(
            "T5 overflows in float16; use --dtype bfloat16, or --dtype float32 where the GPU has no bfloat16",
            param="dtype",
        )
    require(config, is_decoder=False)
    return T5Encoder(build, config)


def mt5(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> T5Encoder:
    return t5(build, with_defaults(config, feed_forward_proj="gated-gelu"), head)


def _eps(config: Mapping[str, Any]) -> float:
    return float(config.get("layer_norm_epsilon", 1e-6))


def _words(build: LayerBuilder, prefix: str, vocabulary: int, hidden: int) -> Tensor:
    """The word table, which is stored under one of two names or both."""
    own, shared = prefix + "embed_tokens", prefix.removesuffix("encoder.") + "shared"
    if build.weights.has(f"{shared}.weight") and build.weights.has(f"{own}.weight"):
        build.table(own, vocabulary, hidden)  # the same tensor
    return build.table(shared if build.weights.has(f"{shared}.weight") else own, vocabulary, hidden)


def _bias(build: LayerBuilder, prefix: str, config: Mapping[str, Any]) -> DistanceBias:
    buckets = config.get("relative_attention_num_buckets", 32)
    reach = config.get("relative_attention_max_distance", 128)  # larger distances share a bucket
    if reach <= buckets // 4:
        raise ModelLoadError(
            f"config.json has relative_attention_max_distance = {reach}; it has to be above a quarter of "
            f"relative_attention_num_buckets = {buckets}"
        )
    table = build.table(
        prefix + "layer.0.SelfAttention.relative_attention_bias", buckets, config["num_heads"]
    )  # [buckets, heads]
    ahead = torch.arange(-reach, reach + 1, device=table.device)
    return DistanceBias(table[distance_bucket(ahead, buckets, reach)].t(), reach)


def _mlp(build: LayerBuilder, prefix: str, config: Mapping[str, Any]) -> MLP | GatedMLP:
    kind = str(config.get("feed_forward_proj", "relu"))
    hidden, inner = config["d_model"], config["d_ff"]
    gate, _, act = kind.rpartition("-")
    if gate not in ("", "gated"):
        raise ModelLoadError(
            f"config.json has feed_forward_proj = {kind!r}; it has to be an activation, or gated- and one"
        )
    down = build.linear(prefix + "wo", inner, hidden, bias=False)
    if not gate:
        return MLP(build.linear(prefix + "wi", hidden, inner, act, bias=False), down)
    up = build.linear([prefix + "wi_0", prefix + "wi_1"], hidden, inner, bias=False)
    return GatedMLP(up, down, "gelu_new" if act == "gelu" else act)
