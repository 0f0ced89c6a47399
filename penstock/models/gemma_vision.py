"""Gemma 4's vision tower: a sandwich-norm encoder over ragged patches. Each square of patches is averaged to
one token.

Each patch gets two learned positions, one for its column and one for its row. Queries and keys are rotated by
both.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.gemma_vision import GemmaVision, GemmaVisionShape
from penstock.checkpoint.image_processor import ImageProcessorSpec
from penstock.kernels.quantize import dequantize
from penstock.layers.activation import activation
from penstock.layers.attention import AttentionKind, attend
from penstock.layers.batch import Batch, patch_batch
from penstock.layers.build import LayerBuilder
from penstock.layers.images import ImageBatch
from penstock.layers.linear import LinearLayer, make_linear
from penstock.layers.mlp import GatedMLP
from penstock.layers.mrope import AxialRotary
from penstock.layers.norm import RMSNorm, sandwich
from penstock.layers.rotary import Angles
from penstock.models.patches import PatchEmbedding
from penstock.models.vision_geometry import coordinates
from penstock.types import Ints, cumulative

_KIND = AttentionKind(scale=1.0)
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class ClippedLinear:
    """A linear layer whose inputs and outputs are clamped to bounds that the checkpoint stores."""

    def __init__(self, build: LayerBuilder, name: str, weight: Tensor) -> None:
        self.linear = make_linear(weight, None, "identity", None)
        low, high, self.low, self.high = (float(build.weights.read(f"{name}.{key}", ())) for key in _BOUNDS)
        self.inputs = (low, high)

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x.clamp(*self.inputs)).clamp_(self.low, self.high)


class ClippedMLP:
    def __init__(self, build: LayerBuilder, prefix: str, shape: GemmaVisionShape) -> None:
        self.gate, self.up = (
            _clipped(build, f"{prefix}{name}_proj", shape.intermediate, shape.hidden)
            for name in ("gate", "up")
        )
        self.down = _clipped(build, prefix + "down_proj", shape.hidden, shape.intermediate)
        self.act = activation(shape.act)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)).mul_(self.up(x)))


class VisionAttention:
    def __init__(
        self, build: LayerBuilder, prefix: str, shape: GemmaVisionShape, rotary: AxialRotary
    ) -> None:
        dim, order = shape.head_dim, _pair_order(shape.head_dim)
        widths = (shape.heads * dim, shape.kv_heads * dim, shape.kv_heads * dim)
        names = [f"{prefix}{name}_proj" for name in ("q", "k", "v")]
        parts = [
            build.weights.take(f"{name}.linear.weight", width, shape.hidden)
            for name, width in zip(names, widths, strict=True)
        ]
        parts[:2] = [part.view(-1, dim, shape.hidden)[:, order].flatten(0, 1) for part in parts[:2]]
        self.parts: list[ClippedLinear] = []
        self.qkv: LinearLayer | None = None
        self.out: LinearLayer | ClippedLinear
        if shape.is_clipped:
            self.parts = [ClippedLinear(build, name, part) for name, part in zip(names, parts, strict=True)]
            self.out = _clipped(build, prefix + "o_proj", shape.hidden, widths[0])
        else:
            self.qkv = make_linear(torch.cat(parts), None, "identity", None)
            self.out = build.linear(prefix + "o_proj.linear", widths[0], shape.hidden, bias=False)
        self.norms = (
            _head_norm(build, prefix + "q_norm", shape),
            _head_norm(build, prefix + "k_norm", shape),
        )
        self.shape, self.rotary = shape, rotary

    def __call__(self, normed: Tensor, patches: Batch, angles: Angles) -> Tensor:
        shape = self.shape
        qkv = torch.cat([part(normed) for part in self.parts], 1) if self.qkv is None else self.qkv(normed)
        query, key, value = self.rotary.rotate_qkv(qkv, shape.heads, angles, shape.kv_heads, self.norms)
        value = F.rms_norm(value, (shape.head_dim,), None, shape.eps)  # the norm of values has no weight
        return self.out(attend(query, key, value, patches, _KIND))


class VisionLayer:
    def __init__(
        self, build: LayerBuilder, prefix: str, shape: GemmaVisionShape, rotary: AxialRotary
    ) -> None:
        def norm(name: str) -> RMSNorm:
            return build.rms_norm(f"{prefix}{name}_layernorm", shape.hidden, shape.eps)

        self.attention = VisionAttention(build, prefix + "self_attn.", shape, rotary)
        self.mlp = _mlp(build, prefix + "mlp.", shape)
        self.before_attention, self.after_attention = norm("input"), norm("post_attention")
        self.before_mlp, self.after_mlp = norm("pre_feedforward"), norm("post_feedforward")

    def __call__(
        self, hidden: Tensor, normed: Tensor, patches: Batch, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """The residual before the feed-forward block's output is added, and that output."""
        context = self.attention(normed, patches, angles)
        hidden, inner = sandwich(context, hidden, self.after_attention, self.before_mlp)
        return hidden, self.mlp(dequantize(inner, hidden.dtype))


class GemmaVisionTower:
    """Patches → one vector for each token of an image, as wide as the text model's states."""

    def __init__(self, build: LayerBuilder, vision: GemmaVision, width: int) -> None:
        shape, weights = vision.shape, build.weights
        plain = LayerBuilder(weights)  # in the model's own precision, and without adapters
        prefix = weights.prefix_of("patch_embedder.input_proj.weight")
        pixels = _centred(vision.pixels)
        name = f"{prefix}patch_embedder."
        self.patches = PatchEmbedding.read(plain, name + "input_proj", shape.hidden, pixels, bias=False)
        tables = weights.take(name + "position_embedding_table", 2, shape.num_positions, shape.hidden)
        self.across, self.down = tables
        device, dtype = weights.device, weights.dtype
        self.rotary = AxialRotary(shape.head_dim, shape.rope_base, device=device, dtype=dtype)
        self.layers = [
            VisionLayer(plain, f"{prefix}encoder.layers.{number}.", shape, self.rotary)
            for number in range(shape.layers)
        ]
        self.standard: tuple[Tensor, Tensor] | None = None
        if shape.is_standardized:
            bias, scale = (weights.take(prefix + key, shape.hidden) for key in ("std_bias", "std_scale"))
            self.standard = (bias.float(), scale.float())
        name = "embed_vision.embedding_projection"
        name = weights.prefix_of(f"{name}.weight") + name
        self.project = plain.linear(name, shape.hidden, width, bias=False)
        self.shape, self.feature_width = shape, width

    def layout(self, grids: Ints) -> list[Ints]:
        """Patch indices, ordered so that the patches of a token are consecutive, and the column and row of
        each patch."""
        places = coordinates(grids, self.shape.pool)
        counts = grids[:, 0] * grids[:, 1]
        starts, across = (cumulative(counts)[:-1].repeat(counts), grids[:, 1].repeat(counts))
        order = starts + places[:, 0] * across + places[:, 1]
        return [order.astype(places.dtype), places[:, ::-1].reshape(-1)]

    def __call__(self, images: ImageBatch) -> Tensor:
        order, places = images.layout[0], images.layout[1].view(-1, 2)
        hidden = self.patches(images.patches.index_select(0, order))
        hidden = hidden + (F.embedding(places[:, 0], self.across) + F.embedding(places[:, 1], self.down))
        angles, patches = self.rotary.angles_of(places), patch_batch(images.cu_patches, images.groups)
        return self.project(self._pooled(self._run(hidden, patches, angles)))

    def _run(self, hidden: Tensor, patches: Batch, angles: Angles) -> Tensor:
        """The hidden states after the last layer, without a final norm."""
        normed = self.layers[0].before_attention(hidden)
        for layer, following in pairwise(self.layers):
            hidden, added = layer(hidden, normed, patches, angles)
            hidden, after = sandwich(added, hidden, layer.after_mlp, following.before_attention)
            normed = dequantize(after, hidden.dtype)
        hidden, added = self.layers[-1](hidden, normed, patches, angles)
        return hidden + self.layers[-1].after_mlp(added)

    def _pooled(self, hidden: Tensor) -> Tensor:
        """Average, standardise and normalise to [tokens, hidden]. In fp32, because the scaled values overflow
        fp16."""
        shape = self.shape
        squares = hidden.view(-1, shape.pool**2, shape.hidden).float().mean(1)
        pooled = squares.to(hidden.dtype).float() * shape.hidden**0.5
        if self.standard is not None:
            bias, scale = self.standard
            pooled = (pooled - bias) * scale
        return F.rms_norm(pooled.to(hidden.dtype).float(), (shape.hidden,), None, shape.eps).to(hidden.dtype)


def _centred(pixels: ImageProcessorSpec) -> ImageProcessorSpec:
    """The processor with the tower's own rescaling, 2 · value − 1, folded into its mean and std."""
    (red, green, blue), (a, b, c) = pixels.mean, pixels.std
    mean, std = (red + a / 2, green + b / 2, blue + c / 2), (a / 2, b / 2, c / 2)
    return msgspec.structs.replace(pixels, mean=mean, std=std)


def _pair_order(dim: int) -> list[int]:
    """The components of a head in the order of `AxialRotary`: the first components of all pairs (columns,
    then rows), then the second components. In Gemma's order, each axis has its pairs in one half of the
    head."""
    quarter = dim // 4
    starts = (0, 2 * quarter, quarter, 3 * quarter)
    return [start + at for start in starts for at in range(quarter)]


def _head_norm(build: LayerBuilder, name: str, shape: GemmaVisionShape) -> RMSNorm:
    norm = build.rms_norm(name, shape.head_dim, shape.eps)
    norm.weight = norm.weight[_pair_order(shape.head_dim)].contiguous()
    return norm


def _clipped(build: LayerBuilder, name: str, outputs: int, inputs: int) -> ClippedLinear:
    return ClippedLinear(build, name, build.weights.take(f"{name}.linear.weight", outputs, inputs))


def _mlp(build: LayerBuilder, prefix: str, shape: GemmaVisionShape) -> GatedMLP | ClippedMLP:
    if shape.is_clipped:
        return ClippedMLP(build, prefix, shape)
    names, inner = [f"{prefix}{name}_proj.linear" for name in ("gate", "up")], shape.intermediate
    gate_up = build.linear(names, shape.hidden, [inner, inner], bias=False)
    return GatedMLP(
        gate_up, build.linear(prefix + "down_proj.linear", inner, shape.hidden, bias=False), shape.act
    )
