"""ModernVBERT: a ModernBERT encoder that reads text and image tiles, encoded by a SigLIP tower.

ColModernVBERT is a page retriever based on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.vision_tower import image_processor, vision_options
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.layers.images import VisionTower
from penstock.models.heads import add_page_projection
from penstock.models.modernbert import ModernBert
from penstock.models.options import require
from penstock.models.siglip_vision import SIGLIP_HEAD, SiglipTokens, SiglipVision, tower_builder
from penstock.types import Task

IGNORED = (*SIGLIP_HEAD, "lm_head.", "projection_head.")


class ModernVBert(ModernBert):
    """An encoder with a vision tower. Image features replace word embeddings before the first norm."""

    def __init__(self, build: LayerBuilder, config: Mapping[str, Any], vision: VisionTower) -> None:
        super().__init__(build, config)
        self.vision = vision
        self.ignored_tensors = IGNORED


def modernvbert(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> ModernVBert:
    require(config, text_model_type="modernbert")
    return ModernVBert(build, config, _tower(build, config))


def col_modernvbert(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> ModernVBert:
    require(config, vlm_model_type="modernvbert")
    model = modernvbert(build, config, head)
    add_page_projection(model, build, config)
    return model


def _tower(build: LayerBuilder, config: Mapping[str, Any]) -> SiglipTokens:
    """The vision tower with its connector."""
    if build.folder is None:
        raise ValueError("a vision tower needs the folder with its image processor")
    options, pixels, merge = vision_options(config), image_processor(build.folder, config), _merge(config)
    if pixels.tile_patches % merge:
        raise ModelLoadError(
            f"config.json has pixel_shuffle_factor = {merge}, which does not divide the "
            f"{pixels.tile_patches} patches of a side of a tile",
            param="model",
        )
    plain, prefix = tower_builder(build)
    tower = SiglipVision(plain, prefix, options, pixels, has_head=False)
    name = "connector.modality_projection"
    name = build.weights.prefix_of(f"{name}.weight") + name
    width = options["hidden_size"] * merge**2
    return SiglipTokens(tower, plain.linear(name, width, config["hidden_size"], bias=False), merge)


def _merge(config: Mapping[str, Any]) -> int:
    """The side of the square of patches that becomes one token."""
    factor = config["pixel_shuffle_factor"]
    if not isinstance(factor, int) or isinstance(factor, bool) or factor < 1:
        raise ModelLoadError(
            f"config.json has pixel_shuffle_factor = {factor!r}; it has to be an integer above 0",
            param="model",
        )
    return factor
