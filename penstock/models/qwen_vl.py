"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a Qwen decoder that reads text and the features of a vision tower.

Embedders, rerankers, multi-vector retrievers and chat models are built on them. Positions have three axes
(M-RoPE), which differ only for tokens of images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.checkpoint.image_processor import ImageProcessorSpec, PixelRange
from penstock.checkpoint.image_processor_files import read_image_processor
from penstock.checkpoint.qwen_vision import QwenVisionShape, read_qwen_vision, tower_kind
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.layers.mrope import pair_axes
from penstock.layers.rotary import Rope
from penstock.models.decoder import qwen2_shape, qwen3_shape
from penstock.models.decoder_layers import Decoder, DecoderShape
from penstock.models.heads import add_page_projection
from penstock.models.options import with_defaults
from penstock.models.qwen_vision import QwenVisionTower
from penstock.types import Task

_QWEN2 = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
# Defaults in transformers that differ from the text models.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": {"rope_theta": 5e5},
}
_SECTIONS = {"qwen2_vl": [16, 24, 24], "qwen2_5_vl": [16, 24, 24], "qwen3_vl": [24, 20, 20]}


class QwenVL(Decoder):
    """A decoder with a vision tower. Its first layers add features of the tower's layers (DeepStack)."""

    def __init__(self, build: LayerBuilder, shape: DecoderShape, vision: QwenVisionTower) -> None:
        super().__init__(build, shape)
        self.vision = vision


def qwen2_vl(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> QwenVL:
    return _model(build, config, "qwen2_vl")


def qwen2_5_vl(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> QwenVL:
    return _model(build, config, "qwen2_5_vl")


def qwen3_vl(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> QwenVL:
    return _model(build, config, "qwen3_vl")


def col_qwen2(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> QwenVL:
    return _retriever(build, config, "qwen2_vl")


def col_qwen2_5(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> QwenVL:
    return _retriever(build, config, "qwen2_5_vl")


def col_qwen3(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> QwenVL:
    return _retriever(build, config, "qwen3_vl")


def _retriever(build: LayerBuilder, config: Mapping[str, Any], default: str) -> QwenVL:
    model = _model(build, config, tower_kind(default, config))
    add_page_projection(model, build, config)
    return model


def _model(build: LayerBuilder, config: Mapping[str, Any], kind: str) -> QwenVL:
    vision = _tower(build, config, read_qwen_vision(kind, config))
    return QwenVL(build, language_shape(kind, config), vision)


def language_shape(kind: str, config: Mapping[str, Any]) -> DecoderShape:
    """The decoder of a model of `kind`, with the axes of its positions."""
    config = with_defaults(config, **_DEFAULTS[kind])
    is_third = kind == "qwen3_vl"
    shape = qwen3_shape(config) if is_third else qwen2_shape(config)
    rope = {"mrope_section": _SECTIONS[kind], **shape.rope.scaling}
    if "mrope" in (rope.get("type"), rope.get("rope_type")):  # this names the axes, not a scaling
        rope |= {"type": "default", "rope_type": "default"}
    plain = Rope(shape.rope.base, rope)
    axes = pair_axes(rope, shape.head_dim // 2, is_interleaved=is_third)
    return replace(shape, rope=plain, local_rope=plain, pair_axes=axes)


def _tower(build: LayerBuilder, config: Mapping[str, Any], shape: QwenVisionShape) -> QwenVisionTower:
    """The tower, in the model's precision even if the decoder is quantised."""
    plain = LayerBuilder(build.weights)
    prefix = build.weights.prefix_of("patch_embed.proj.weight")
    if build.is_quantized(f"{prefix}blocks.0.attn.qkv"):
        raise ModelLoadError(
            f"the checkpoint stores {prefix}blocks in a quantised form, which is not supported for a vision "
            "tower; take one that leaves it as it is",
            param="model",
        )
    return QwenVisionTower(plain, prefix, shape, _processor(build, config, shape))


def _processor(build: LayerBuilder, config: Mapping[str, Any], shape: QwenVisionShape) -> ImageProcessorSpec:
    folder = build.folder
    spec = None if folder is None else read_image_processor(folder, config)
    if spec is None:
        raise ModelLoadError(
            f"{folder} has no preprocessor_config.json, so nothing says how images are prepared; take it "
            "from the model's repository",
            param="model",
        )
    geometry = spec.geometry
    if not isinstance(geometry, PixelRange):
        raise ModelLoadError(f"the image processor in {folder} is not that of a Qwen model", param="model")
    given = (spec.patch_size, geometry.merge_size, geometry.temporal_patch_size)
    if given != (shape.patch_size, shape.merge, shape.frames):
        raise ModelLoadError(
            f"the image processor in {folder} has patch_size, merge_size and temporal_patch_size {given}; "
            f"the vision tower has {(shape.patch_size, shape.merge, shape.frames)}",
            param="model",
        )
    return spec
