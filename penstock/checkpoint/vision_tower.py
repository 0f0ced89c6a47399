"""Reads `vision_config` of vision towers like CLIP's and SigLIP's, and checks its keys and its image
processor. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.families import Architecture, find_architecture
from penstock.checkpoint.files import mapping, shown
from penstock.checkpoint.image_processor import FixedSize, ImageProcessorSpec, Tiles
from penstock.checkpoint.image_processor_files import read_image_processor
from penstock.checkpoint.keys import KNOWN_KEYS
from penstock.checkpoint.sizes import check_numbers
from penstock.errors import ModelLoadError

_ENGINE_VBERT = "modernvbert_vision"  # model_type of colpali-engine's own ModernVBERT
# Keys of towers whose patches a text model reads. They repeat the text model's keys, or belong to parts that
# these models do not have.
_HARMLESS = frozenset(("num_image_tokens", "projector_hidden_act", "vision_use_head", "vocab_size"))


def vision_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """`vision_config`, with the family's defaults for missing keys."""
    names = config.get("architectures") or [config.get("model_type")]
    defaults = find_architecture(str(names[0]), config).family.vision_defaults
    given = config.get("vision_config") or {}
    return {**defaults, **{key: value for key, value in given.items() if value is not None}}


def image_processor(folder: Path, config: Mapping[str, Any]) -> ImageProcessorSpec:
    found = read_image_processor(folder, {**config, "vision_config": vision_options(config)})
    if found is None:
        raise ModelLoadError(
            f"{folder} has no preprocessor_config.json, so nothing says how images are prepared; take it "
            "from the model's repository",
            param="model",
        )
    return found


def check_vision(file: Path, architecture: Architecture, config: Mapping[str, Any]) -> None:
    """Refuse a vision tower whose results would differ from the reference's."""
    given = mapping(config, "vision_config", file=file)
    if given.get("model_type") == _ENGINE_VBERT:
        raise ModelLoadError(
            f"{file} is colpali-engine's, which leaves the sizes of its parts to other repositories; take "
            "the checkpoint of transformers' own class, such as ModernVBERT/colmodernvbert-merged",
            param="model",
        )
    check_numbers(file, given)
    for name in ("text", "vision"):
        _check_repeated(file, config, name)
    known = KNOWN_KEYS | architecture.family.vision_defaults.keys() | {"projection_dim", "model_type"}
    known |= {"vision_use_head"} if architecture.family.is_dual else _HARMLESS
    unknown = [key for key, value in given.items() if value and key not in known and not key.startswith("_")]
    if unknown:
        raise ModelLoadError(
            f"{file} has vision_config.{unknown[0]} = {shown(given[unknown[0]])}, which "
            f"{architecture.name} is not known to read",
            param="model",
        )
    vision = vision_options(config)
    accepted: dict[str, tuple[Any, ...]] = {"num_channels": (3,)}
    if architecture.family.is_dual:
        accepted["vision_use_head"] = (None, True)
    else:  # a pooling head, if any, is not used
        accepted["model_type"] = (None, "siglip_vision_model")
    for key, wanted in accepted.items():
        if vision.get(key) not in wanted:
            raise ModelLoadError(
                f"{file} has vision_config.{key} = {shown(vision[key])}, which is not supported; supported: "
                f"{wanted[-1]}",
                param="model",
            )
    _check_grid(file, architecture, config, vision)


def _check_grid(
    file: Path, architecture: Architecture, config: Mapping[str, Any], vision: Mapping[str, Any]
) -> None:
    """Check that the position table fits the processor's images."""
    pixels = image_processor(file.parent, config)
    for key in ("patch_size", "image_size", "num_patches"):
        value = vision.get(key)
        if key in vision and (
            not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 14
        ):
            raise ModelLoadError(
                f"{file} has vision_config.{key} = {shown(value)}; it has to be an integer from 1 to 16,384",
                param="model",
            )
    if architecture.family.has_siglip:
        _check_tokens(file, architecture, pixels)
    elif isinstance(pixels.geometry, FixedSize):
        if "image_size" not in vision or pixels.geometry.size != (vision["image_size"],) * 2:
            height, width = pixels.geometry.size
            raise ModelLoadError(
                f"the image processor of {file.parent} makes images of {width} × {height} pixels, but the "
                f"tower of {architecture.name} reads {vision.get('image_size')} × {vision.get('image_size')}",
                param="model",
            )
    elif "num_patches" not in vision or int(vision["num_patches"] ** 0.5) ** 2 != vision["num_patches"]:
        raise ModelLoadError(
            f"{file} has vision_config.num_patches = {shown(vision.get('num_patches'))}; it has to be a "
            "square number, because positions are interpolated",
            param="model",
        )


def _check_tokens(file: Path, architecture: Architecture, pixels: ImageProcessorSpec) -> None:
    """Check that images or tiles have one fixed size, and that each has placeholder tokens in a prompt.

    `read_image_processor` has already compared that size with the tower's image_size.
    """
    if not isinstance(pixels.geometry, FixedSize | Tiles):
        raise ModelLoadError(
            f"the image processor of {file.parent} makes images of several sizes, which the tower of "
            f"{architecture.name} does not read",
            param="model",
        )
    if not pixels.tokens_per_tile:
        raise ModelLoadError(
            f"{file} has no image_token_index, the placeholder token of images", param="model"
        )


def _check_repeated(file: Path, config: Mapping[str, Any], name: str) -> None:
    """Refuse contradictions in old files, which have a tower's keys twice. transformers uses the second
    set."""
    repeated = mapping(config, f"{name}_config_dict", file=file)
    tower = config if name == "text" else vision_options(config)
    for key, value in repeated.items():
        if key in tower and key not in ("model_type", "projection_dim") and tower[key] != value:
            raise ModelLoadError(
                f"{file} has {name}_config_dict.{key} = {shown(value)}, but {name}_config has "
                f"{shown(tower[key])}; make them equal",
                param="model",
            )
