"""Pre-norm layers with learned positions, for the text and vision towers of CLIP and SigLIP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.attention import BIDIRECTIONAL, AttentionKind, attend
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.mlp import MLP
from penstock.layers.norm import LayerNorm
from penstock.layers.residual import pre_norm_residual


@dataclass(frozen=True, slots=True)
class LayerShape:
    hidden: int
    layers: int
    heads: int
    intermediate: int
    act: str
    eps: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LayerShape:
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            intermediate=config["intermediate_size"],
            act=config["hidden_act"],
            eps=config["layer_norm_eps"],
        )


class PreNormLayer:
    is_last = False  # whether this is the tower's last layer, whose output only a pooler reads

    def __init__(self, build: LayerBuilder, prefix: str, shape: LayerShape, kind: AttentionKind) -> None:
        hidden = shape.hidden
        names = [f"{prefix}self_attn.{name}_proj" for name in ("q", "k", "v")]
        self.qkv = build.linear(names, hidden, [hidden] * 3)
        self.out = build.linear(prefix + "self_attn.out_proj", hidden, hidden)
        self.mlp_norm = build.norm(prefix + "layer_norm2", hidden, shape.eps)
        self.mlp = MLP(
            build.linear(prefix + "mlp.fc1", hidden, shape.intermediate, shape.act),
            build.linear(prefix + "mlp.fc2", shape.intermediate, hidden),
        )
        self.mlp_norm.quantize_for(self.mlp.input_layer)
        self.heads, self.kind = shape.heads, kind

    def __call__(
        self, hidden: Tensor, normed: Activations, batch: Batch, next_norm: LayerNorm
    ) -> tuple[Tensor, Activations]:
        """The hidden states after this layer, plain and normalised by `next_norm`."""
        qkv = self.qkv(normed)
        query, key, value = qkv.view(len(qkv), 3, self.heads, -1).unbind(1)
        context = attend(query, key, value, batch, self.kind)
        if self.is_last:
            context, hidden = batch.select_outputs(context, hidden)
        hidden, normed = pre_norm_residual(self.out, self.mlp_norm, context, hidden)
        return pre_norm_residual(self.mlp, next_norm, normed, hidden)


class PreNormStack:
    """embeddings [tokens, hidden] → hidden states after the last norm, limited to the batch's output tokens
    if it has any."""

    def __init__(
        self,
        build: LayerBuilder,
        prefix: str,
        shape: LayerShape,
        last_norm: str,
        kind: AttentionKind = BIDIRECTIONAL,
    ) -> None:
        """`prefix` is the prefix of layer names, `last_norm` the full name of the norm after the layers."""
        names = [f"{prefix}{i}." for i in range(shape.layers)]
        self.layers = [PreNormLayer(build, name, shape, kind) for name in names]
        self.layers[-1].is_last = True
        norms = [*(name + "layer_norm1" for name in names), last_norm]
        self.norms = [build.norm(name, shape.hidden, shape.eps) for name in norms]
        for norm, layer in zip(self.norms[1:-1], self.layers[1:], strict=True):
            norm.quantize_for(layer.qkv)

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        normed: Activations = self.norms[0](hidden)
        for layer, next_norm in zip(self.layers, self.norms[1:], strict=True):
            hidden, normed = layer(hidden, normed, batch, next_norm)
        return dequantize(normed)
