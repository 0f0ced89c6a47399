"""GLiClass models: zero-shot classifiers that read labels and text in one row.

Only options that change the answer are read; each is either supported or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.files import optional_integer, shown
from penstock.checkpoint.gliner import allow_long_rows, check_encoder
from penstock.errors import ModelLoadError

GLICLASS_CLASS = "GLiClassModel"
# Supported values of each option. The first is the default of a file without the option.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "architecture_type": ("uni-encoder",),
    "scorer_type": ("simple", "weighted-dot", "mlp"),
    "pooling_strategy": ("first", "last", "avg", "max"),
    "class_token_pooling": ("first",),
    "encoder_layer_id": (-1, None),
    "use_lstm": (False, None),
    "squeeze_layers": (False, None),
    "use_segment_embeddings": (False, None),
    "use_calibrator": (False, None),
    "multimodal": (False, None),
}


class ZeroShotSpec(msgspec.Struct, frozen=True):
    """How a GLiClass model reads labels and text."""

    label_token_id: int
    separator_id: int
    is_prompt_first: bool  # the labels precede the text
    pooling: str  # pooling of the text's tokens
    reads_text_only: bool  # pooling begins at the separator
    reads_label_token: bool  # a label's state is its marker's; otherwise the next token's
    label_token: str = "<<LABEL>>"
    separator: str = "<<SEP>>"


def encoder_config(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The encoder's configuration with GLiClass's own options under `gliclass`."""
    for key, supported in _SUPPORTED.items():
        if key in config and config[key] not in supported:
            names = ", ".join(repr(value) for value in supported if value not in (None, False, -1))
            raise ModelLoadError(
                f"{file} has {key} = {shown(config[key])}: this kind of GLiClass model is not supported; "
                + (f"supported: {names}" if names else f"supported: models without {key}"),
                param="model",
            )
    if config.get("extract_text_features") and config.get("pooling_strategy", "first") != "first":
        raise ModelLoadError(
            f"{file} has extract_text_features with pooling_strategy = {shown(config['pooling_strategy'])}, "
            "which is not supported; supported: first",
            param="model",
        )
    encoder = config.get("encoder_config")
    if not isinstance(encoder, dict):
        raise ModelLoadError(
            f"{file} has encoder_config = {shown(encoder)}; it has to be an object", param="model"
        )
    encoder = {key: value for key, value in encoder.items() if key != "architectures"}
    check_encoder(file, encoder, "GLiClass")
    encoder = allow_long_rows(encoder)
    hidden_size, vocab_size = config.get("hidden_size"), config.get("vocab_size")
    if vocab_size is not None:
        encoder["vocab_size"] = vocab_size
    inner = encoder.get("hidden_size") if hidden_size is None else hidden_size
    if inner != encoder.get("hidden_size"):
        raise ModelLoadError(
            f"{file} has hidden_size = {shown(hidden_size)}, but its encoder has "
            f"{shown(encoder.get('hidden_size'))}; both have to be equal",
            param="model",
        )
    settings = {
        "encoder": encoder["model_type"],
        "scorer_type": config.get("scorer_type", "simple"),
        "pooling_strategy": config.get("pooling_strategy", "first"),
        "projector_hidden_act": config.get("projector_hidden_act", "gelu"),
        "normalize_features": bool(config.get("normalize_features")),
        "extract_text_features": bool(config.get("extract_text_features")),
        "embed_class_token": config.get("embed_class_token") is not False,
        "prompt_first": bool(config.get("prompt_first")),
        "class_token_index": _token_index(config, encoder, "class_token_index", 0),
        "text_token_index": _token_index(config, encoder, "text_token_index", 1),
    }
    return {**encoder, "architectures": [GLICLASS_CLASS], "model_type": "GLiClass", "gliclass": settings}


def read_zero_shot(config: Mapping[str, Any]) -> ZeroShotSpec | None:
    """Read the options of a GLiClass model; None for other models."""
    settings = config.get("gliclass")
    if not isinstance(settings, Mapping):
        return None
    return ZeroShotSpec(
        label_token_id=settings["class_token_index"],
        separator_id=settings["text_token_index"],
        is_prompt_first=settings["prompt_first"],
        pooling=settings["pooling_strategy"],
        reads_text_only=settings["extract_text_features"],
        reads_label_token=settings["embed_class_token"],
    )


def _token_index(config: Mapping[str, Any], encoder: Mapping[str, Any], key: str, beyond: int) -> int:
    """The id of a marker. If the file has none, it is the vocabulary size plus `beyond`."""
    found = optional_integer(config, key)
    return int(encoder.get("vocab_size", 0)) + beyond if found in (None, -1) else int(found or 0)
