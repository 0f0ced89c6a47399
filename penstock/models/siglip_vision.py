"""SigLIP's vision tower: a pre-norm encoder over patches. A pooling head attends to the patches, or they
become tokens of a text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.image_processor import ImageProcessorSpec, MaxPatches
from penstock.errors import ModelLoadError
from penstock.kernels.attention import flash_attention
from penstock.kernels.language import use_kernel
from penstock.layers.batch import patch_batch
from penstock.layers.build import LayerBuilder
from penstock.layers.images import ImageBatch
from penstock.layers.linear import LinearLayer, make_linear
from penstock.layers.mlp import MLP
from penstock.models.patches import PatchEmbedding
from penstock.models.pre_norm import LayerShape, PreNormStack
from penstock.types import Ints

MAX_GRIDS = 64  # grids with cached interpolated positions
# The pooling head and buffers, which a checkpoint may store although the text model reads the patches.
SIGLIP_HEAD = ("vision_tower.head.", "vision_model.head.", "embeddings.position_ids")


class SiglipVision:
    """Patches → one vector per image. `states` returns the states of the patches, for a text model."""

    def __init__(
        self,
        build: LayerBuilder,
        prefix: str,
        config: Mapping[str, Any],
        pixels: ImageProcessorSpec,
        *,
        has_head: bool = True,
    ) -> None:
        """`prefix` is the tower's prefix, for example "vision_model."."""
        shape = LayerShape.of(config)
        embeddings = prefix + "embeddings."
        self.patches = PatchEmbedding.read(build, embeddings + "patch_embedding", shape.hidden, pixels)
        self.positions = _positions(build, embeddings + "position_embedding", config, pixels)
        self.stack = PreNormStack(build, prefix + "encoder.layers.", shape, prefix + "post_layernorm")
        self.head = AttentionPooling(build, prefix + "head.", shape) if has_head else None
        self.feature_width = shape.hidden

    def layout(self, grids: Ints) -> list[Ints]:
        return []  # the tower needs no integers besides the numbers of patches

    def states(self, images: ImageBatch) -> Tensor:
        """[patches, hidden], after the last norm."""
        hidden = self.positions.add_to(self.patches(images.patches), images)
        return self.stack(hidden, patch_batch(images.cu_patches, images.groups))

    def __call__(self, images: ImageBatch) -> Tensor:
        assert self.head is not None
        return self.head(self.states(images), images)


def tower_builder(build: LayerBuilder) -> tuple[LayerBuilder, str]:
    """The builder for the vision tower of a text model, without quantisation and adapters, and the tower's
    prefix."""
    prefix = build.weights.prefix_of("embeddings.patch_embedding.weight")
    if build.is_quantized(f"{prefix}encoder.layers.0.self_attn.q_proj"):
        raise ModelLoadError(
            f"the checkpoint stores {prefix}encoder in a quantised form, which is not supported for a vision "
            "tower; take one that leaves it as it is",
            param="model",
        )
    return LayerBuilder(build.weights), prefix


class SiglipTokens:
    """A SigLIP tower whose patches are projected to tokens of a text model. Squares of `merge` × `merge`
    patches become one token, row after row ("pixel shuffle"). All images have the same grid."""

    def __init__(self, tower: SiglipVision, project: LinearLayer, merge: int = 1) -> None:
        self.tower, self.project, self.merge = tower, project, merge
        self.feature_width = project.out_features

    def layout(self, grids: Ints) -> list[Ints]:
        return self.tower.layout(grids)

    def __call__(self, images: ImageBatch) -> Tensor:
        states, merge = self.tower.states(images), self.merge
        if merge > 1:
            rows, columns = images.grids[0].tolist()
            squares = states.view(images.num_images, rows // merge, merge, columns // merge, merge, -1)
            states = squares.transpose(2, 3).reshape(len(states) // merge**2, -1)
        return self.project(states)


class FixedPositions:
    """A position table for images that all have the same grid."""

    def __init__(self, table: Tensor) -> None:
        self.table = table  # [patches, hidden]

    def add_to(self, hidden: Tensor, images: ImageBatch) -> Tensor:
        return hidden.view(images.num_images, *self.table.shape).add_(self.table).flatten(0, 1)


class InterpolatedPositions:
    """A square position table that is resized to the grid of each image, as in SigLIP 2 NaFlex."""

    def __init__(self, table: Tensor) -> None:
        side = int(len(table) ** 0.5)
        self.dtype = table.dtype
        self.table = table.float().view(1, side, side, -1).permute(0, 3, 1, 2)  # [1, hidden, side, side]
        self._by_grid: dict[tuple[int, int], Tensor] = {}

    def add_to(self, hidden: Tensor, images: ImageBatch) -> Tensor:
        grids = [(rows, columns) for rows, columns in images.grids.tolist()]
        return hidden.add_(torch.cat([self._resized(grid) for grid in grids]))

    def _resized(self, grid: tuple[int, int]) -> Tensor:
        """[patches, hidden]"""
        if (found := self._by_grid.pop(grid, None)) is None:
            if len(self._by_grid) >= MAX_GRIDS:
                self._by_grid.pop(next(iter(self._by_grid)))
            resized = F.interpolate(
                self.table, size=grid, mode="bilinear", align_corners=False, antialias=True
            )
            found = resized[0].flatten(1).t().to(self.dtype).contiguous()
        self._by_grid[grid] = found  # the latest is last
        return found


def _positions(
    build: LayerBuilder, name: str, config: Mapping[str, Any], pixels: ImageProcessorSpec
) -> FixedPositions | InterpolatedPositions:
    if isinstance(pixels.geometry, MaxPatches):
        return InterpolatedPositions(build.table(name, config["num_patches"], config["hidden_size"]))
    side = config["image_size"] // config["patch_size"]
    return FixedPositions(build.table(name, side * side, config["hidden_size"]))


class AttentionPooling:
    """A learned query attends to the patches of each image; a feed-forward block follows."""

    def __init__(self, build: LayerBuilder, prefix: str, shape: LayerShape) -> None:
        hidden, weights = shape.hidden, build.weights
        weight = weights.take(prefix + "attention.in_proj_weight", 3 * hidden, hidden)
        bias = weights.take(prefix + "attention.in_proj_bias", 3 * hidden)
        probe = weights.read(prefix + "probe", (1, 1, hidden)).float().to(weights.device).view(hidden)
        query = weight[:hidden].float() @ probe + bias[:hidden].float()
        self.query = query.to(weights.dtype).view(shape.heads, -1)  # [heads, dim]
        self.key_value = make_linear(
            weight[hidden:].contiguous(), bias[hidden:].contiguous(), "identity", build.precision(prefix)
        )
        self.out = build.linear(prefix + "attention.out_proj", hidden, hidden)
        self.norm = build.norm(prefix + "layernorm", hidden, shape.eps)
        self.mlp = MLP(
            build.linear(prefix + "mlp.fc1", hidden, shape.intermediate, shape.act),
            build.linear(prefix + "mlp.fc2", shape.intermediate, hidden),
        )
        self.heads = shape.heads

    def __call__(self, states: Tensor, images: ImageBatch) -> Tensor:
        """states [patches, hidden] → [images, hidden]."""
        both = self.key_value(states).view(len(states), 2, self.heads, -1)
        pooled = self.out(self._attend(both[:, 0], both[:, 1], images))
        return self.mlp(self.norm(pooled), pooled)

    def _attend(self, key: Tensor, value: Tensor, images: ImageBatch) -> Tensor:
        """[images, hidden]"""
        count, dim = images.num_images, key.shape[2]
        query = self.query.expand(count, -1, -1)
        if key.dtype in (torch.bfloat16, torch.float16) and use_kernel(key):
            ends = torch.arange(count + 1, dtype=torch.int32, device=key.device)
            return flash_attention(
                query.contiguous(), key, value, ends, images.cu_patches, max_length=1, scale=dim**-0.5
            )
        out = key.new_empty((count, self.heads * dim))
        for group in images.groups:
            rows = slice(group.first_row, group.first_row + group.num_rows)
            keys = slice(group.first_token, group.first_token + group.num_rows * group.length)
            k, v = (x[keys].view(group.num_rows, group.length, -1, dim).transpose(1, 2) for x in (key, value))
            context = F.scaled_dot_product_attention(query[rows][:, :, None], k, v)
            out[rows] = context.flatten(1)
        return out
