"""EmbeddingGemma 2: bidirectional attention over text and images, with head sizes that differ by layer.

Each layer ends with a third residual block, gated by a projection of the token's embedding ("per-layer
embedding"). A final projection widens the states to the size of the output vectors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.gemma_vision import read_gemma_vision
from penstock.errors import ModelLoadError
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.activation import activation
from penstock.layers.attention import AttentionKind, attend
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.head import TaskHead
from penstock.layers.images import VisionTower
from penstock.layers.linear import make_linear
from penstock.layers.mlp import GatedMLP
from penstock.layers.norm import RMSNorm, sandwich
from penstock.layers.rotary import Angles, Rotary
from penstock.models.gemma_vision import GemmaVisionTower
from penstock.models.options import option, require, rope_options, with_defaults
from penstock.types import Task

log = logging.getLogger("penstock.models")

# Towers that are not loaded: audio, and images if the folder has no image processor.
_AUDIO = ("audio_tower.", "embed_audio.")
IGNORED = ("vision_tower.", "embed_vision.", *_AUDIO)
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
_WIDE_HEAD_DIM, _WIDE_KV_HEADS = 512, 1  # defaults for layers with full attention


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of one layer's attention."""

    is_sliding: bool
    head_dim: int
    kv_heads: int


class Attention:
    def __init__(
        self, build: LayerBuilder, prefix: str, config: Mapping[str, Any], shape: LayerShape, rotary: Rotary
    ) -> None:
        hidden, heads, dim, eps = (
            config["hidden_size"],
            config["num_attention_heads"],
            shape.head_dim,
            config["rms_norm_eps"],
        )
        widths = [count * dim for count in (heads, shape.kv_heads, shape.kv_heads)]
        bias = bool(config.get("attention_bias"))
        names = [prefix + name for name in ("q_proj", "k_proj", "v_proj")]
        self.qkv = build.linear(names, hidden, widths, bias=bias)
        self.out = build.linear(prefix + "o_proj", heads * dim, hidden, bias=bias)
        query_norm, key_norm = (build.rms_norm(prefix + name, dim, eps) for name in ("q_norm", "k_norm"))
        self.norms = (query_norm, key_norm)
        self.heads, self.kv_heads, self.head_dim, self.eps = heads, shape.kv_heads, dim, eps
        self.kind = AttentionKind(window=config["sliding_window"] if shape.is_sliding else None, scale=1.0)
        self.rotary = rotary

    def __call__(self, hidden: Activations, batch: Batch, angles: Angles) -> Tensor:
        """The context vectors, [tokens, heads · dim], before the output projection."""
        query, key, value = self.rotary.rotate_qkv(
            self.qkv(hidden), self.heads, angles, self.kv_heads, self.norms
        )
        value = F.rms_norm(value, (self.head_dim,), None, self.eps)  # the norm of values has no weight
        return attend(query, key, value, batch, self.kind)


class Layer:
    is_last = False  # whether this is the model's last layer, whose output only a pooler reads

    def __init__(
        self, build: LayerBuilder, prefix: str, config: Mapping[str, Any], shape: LayerShape, rotary: Rotary
    ) -> None:
        hidden, inner, act = config["hidden_size"], config["intermediate_size"], _activation(config)

        def norm(name: str) -> RMSNorm:
            return build.rms_norm(prefix + name, hidden, config["rms_norm_eps"])

        self.attention = Attention(build, prefix + "self_attn.", config, shape, rotary)
        gate_up = [prefix + "mlp.gate_proj", prefix + "mlp.up_proj"]
        self.mlp = GatedMLP(
            build.linear(gate_up, hidden, [inner, inner], bias=False),
            build.linear(prefix + "mlp.down_proj", inner, hidden, bias=False),
            act,
        )
        self.after_attention = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        self.mlp_norm.quantize_for(self.mlp.input_layer)
        self.after_mlp = norm("post_feedforward_layernorm")
        width = config["hidden_size_per_layer_input"]
        self.gate = build.linear(prefix + "ple_block.per_layer_input_gate", hidden, width, act, bias=False)
        self.project = build.linear(prefix + "ple_block.per_layer_projection", width, hidden, bias=False)
        self.after_gate = norm("ple_block.post_per_layer_input_norm")
        self.scale = float(build.weights.take(prefix + "layer_scalar", 1))

    def __call__(
        self, hidden: Tensor, normed: Activations, signal: Tensor, batch: Batch, angles: Angles
    ) -> Tensor:
        """The hidden states after this layer. `signal` is the layer's projection of the embeddings."""
        context = self.attention(normed, batch, angles)
        if self.is_last and batch.output_tokens is not None:
            signal = signal.index_select(0, batch.output_tokens.tokens)
        if self.is_last:
            context, hidden = batch.select_outputs(context, hidden)
        hidden, normed = sandwich(self.attention.out(context), hidden, self.after_attention, self.mlp_norm)
        hidden = hidden + self.after_mlp(self.mlp(normed))
        gated = self.gate(hidden).mul_(signal)
        return (hidden + self.after_gate(self.project(gated))).mul_(self.scale)


class EmbeddingGemma2:
    """token ids → projected hidden states, [tokens, embedding size]. A text model has no `vision`."""

    def __init__(
        self, build: LayerBuilder, config: Mapping[str, Any], vision: VisionTower | None = None
    ) -> None:
        require(config, is_causal=False)
        hidden, layers, weights = config["hidden_size"], config["num_hidden_layers"], build.weights
        prefix = weights.prefix_of("embed_tokens.weight")
        self.embedding = _word_table(build, prefix, config)
        self.vision = vision
        # The scale is rounded to the model's precision before it is applied.
        self.embedding_scale = float(torch.tensor(math.sqrt(hidden), dtype=weights.dtype))
        shapes = layer_shapes(config)
        self.rotaries = {shape: _rotary(build, config, shape) for shape in dict.fromkeys(shapes)}
        self.shapes = shapes
        self.layers = [
            Layer(build, f"{prefix}layers.{i}.", config, shape, self.rotaries[shape])
            for i, shape in enumerate(shapes)
        ]
        self.layers[-1].is_last = True
        eps, width = config["rms_norm_eps"], config["hidden_size_per_layer_input"]
        names = [*(f"layers.{i}.input_layernorm" for i in range(layers)), "norm"]
        self.norms = [build.rms_norm(prefix + name, hidden, eps) for name in names]
        for before, layer in zip(self.norms, self.layers, strict=False):  # the last norm feeds no layer
            before.quantize_for(layer.attention.qkv)
        stored = weights.take(prefix + "ple.per_layer_model_projection.weight", layers * width, hidden)
        self.signals = [make_linear(part, None, "identity", None) for part in stored.split(width)]
        self.signal_scale = hidden**-0.5
        self.signal_norm = build.rms_norm(prefix + "ple.per_layer_projection_norm", width, eps)
        self.hidden_size = option(config, "embedding_dim")
        self.projection = build.linear(prefix + "embedding_projection", hidden, self.hidden_size, bias=False)
        self.is_causal = False
        self.prunes_last_layer = True
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors = IGNORED if vision is None else _AUDIO

    def __call__(self, batch: Batch) -> Tensor:
        embedded = F.embedding(batch.token_ids, self.embedding).mul_(self.embedding_scale)
        if batch.images is not None:
            embedded = batch.images.embed(embedded)
        angles = {shape: rotary.angles(batch) for shape, rotary in self.rotaries.items()}
        hidden = embedded
        for norm, layer, shape, project in zip(
            self.norms, self.layers, self.shapes, self.signals, strict=False
        ):
            signal = self.signal_norm(project(embedded).mul_(self.signal_scale))
            normed: Activations = norm(hidden)
            hidden = layer(hidden, normed, signal, batch, angles[shape])
        return self.projection(dequantize(self.norms[-1](hidden)))


def embedding_gemma2(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> EmbeddingGemma2:
    found = read_gemma_vision(build.folder, config)
    vision = None if found is None else GemmaVisionTower(build, found, config["hidden_size"])
    if config.get("audio_config"):
        log.warning("EmbeddingGemma 2 is served without audio: the tower in audio_config is not loaded")
    if vision is None and config.get("vision_config"):
        log.warning(
            "EmbeddingGemma 2 is served for text: the tower in vision_config is not loaded, because no file "
            "says how images are prepared; processor_config.json of the model's repository does"
        )
    return EmbeddingGemma2(build, with_defaults(config, **_DEFAULTS), vision)


_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 512,
}


def layer_shapes(config: Mapping[str, Any]) -> list[LayerShape]:
    """The sizes of every layer. `per_layer_config` overrides the model's sizes by layer number."""
    layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        every = config.get("sliding_window_pattern") or 6
        types = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if len(types) != layers or set(types) - {"sliding_attention", "full_attention"}:
        raise ModelLoadError(
            f"layer_types in config.json has to name sliding_attention or full_attention for {layers} layers"
        )
    types = [*types[:-1], "full_attention"]  # as in the reference, whatever config.json says
    own = config.get("per_layer_config")
    if own is None:
        wide = {
            "head_dim": option(config, "global_head_dim", default=_WIDE_HEAD_DIM),
            "num_key_value_heads": option(config, "num_global_key_value_heads", default=_WIDE_KV_HEADS),
        }
        own = {str(layer): wide for layer, kind in enumerate(types) if kind == "full_attention"}
    if unknown := [key for key in own if not key.isdecimal()]:
        raise ModelLoadError(
            f"per_layer_config in config.json has {unknown[0]!r}, which is no layer's number"
        )
    numbered = {int(key): values for key, values in own.items()}  # some files write 05 for 5
    return [_layer_shape(config, layer, kind, numbered.get(layer) or {}) for layer, kind in enumerate(types)]


def _layer_shape(config: Mapping[str, Any], layer: int, kind: str, own: Mapping[str, Any]) -> LayerShape:
    if unknown := sorted(set(own) - {"head_dim", "num_key_value_heads"}):
        raise ModelLoadError(
            f"per_layer_config in config.json sets {unknown[0]!r} for layer {layer}; "
            "supported: head_dim, num_key_value_heads"
        )
    dim = own.get("head_dim") or config["head_dim"]
    kv_heads = own.get("num_key_value_heads") or option(config, "num_key_value_heads")
    if dim % 2 or config["num_attention_heads"] % kv_heads:
        raise ModelLoadError(
            f"per_layer_config in config.json gives layer {layer} {kv_heads} key heads of {dim} numbers; the "
            f"number has to be even, and the heads have to divide {config['num_attention_heads']}"
        )
    return LayerShape(kind == "sliding_attention", dim, kv_heads)


def _word_table(build: LayerBuilder, prefix: str, config: Mapping[str, Any]) -> Tensor:
    """The embeddings. Placeholders of images, video and audio get the embedding of the padding token."""
    table = build.table(prefix + "embed_tokens", config["vocab_size"], config["hidden_size"])
    padding = config.get("pad_token_id")
    for name in _PLACEHOLDERS:
        if padding is not None and config.get(name) is not None and config[name] < len(table):
            table[config[name]] = table[padding]
    return table


def _activation(config: Mapping[str, Any]) -> str:
    name = str(config.get("hidden_activation") or "gelu_pytorch_tanh")
    activation(name)  # raises if the activation is not supported
    return name


def _rotary(build: LayerBuilder, config: Mapping[str, Any], shape: LayerShape) -> Rotary:
    kind, base = ("sliding_attention", 1e4) if shape.is_sliding else ("full_attention", 1e6)
    rope = rope_options(config, "rope_theta", default=base, layer_type=kind)
    require(rope.scaling, partial_rotary_factor=1.0)
    return Rotary(
        shape.head_dim,
        config["max_position_embeddings"],
        rope.base,
        scaling=rope.scaling,
        device=build.weights.device,
        dtype=build.weights.dtype,
    )
