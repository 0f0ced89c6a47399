"""PaliGemma: a Gemma decoder that reads text and the patches of a SigLIP tower, and attends both ways.

ColPali is a page retriever based on it. A page or a query is all prefix, so no part of it is causal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.checkpoint.vision_tower import image_processor, vision_options
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.layers.images import VisionTower
from penstock.models.decoder import gemma2_shape, gemma_shape
from penstock.models.decoder_layers import IGNORED, Decoder, DecoderShape
from penstock.models.heads import add_page_projection
from penstock.models.options import option, require
from penstock.models.siglip_vision import SIGLIP_HEAD, SiglipTokens, SiglipVision, tower_builder
from penstock.types import Task

_SHAPES = {"gemma": gemma_shape, "gemma2": gemma2_shape}


class PaliGemma(Decoder):
    """A decoder with a vision tower."""

    def __init__(self, build: LayerBuilder, shape: DecoderShape, vision: VisionTower) -> None:
        super().__init__(build, shape)
        stored = build.weights.prefix_of("embed_tokens.weight")
        names = ("language_model.model.", "language_model.")  # in transformers 4 and 5
        build.alias_prefix(stored, names[1] if stored.endswith(names[0]) else names[0])
        self.vision = vision
        self.ignored_tensors = (*IGNORED, *SIGLIP_HEAD)


def col_pali(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> PaliGemma:
    require(config, vlm_model_type="paligemma", is_causal=False)
    shape = _language_shape(config)
    model = PaliGemma(build, shape, _tower(build, config, shape.hidden))
    add_page_projection(model, build, config)
    return model


def _language_shape(config: Mapping[str, Any]) -> DecoderShape:
    """The shape of the decoder. There is no window, because all tokens of a prefix attend to one another."""
    kind = option(config, "text_model_type", default="gemma")
    if kind not in _SHAPES:
        raise ModelLoadError(
            f"config.json has a text_config of model_type {kind!r}, which is not supported; supported: "
            + ", ".join(_SHAPES),
            param="model",
        )
    shape = _SHAPES[kind](config)
    return replace(shape, sliding=(False,) * shape.layers, reach=None)


def _tower(build: LayerBuilder, config: Mapping[str, Any], width: int) -> SiglipTokens:
    """The tower with its projector. Unlike word embeddings, image features are not scaled."""
    if build.folder is None:
        raise ValueError("a vision tower needs the folder with its image processor")
    options, weights = vision_options(config), build.weights
    plain, prefix = tower_builder(build)
    tower = SiglipVision(plain, prefix, options, image_processor(build.folder, config), has_head=False)
    name = "multi_modal_projector.linear"
    project = plain.linear(weights.prefix_of(f"{name}.weight") + name, options["hidden_size"], width)
    return SiglipTokens(tower, project)
