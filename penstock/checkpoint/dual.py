"""How a model with a text and a vision tower frames texts, and compares vectors of texts and images.

Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.checkpoint.families import Architecture
from penstock.checkpoint.files import optional_json, shown, weight_files
from penstock.checkpoint.tensors import read_scalar
from penstock.errors import ModelLoadError

_LEGACY_EOS = 2  # in CLIP's first files; transformers then uses the highest token id
_CANONICAL = "SiglipTokenizer"  # removes punctuation in code, as big_vision did in training
_LEFT_PADDED = ("Gemma", "Siglip2")  # tokenizers that pad on the left by default


class DualSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a model with towers for texts and images reads texts and compares vectors."""

    activation: Literal["softmax", "sigmoid"]  # applied to the scores of an image's labels
    logit_scale: float | None  # cosines are multiplied by exp(logit_scale); None: not in the files
    logit_bias: float = 0.0
    end_token: int | None = None  # a text's vector is the state of this token; None: of the last token
    padded_length: int | None = None  # texts are padded to this length, and attend to the padding
    pad_token: int = 0
    pads_left: bool = False
    strips_punctuation: bool = False  # remove punctuation before tokenising
    class_tokens: int = 0  # number of class tokens before the patches of an image


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
        strips_punctuation=str(settings.get("tokenizer_class")).startswith(_CANONICAL),
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
