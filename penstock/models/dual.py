"""Models with a text tower and an image tower that embed into one space: CLIP, SigLIP, SigLIP 2.

A row is a text or an image, and one step may have both. Texts run through the text tower, images through the
vision tower, and the pooler reads one vector of each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.checkpoint.image_processor import ImageProcessorSpec
from penstock.checkpoint.vision_tower import image_processor, vision_options
from penstock.layers.attention import BIDIRECTIONAL, CAUSAL
from penstock.layers.batch import Batch, OutputTokens, patch_batch
from penstock.layers.build import LayerBuilder
from penstock.layers.embedding import EncoderEmbedding
from penstock.layers.head import TaskHead
from penstock.layers.images import ImageBatch, ImageTokens, VisionTower
from penstock.layers.linear import LinearLayer
from penstock.models.patches import PatchEmbedding
from penstock.models.pre_norm import LayerShape, PreNormStack
from penstock.models.siglip_vision import SiglipVision
from penstock.types import Ints, LengthGroup, Task

IGNORED = ("logit_scale", "logit_bias", "position_ids")  # only for the comparison of vectors, or constant


class TextTower:
    """token ids → projected states [tokens, width]. The pooler reads the last token of each row."""

    def __init__(
        self, build: LayerBuilder, config: Mapping[str, Any], head: LinearLayer, *, causal: bool
    ) -> None:
        shape, prefix = LayerShape.of(config), "text_model."
        self.embedding = EncoderEmbedding(
            build.table(prefix + "embeddings.token_embedding", config["vocab_size"], shape.hidden),
            build.table(
                prefix + "embeddings.position_embedding", config["max_position_embeddings"], shape.hidden
            ),
            segments=None,
        )
        kind = CAUSAL if causal else BIDIRECTIONAL
        self.stack = PreNormStack(build, prefix + "encoder.layers.", shape, prefix + "final_layer_norm", kind)
        self.head = head

    def __call__(self, batch: Batch) -> Tensor:
        return self.head(self.stack(self.embedding(batch), batch))


class DualModel:
    """Texts and images → vectors [tokens, width]. The pooler reads the last vector of each row."""

    def __init__(self, text: TextTower, vision: VisionTower) -> None:
        self.text, self.vision = text, vision
        self.hidden_size = text.head.out_features
        self.is_causal = False
        self.prunes_last_layer = True
        self.heads: dict[Task, TaskHead] = {}
        self.ignored_tensors = IGNORED

    def __call__(self, batch: Batch) -> Tensor:
        if batch.images is None:
            return self.text(batch)
        return self._mixed(batch, batch.images)

    def _mixed(self, batch: Batch, images: ImageTokens) -> Tensor:
        """Run a step with images. Image rows follow text rows."""
        num_rows = images.num_text_rows or 0
        texts = self.text(batch.leading_rows(num_rows)) if num_rows else None
        if batch.output_tokens is not None:
            return images.features if texts is None else torch.cat([texts, images.features])
        out = images.features.new_zeros((batch.num_tokens, self.hidden_size))
        if texts is not None:
            out[: len(texts)] = texts
        return out.index_copy_(0, images.tokens.long(), images.features)


class ClipVision:
    """CLIP's vision tower. The final state of a class token before the patches is projected."""

    def __init__(
        self, build: LayerBuilder, config: Mapping[str, Any], pixels: ImageProcessorSpec, width: int
    ) -> None:
        shape, prefix = LayerShape.of(config), "vision_model."
        embeddings = prefix + "embeddings."
        side = config["image_size"] // config["patch_size"]
        self.patches = PatchEmbedding.read(
            build, embeddings + "patch_embedding", shape.hidden, pixels, bias=False
        )
        self.positions = build.table(embeddings + "position_embedding", side * side + 1, shape.hidden)
        self.positions[0] += build.weights.take(embeddings + "class_embedding", shape.hidden)
        self.norm = build.norm(prefix + "pre_layrnorm", shape.hidden, shape.eps)
        self.stack = PreNormStack(build, prefix + "encoder.layers.", shape, prefix + "post_layernorm")
        self.projection = build.linear("visual_projection", shape.hidden, width, bias=False)
        self.feature_width = width

    def layout(self, grids: Ints) -> list[Ints]:
        """The start of each image in the run of class tokens and patches. All images have the same length."""
        return [np.arange(len(grids) + 1, dtype=np.int32) * np.int32(len(self.positions))]

    def __call__(self, images: ImageBatch) -> Tensor:
        (cu_lengths,) = images.layout
        count, length = images.num_images, len(self.positions)
        hidden = self.positions.expand(count, -1, -1).clone()
        hidden[:, 1:] += self.patches(images.patches).view(count, length - 1, -1)
        groups = (LengthGroup(0, count, length, 0),)
        outputs = OutputTokens(cu_lengths[:-1], cu_lengths, cu_lengths, 1)  # class tokens
        states = self.stack(self.norm(hidden.flatten(0, 1)), patch_batch(cu_lengths, groups, outputs))
        return self.projection(states)


def clip(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> DualModel:
    width = config["projection_dim"]
    projection = build.linear("text_projection", config["hidden_size"], width, bias=False)
    text = TextTower(build, config, projection, causal=True)
    vision = ClipVision(build.without_adapters(), vision_options(config), _pixels(build, config), width)
    return DualModel(text, vision)


def siglip(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> DualModel:
    hidden = config["hidden_size"]
    projection = build.linear("text_model.head", hidden, config.get("projection_size") or hidden)
    text = TextTower(build, config, projection, causal=False)
    plain = build.without_adapters()
    vision = SiglipVision(plain, "vision_model.", vision_options(config), _pixels(build, config))
    return DualModel(text, vision)


def _pixels(build: LayerBuilder, config: Mapping[str, Any]) -> ImageProcessorSpec:
    if build.folder is None:
        raise ValueError("a vision tower needs the folder with its image processor")
    return image_processor(build.folder, config)
