"""What the files of a model with a text and a vision tower say: how its texts are framed, and how vectors of
texts and images are compared. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.checkpoint.families import Architecture, find_architecture
from penstock.checkpoint.files import mapping, optional_json, shown, weight_files
from penstock.checkpoint.image_processor import FixedSize, ImageProcessorSpec
from penstock.checkpoint.image_processor_files import read_image_processor
from penstock.checkpoint.keys import KNOWN_KEYS
from penstock.checkpoint.sizes import check_numbers
from penstock.checkpoint.tensors import read_scalar
from penstock.errors import ModelLoadError

_LEGACY_EOS = 2  # of CLIP's first files; transformers then takes the highest token id for the end
_LEFT_PADDED = ("Gemma", "Siglip2")  # tokenizers that pad on the left where no file says otherwise


class DualSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a model with towers for texts and images reads texts and compares vectors."""

    activation: Literal["softmax", "sigmoid"]  # of the scores of an image's labels
    logit_scale: float | None  # cosines are multiplied by its exponential; None: no file has it
    logit_bias: float = 0.0
    end_token: int | None = None  # a text's vector is the state of this token; None: of its last
    padded_length: int | None = None  # texts are padded to this length, and attend to the padding
    pad_token: int = 0
    pads_left: bool = False
    class_tokens: int = 0  # that the vision tower puts before the patches


def vision_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """`vision_config`, with the family's values for keys that it leaves out."""
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
    """Refuse a vision tower that would be computed otherwise than the reference does."""
    given = mapping(config, "vision_config", file=file)
    check_numbers(file, given)
    for name in ("text", "vision"):
        _check_repeated(file, config, name)
    known = KNOWN_KEYS | architecture.family.vision_defaults.keys() | {"projection_dim", "model_type"}
    unknown = [key for key, value in given.items() if value and key not in known and not key.startswith("_")]
    if unknown:
        raise ModelLoadError(
            f"{file} has vision_config.{unknown[0]} = {shown(given[unknown[0]])}, which "
            f"{architecture.name} is not known to read",
            param="model",
        )
    vision = vision_options(config)
    for key, wanted in (("num_channels", (3,)), ("vision_use_head", (None, True))):
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
    """The position table fits the images that the processor makes."""
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
    if isinstance(pixels.geometry, FixedSize):
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


def _check_repeated(file: Path, config: Mapping[str, Any], name: str) -> None:
    """Old files have the keys of a tower twice. transformers takes the second for what counts."""
    repeated = mapping(config, f"{name}_config_dict", file=file)
    tower = config if name == "text" else vision_options(config)
    for key, value in repeated.items():
        if key in tower and key not in ("model_type", "projection_dim") and tower[key] != value:
            raise ModelLoadError(
                f"{file} has {name}_config_dict.{key} = {shown(value)}, but {name}_config has "
                f"{shown(tower[key])}; make them equal",
                param="model",
            )


def read_dual(folder: Path, architecture: Architecture, config: Mapping[str, Any]) -> DualSpec:
    scale = _scalar(folder, "logit_scale")
    if architecture.family.name == "clip":
        return DualSpec(
            activation="softmax",
            logit_scale=scale,
            end_token=_end_token(folder / "config.json", config),
            class_tokens=1,
        )
    settings = optional_json(folder / "tokenizer_config.json")
    side = settings.get("padding_side")
    if side is None:
        side = "left" if str(settings.get("tokenizer_class")).startswith(_LEFT_PADDED) else "right"
    return DualSpec(
        activation="sigmoid",
        logit_scale=scale,
        logit_bias=_scalar(folder, "logit_bias") or 0.0,
        padded_length=int(config["max_position_embeddings"]),
        pad_token=_pad_token(folder, settings),
        pads_left=side == "left",
    )


def _end_token(file: Path, config: Mapping[str, Any]) -> int:
    token = config["eos_token_id"]
    if not isinstance(token, int) or isinstance(token, bool):
        raise ModelLoadError(
            f"{file} has text_config.eos_token_id = {shown(token)}; it has to be one token id", param="model"
        )
    return int(config["vocab_size"]) - 1 if token == _LEGACY_EOS else token


def _pad_token(folder: Path, settings: Mapping[str, Any]) -> int:
    """The id of the tokenizer's padding token."""
    named = settings.get("pad_token")
    content = named.get("content") if isinstance(named, dict) else named
    if content is None:
        content = "</s>" if str(settings.get("tokenizer_class")).startswith("SiglipTokenizer") else None
    file = folder / "tokenizer.json"
    tokenizer = optional_json(file)
    for token in tokenizer.get("added_tokens") or ():
        if token.get("content") == content:
            return int(token["id"])
    raise ModelLoadError(
        f"{folder / 'tokenizer_config.json'} has pad_token = {shown(named)}, which {file.name} does not "
        "list; texts are padded with it",
        param="model",
    )


def _scalar(folder: Path, name: str) -> float | None:
    """The value of a tensor with one number; None if no safetensors file has it."""
    for file in weight_files(folder):
        found = read_scalar(file, name) if file.suffix == ".safetensors" and file.is_file() else None
        if found is not None:
            return found if math.isfinite(found) else None
    return None
