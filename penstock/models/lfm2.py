"""LFM2: layers with gated short convolutions or attention.

The bidirectional variants (LFM2.5-Embedding, LFM2.5-ColBERT) attend both ways, and their convolutions are
centred on the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.attention import AttentionKind, attend
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.head import TaskHead
from penstock.layers.linear import LinearLayer
from penstock.layers.mlp import GatedMLP
from penstock.layers.norm import RMSNorm
from penstock.layers.residual import pre_norm_residual
from penstock.layers.rotary import Angles, Rotary
from penstock.layers.short_conv import ShortConv
from penstock.models.options import option, require, rope_options, with_defaults
from penstock.types import Task

IGNORED = ("lm_head.",)
_KINDS = ("conv", "full_attention")


class ConvMixer:
    """A depthwise convolution between two gates, all three projected from the token's state."""

    def __init__(self, build: LayerBuilder, prefix: str, config: Mapping[str, Any]) -> None:
        hidden, bias = config["hidden_size"], bool(config.get("conv_bias"))
        size, is_causal = option(config, "conv_L_cache", default=3), config["is_causal"]
        self.input = build.linear(prefix + "in_proj", hidden, 3 * hidden, bias=bias)
        self.out = build.linear(prefix + "out_proj", hidden, hidden, bias=bias)
        weight = build.weights.take(prefix + "conv.weight", hidden, 1, size)
        added = build.weights.take(prefix + "conv.bias", hidden) if bias else None
        self.conv = ShortConv(weight[:, 0], added, is_causal=is_causal)
        self.skips_expansion = is_causal

    def __call__(self, normed: Activations, batch: Batch, angles: Angles) -> Tensor:
        """The gated states, [tokens, hidden], before the output projection."""
        if self.skips_expansion and batch.limits is not None:
            normed = _zero_expansion(dequantize(normed), batch)
        gate_in, gate_out, x = self.input(normed).chunk(3, dim=-1)
        return self.conv(gate_in * x, batch).mul_(gate_out)


class AttentionMixer:
    def __init__(self, build: LayerBuilder, prefix: str, config: Mapping[str, Any], rotary: Rotary) -> None:
        hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], rotary.size
        kv_heads = option(config, "num_key_value_heads", default=heads)
        names = [prefix + name for name in ("q_proj", "k_proj", "v_proj")]
        widths = [count * dim for count in (heads, kv_heads, kv_heads)]
        self.input = build.linear(names, hidden, widths, bias=False)
        self.out = build.linear(prefix + "out_proj", heads * dim, hidden, bias=False)
        query_norm, key_norm = (
            build.rms_norm(prefix + name, dim, config["norm_eps"]) for name in ("q_layernorm", "k_layernorm")
        )
        self.norms = (query_norm, key_norm)
        self.heads, self.kv_heads, self.rotary = heads, kv_heads, rotary
        self.kind = AttentionKind(causal=config["is_causal"])

    def __call__(self, normed: Activations, batch: Batch, angles: Angles) -> Tensor:
        """The context vectors, [tokens, heads · dim], before the output projection."""
        query, key, value = self.rotary.rotate_qkv(
            self.input(normed), self.heads, angles, self.kv_heads, self.norms
        )
        return attend(query, key, value, batch, self.kind)


class Lfm2Layer:
    is_last = False  # whether this is the model's last layer, whose output only a pooler reads

    def __init__(
        self, build: LayerBuilder, prefix: str, config: Mapping[str, Any], kind: str, rotary: Rotary
    ) -> None:
        self.mixer: ConvMixer | AttentionMixer
        if kind == "conv":
            self.mixer = ConvMixer(build, prefix + "conv.", config)
        else:
            self.mixer = AttentionMixer(build, prefix + "self_attn.", config, rotary)
        hidden, inner = config["hidden_size"], _mlp_width(config)
        names = [prefix + "feed_forward.w1", prefix + "feed_forward.w3"]
        self.mlp = GatedMLP(
            build.linear(names, hidden, [inner, inner], bias=False),
            build.linear(prefix + "feed_forward.w2", inner, hidden, bias=False),
            "silu",
        )
        self.mlp_norm = build.rms_norm(prefix + "ffn_norm", hidden, config["norm_eps"])
        self.mlp_norm.quantize_for(self.mlp.input_layer)

    @property
    def input_layer(self) -> LinearLayer:
        """The linear layer that reads the input."""
        return self.mixer.input

    def __call__(
        self, hidden: Tensor, normed: Activations, batch: Batch, angles: Angles, next_norm: RMSNorm
    ) -> tuple[Tensor, Activations]:
        """The hidden states after this layer, plain and normalised by `next_norm`."""
        mixed = self.mixer(normed, batch, angles)
        if self.is_last:
            mixed, hidden = batch.select_outputs(mixed, hidden)
        hidden, normed = pre_norm_residual(self.mixer.out, self.mlp_norm, mixed, hidden)
        return pre_norm_residual(self.mlp, next_norm, normed, hidden)


class Lfm2:
    """token ids → hidden states after the last norm, [tokens, hidden]."""

    def __init__(self, build: LayerBuilder, config: Mapping[str, Any]) -> None:
        hidden, kinds = config["hidden_size"], layer_kinds(config)
        prefix = build.weights.prefix_of("embed_tokens.weight")
        self.embedding = build.table(prefix + "embed_tokens", config["vocab_size"], hidden)
        self.rotary = _rotary(build, config)
        self.layers = [
            Lfm2Layer(build, f"{prefix}layers.{i}.", config, kind, self.rotary)
            for i, kind in enumerate(kinds)
        ]
        self.layers[-1].is_last = True
        names = [*(f"layers.{i}.operator_norm" for i in range(len(kinds))), "embedding_norm"]
        self.norms = [build.rms_norm(prefix + name, hidden, config["norm_eps"]) for name in names]
        for before, layer in zip(self.norms, self.layers, strict=False):  # the last norm feeds no layer
            before.quantize_for(layer.input_layer)
        self.hidden_size = hidden
        self.is_causal = config["is_causal"]
        self.prunes_last_layer = True
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors = IGNORED

    def __call__(self, batch: Batch) -> Tensor:
        hidden = F.embedding(batch.token_ids, self.embedding)
        angles = self.rotary.angles(batch)
        normed: Activations = self.norms[0](hidden)
        for layer, next_norm in zip(self.layers, self.norms[1:], strict=True):
            hidden, normed = layer(hidden, normed, batch, angles, next_norm)
        return dequantize(normed)


def lfm2(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Lfm2:
    return Lfm2(build, with_defaults(config, norm_eps=1e-5))


def layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of every layer. Older files list only the layers with attention."""
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    if kinds is None:
        attends = option(config, "full_attn_idxs", default=range(layers))
        return ["full_attention" if layer in attends else "conv" for layer in range(layers)]
    if len(kinds) != layers or set(kinds) - set(_KINDS):
        raise ModelLoadError(
            f"layer_types in config.json has to name {' or '.join(_KINDS)} for each of {layers} layers"
        )
    return list(kinds)


def _mlp_width(config: Mapping[str, Any]) -> int:
    """The width of the MLPs: two thirds of config.json's value, rounded up, unless adjustment is disabled."""
    width = int(option(config, "block_ff_dim", "intermediate_size"))
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width, factor = int(2 * width / 3), config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    multiple = option(config, "block_multiple_of", default=256)
    return int(-(-int(factor * width) // multiple) * multiple)


def _rotary(build: LayerBuilder, config: Mapping[str, Any]) -> Rotary:
    rope = rope_options(config, "rope_theta", default=1e6)
    require(rope.scaling, partial_rotary_factor=1.0)
    return Rotary(
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        config["max_position_embeddings"],
        rope.base,
        scaling=rope.scaling,
        device=build.weights.device,
        dtype=build.weights.dtype,
    )


def _zero_expansion(normed: Tensor, batch: Batch) -> Tensor:
    """Zero the states of tokens that nothing attends to, as the reference does before convolutions."""
    normed = normed.clone()
    for group in batch.groups:
        if group.key_limit:
            stop = group.first_token + group.num_rows * group.length
            normed[group.first_token : stop].view(group.num_rows, group.length, -1)[:, group.key_limit :] = 0
    return normed
