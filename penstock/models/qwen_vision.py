"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: ragged patches in, one vector for each token out.

All three rotate queries and keys by a patch's row and column, and merge the patches of a token at the end.
Qwen2.5-VL attends within windows in most layers. Qwen3-VL adds interpolated position embeddings. It also
returns features of inner layers, which the language model adds to its first layers (DeepStack).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.image_processor import ImageProcessorSpec
from penstock.checkpoint.qwen_vision import QwenVisionShape
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.attention import attend
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.images import ImageBatch
from penstock.layers.linear import LinearLayer, make_linear
from penstock.layers.mlp import MLP, GatedMLP
from penstock.layers.mrope import AxialRotary
from penstock.layers.norm import Norm
from penstock.layers.residual import pre_norm_residual
from penstock.layers.rotary import Angles
from penstock.models.vision_geometry import (
    coordinates,
    interpolate,
    length_groups,
    window_lengths,
    windows,
)
from penstock.types import Ints, LengthGroup, cumulative

_EPS = 1e-6
_ROPE_BASE = 10_000.0
_CENTRE = 128.0  # subtracted from each pixel: the result is exact in every dtype, and about zero on average


class VisionLayer:
    def __init__(self, build: LayerBuilder, prefix: str, shape: QwenVisionShape, rotary: AxialRotary) -> None:
        hidden, inner = shape.hidden, shape.intermediate
        self.qkv = build.linear(prefix + "attn.qkv", hidden, 3 * hidden)
        self.out = build.linear(prefix + "attn.proj", hidden, hidden)
        self.heads, self.rotary = shape.heads, rotary
        self.mlp: MLP | GatedMLP
        if shape.has_rms_norms:
            names = [prefix + "mlp.gate_proj", prefix + "mlp.up_proj"]
            gate_up = build.linear(names, hidden, [inner, inner])
            self.mlp = GatedMLP(gate_up, build.linear(prefix + "mlp.down_proj", inner, hidden), shape.act)
        else:
            up, down = (prefix + "mlp." + name for name in shape.mlp_names)
            self.mlp = MLP(build.linear(up, hidden, inner, shape.act), build.linear(down, inner, hidden))
        self.mlp_norm = _norm(build, prefix + "norm2", hidden, shape)

    def __call__(
        self, hidden: Tensor, normed: Activations, rows: Batch, angles: Angles, after: Norm
    ) -> tuple[Tensor, Activations]:
        """The states after this layer, plain and normalised by `after`."""
        query, key, value = self.rotary.rotate_qkv(self.qkv(normed), self.heads, angles)
        hidden, normed = pre_norm_residual(self.out, self.mlp_norm, attend(query, key, value, rows), hidden)
        return pre_norm_residual(self.mlp, after, normed, hidden)


class Merger:
    """Joins the patches of a token into one vector, as wide as the language model's states."""

    def __init__(
        self, build: LayerBuilder, prefix: str, shape: QwenVisionShape, *, joins_first: bool = False
    ) -> None:
        self.width = shape.hidden * shape.merge**2
        norm, up, down = (prefix + name for name in shape.merger_names)
        self.joins_first = joins_first  # normalise joined patches instead of single ones
        self.norm = _norm(build, norm, self.width if joins_first else shape.hidden, shape)
        self.mlp = MLP(
            build.linear(up, self.width, self.width, "gelu"), build.linear(down, self.width, shape.out)
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [patches, hidden] → [tokens, out]"""
        if self.joins_first:
            return self.mlp(self.norm(hidden.reshape(-1, self.width)))
        return self.joined(self.norm(hidden))

    def joined(self, normed: Activations) -> Tensor:
        return self.mlp(dequantize(normed).reshape(-1, self.width))


class QwenVisionTower:
    """patches → token vectors. DeepStack's vectors of a token follow in the same row."""

    def __init__(
        self, build: LayerBuilder, prefix: str, shape: QwenVisionShape, processor: ImageProcessorSpec
    ) -> None:
        weights = build.weights
        self.shape = shape
        self.feature_width = shape.feature_width
        self.embed = _patch_embedding(build, prefix + "patch_embed.proj", shape, processor)
        self.positions: Tensor | None = None
        if side := shape.position_side:
            table = weights.read_plain(prefix + "pos_embed.weight", (side * side, shape.hidden))
            self.positions = table.to(dtype=torch.float32, device=weights.device)
        self.rotary = AxialRotary(
            shape.hidden // shape.heads, _ROPE_BASE, device=weights.device, dtype=weights.dtype
        )
        prefixes = [f"{prefix}blocks.{layer}." for layer in range(shape.layers)]
        self.layers = [VisionLayer(build, each, shape, self.rotary) for each in prefixes]
        self.merger = Merger(build, prefix + "merger.", shape)
        # Norm i feeds layer i; the last norm is the merger's.
        self.norms = [_norm(build, each + "norm1", shape.hidden, shape) for each in prefixes]
        self.norms.append(self.merger.norm)
        self.deep_mergers = {
            layer: Merger(build, f"{prefix}deepstack_merger_list.{number}.", shape, joins_first=True)
            for number, layer in enumerate(shape.deep_layers)
        }

    def layout(self, grids: Ints) -> list[Ints]:
        """Coordinates; entries of the position table and the bits of their weights; the order of tokens by
        window, its inverse, and the starts of windows."""
        shape, places = self.shape, coordinates(grids, self.shape.merge)
        arrays = [places.reshape(-1)]
        if shape.position_side:
            entries, weights = interpolate(grids, places, shape.position_side)
            arrays += (entries.reshape(-1), weights.reshape(-1).view(np.int32))
        if shape.full_layers is not None:
            arrays += windows(grids // shape.merge, shape.window)
            arrays.append(cumulative(self._window_lengths(grids)))
        return arrays

    def __call__(self, images: ImageBatch) -> Tensor:
        sent, shape = iter(images.layout), self.shape
        places = next(sent).view(-1, 2)
        hidden = self.embed(images.patches.to(self.rotary.dtype).sub_(_CENTRE))
        if self.positions is not None:
            entries, weights = next(sent).view(-1, 4), next(sent).view(torch.float32).view(-1, 4)
            added = F.embedding_bag(entries, self.positions, mode="sum", per_sample_weights=weights)
            hidden = hidden + added.to(hidden.dtype)
        whole = _rows(images.cu_patches, images.groups, images.max_patches, hidden)
        divided = inverse = None
        if shape.full_layers is not None:
            order, inverse = next(sent), next(sent)
            hidden, places = (self._by_window(each, order) for each in (hidden, places))
            lengths = self._window_lengths(images.grids)
            divided = _rows(next(sent), length_groups(lengths), int(lengths.max()), hidden)
        features, *deep = self._run(hidden, self.rotary.angles_of(places), whole, divided)
        if inverse is not None:
            features = features.index_select(0, inverse)
        return torch.cat((features, *deep), dim=1) if deep else features

    def _run(self, hidden: Tensor, angles: Angles, whole: Batch, divided: Batch | None) -> list[Tensor]:
        """Run layers and mergers. Returns the features of the last layer, then the features of inner layers.
        Attention runs over `whole` images or over images `divided` into windows."""
        normed: Activations = self.norms[0](hidden)
        deep, full = [], self.shape.full_layers or ()
        for number, (layer, after) in enumerate(zip(self.layers, self.norms[1:], strict=True)):
            rows = whole if divided is None or number in full else divided
            hidden, normed = layer(hidden, normed, rows, angles, after)
            if number in self.deep_mergers:
                deep.append(self.deep_mergers[number](hidden))
        return [self.merger.joined(normed), *deep]

    def _window_lengths(self, grids: Ints) -> Ints:
        """[windows], in patches"""
        return window_lengths(grids // self.shape.merge, self.shape.window) * self.shape.merge**2

    def _by_window(self, values: Tensor, order: Tensor) -> Tensor:
        """Reorder `values` [patches, …] by `order`, which is an order of tokens."""
        tokens = values.view(-1, self.shape.merge**2 * values.shape[1])
        return tokens.index_select(0, order).view(values.shape)


def _rows(cu_lengths: Tensor, groups: tuple[LengthGroup, ...], max_length: int, hidden: Tensor) -> Batch:
    """Patches as a batch for attention. Its rows are images or windows."""
    nothing = cu_lengths[:0]
    return Batch(
        token_ids=nothing,
        positions=nothing,
        type_ids=None,
        cu_lengths=cu_lengths,
        lengths=nothing,
        skip=None,
        groups=groups,
        max_length=max_length,
        num_tokens=len(hidden),
        num_rows=len(cu_lengths) - 1,
    )


def _norm(build: LayerBuilder, name: str, size: int, shape: QwenVisionShape) -> Norm:
    return build.rms_norm(name, size, _EPS) if shape.has_rms_norms else build.norm(name, size, _EPS)


def _patch_embedding(
    build: LayerBuilder, name: str, shape: QwenVisionShape, processor: ImageProcessorSpec
) -> LinearLayer:
    """A product with pixels − `_CENTRE`, which includes the processor's rescaling and normalisation. All
    frames of a patch are the same, so their weights are added."""
    weights, side = build.weights, shape.patch_size
    stored = weights.read_plain(f"{name}.weight", (shape.hidden, 3, shape.frames, side, side)).float()
    channels = stored.sum(2).flatten(2)  # [hidden, 3, side · side]
    mean, std = (channels.new_tensor(values)[None, :, None] for values in (processor.mean, processor.std))
    scale, zero = processor.rescale_factor / std, (_CENTRE * processor.rescale_factor - mean) / std
    bias = (channels * zero).sum((1, 2))
    if shape.has_patch_bias:
        bias += weights.read_plain(f"{name}.bias", (shape.hidden,)).float()
    weight, bias = (
        each.to(dtype=weights.dtype, device=weights.device).contiguous()
        for each in ((channels * scale).flatten(1), bias)
    )
    return make_linear(weight, bias, "identity", None)
