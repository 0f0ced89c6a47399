"""ModernBERT: pre-norm, gated feed-forward, rotary positions, a sliding window in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.attention import BIDIRECTIONAL, AttentionKind, attend
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.embedding import EncoderEmbedding
from penstock.layers.head import TaskHead
from penstock.layers.mlp import GatedMLP
from penstock.layers.norm import LayerNorm
from penstock.layers.parallel import Units
from penstock.layers.residual import pre_norm_residual
from penstock.layers.rotary import Angles, Rotary
from penstock.models.heads import MODERNBERT_MLM, MaskedLMShape, add_head, add_masked_lm_head
from penstock.models.options import rope_options
from penstock.types import Task

FULL, SLIDING = "full_attention", "sliding_attention"
IGNORED = ("head.", "decoder.", "classifier.")


class ModernBertLayer:
    is_last = False  # whether this is the model's last layer, whose output only a pooler reads

    def __init__(self, build: LayerBuilder, prefix: str, config: Mapping[str, Any], kind: str) -> None:
        hidden, inner = config["hidden_size"], Units(config["intermediate_size"])
        eps, norm_bias = config.get("norm_eps", 1e-5), bool(config.get("norm_bias"))
        bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
        self.kind = kind
        heads = Units(config["num_attention_heads"], hidden // config["num_attention_heads"])
        self.heads = build.num_heads(heads.count)
        window = AttentionKind(window=config.get("local_attention", 128) // 2)
        self.attention = window if kind == SLIDING else BIDIRECTIONAL
        self.qkv = build.column(prefix + "attn.Wqkv", hidden, [heads] * 3, bias=bias)
        self.out = build.row(prefix + "attn.Wo", heads, hidden, bias=bias)
        self.mlp_norm = build.norm(prefix + "mlp_norm", hidden, eps, bias=norm_bias)
        self.mlp = GatedMLP(
            build.column(prefix + "mlp.Wi", hidden, [inner, inner], bias=mlp_bias),
            build.row(prefix + "mlp.Wo", inner, hidden, bias=mlp_bias),
            config.get("hidden_activation", "gelu"),
        )
        self.mlp_norm.quantize_for(self.mlp.input_layer)

    def __call__(
        self,
        hidden: Tensor,
        normed: Activations,
        batch: Batch,
        rotary: Rotary,
        angles: Angles,
        next_norm: LayerNorm,
    ) -> tuple[Tensor, Activations]:
        """The hidden states after this layer, plain and normalised by `next_norm`."""
        query, key, value = rotary.rotate_qkv(self.qkv(normed), self.heads, angles)
        context = attend(query, key, value, batch, self.attention)
        if self.is_last:
            context, hidden = batch.select_outputs(context, hidden)
        hidden, normed = pre_norm_residual(self.out, self.mlp_norm, context, hidden)
        return pre_norm_residual(self.mlp, next_norm, normed, hidden)


class ModernBert:
    """token ids → hidden states [tokens, hidden]."""

    def __init__(self, build: LayerBuilder, config: Mapping[str, Any]) -> None:
        hidden: int = config["hidden_size"]
        eps, norm_bias = config.get("norm_eps", 1e-5), bool(config.get("norm_bias"))
        self.prefix = build.weights.prefix_of("embeddings.tok_embeddings.weight")
        self.embedding = EncoderEmbedding(
            build.table(self.prefix + "embeddings.tok_embeddings", config["vocab_size"], hidden),
            positions=None,
            segments=None,
            norm=build.norm(self.prefix + "embeddings.norm", hidden, eps, bias=norm_bias),
        )
        kinds = _layer_kinds(config)
        self.rotary = {kind: _rotary(build, config, kind) for kind in set(kinds)}
        self.layers = [
            ModernBertLayer(build, f"{self.prefix}layers.{i}.", config, kind) for i, kind in enumerate(kinds)
        ]
        self.layers[-1].is_last = True
        # Norm i follows layer i and feeds the attention of layer i + 1. The embedding's norm feeds layer 0.
        names = [*(f"layers.{i}.attn_norm" for i in range(1, len(kinds))), "final_norm"]
        self.norms = [build.norm(self.prefix + name, hidden, eps, bias=norm_bias) for name in names]
        for before, layer in zip(self.norms, self.layers[1:], strict=False):  # the last norm feeds no layer
            before.quantize_for(layer.qkv)
        self.hidden_size = hidden
        self.is_causal = False
        self.prunes_last_layer = True
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors: tuple[str, ...] = IGNORED

    def __call__(self, batch: Batch) -> Tensor:
        hidden = self.embedding(batch)
        normed: Activations = hidden
        angles = {kind: rotary.angles(batch) for kind, rotary in self.rotary.items()}
        for layer, next_norm in zip(self.layers, self.norms, strict=True):
            kind = layer.kind
            hidden, normed = layer(hidden, normed, batch, self.rotary[kind], angles[kind], next_norm)
        return dequantize(normed)


def modernbert(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> ModernBert:
    model = ModernBert(build, config)
    hidden, eps = model.hidden_size, config.get("norm_eps", 1e-5)
    act = config.get("classifier_activation", "gelu")
    bias, norm_bias = bool(config.get("classifier_bias")), bool(config.get("norm_bias"))
    if head is Task.SPARSE:
        shape = MaskedLMShape(
            names=MODERNBERT_MLM,
            act=act,
            eps=eps,
            dense_bias=bias,
            norm_bias=norm_bias,
            decoder_bias=bool(config.get("decoder_bias", True)),
        )
        add_masked_lm_head(model, build, config, model.embedding.words, shape)
    elif head is not None:
        dense = build.linear("head.dense", hidden, hidden, act, bias=bias)
        norm = build.norm("head.norm", hidden, eps, bias=norm_bias)
        add_head(model, build, config, head, "classifier", dense, norm, method=_pooling(config))
    return model


def _pooling(config: Mapping[str, Any]) -> str:
    method = str(config.get("classifier_pooling", "cls"))
    if method not in ("cls", "mean"):
        raise ModelLoadError(
            f"config.json has classifier_pooling = {method!r}, which is not supported; supported: cls, mean"
        )
    return method


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    every = config.get("global_attn_every_n_layers", 3)
    count = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [SLIDING if i % every else FULL for i in range(count)]
    if len(kinds) != count or not set(kinds) <= {FULL, SLIDING}:
        raise ModelLoadError(
            f"config.json has layer_types = {kinds!r}; it has to be {count} of {FULL}, {SLIDING}"
        )
    return list(kinds)


def _rotary(build: LayerBuilder, config: Mapping[str, Any], kind: str) -> Rotary:
    local = kind == SLIDING and config.get("local_rope_theta", 0) is not None  # null: same as global layers
    name, default = ("local_rope_theta", 10_000) if local else ("global_rope_theta", 160_000)
    rope = rope_options(config, name, default=default, layer_type=kind)
    return Rotary(
        config["hidden_size"] // config["num_attention_heads"],
        config["max_position_embeddings"],
        rope.base,
        device=build.weights.device,
        dtype=build.weights.dtype,
        scaling=rope.scaling,
    )
