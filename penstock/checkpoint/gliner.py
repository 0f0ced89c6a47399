"""GLiNER models: `gliner_config.json` instead of `config.json`, with the encoder's configuration inside.

Only options that change the answer are read; each is either supported or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.files import optional_integer, positive_integer, read_json, shown
from penstock.errors import ModelLoadError

GLINER_FILE = "gliner_config.json"
GLINER_CLASS = "GLiNERModel"  # the architecture in the derived configuration
ENCODERS = ("deberta-v2", "modernbert")  # supported model types; the first is the default
TOKEN_LEVEL = "token_level"  # the span mode in which words are scored, not spans
_MAX_POSITIONS = 2048  # encoders with only relative positions accept rows of at least this length
_MODEL_TYPES = (None, "gliner", "gliner_uni_encoder_span", "gliner_uni_encoder_token")
_SPAN_MODES = ("markerV0", "marker", TOKEN_LEVEL)
# Supported values of each option. The first is the default of a file without the option.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": _MODEL_TYPES,
    "span_mode": _SPAN_MODES,
    "subtoken_pooling": ("first",),
    "words_splitter_type": ("whitespace",),
    "fuse_layers": (False, None),
    "post_fusion_schema": ("", None),
    "span_encoder_config": (None,),
    "labels_encoder": (None,),
    "labels_encoder_config": (None,),
    "labels_decoder": (None,),
    "labels_decoder_config": (None,),
    "decoder_config": (None,),
    "relations_layer": (None,),
    "triples_layer": (None,),
    "represent_spans": (False, None),
    "precomputed_prompts_mode": (None, False),
}
_DEBERTA_V3 = {
    "model_type": "deberta-v2",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-7,
    "max_position_embeddings": 512,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "position_buckets": 256,
    "relative_attention": True,
    "share_att_key": True,
    "type_vocab_size": 0,
    "vocab_size": 128100,
}


def _deberta_v3(hidden: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return _DEBERTA_V3 | sizes | {"intermediate_size": 4 * hidden} | others


# Encoders that older files name without including their configuration.
_ENCODERS: dict[str, dict[str, Any]] = {
    "microsoft/deberta-v3-xsmall": _deberta_v3(384, 12, 6),
    "microsoft/deberta-v3-small": _deberta_v3(768, 6, 12),
    "microsoft/deberta-v3-base": _deberta_v3(768, 12, 12),
    "microsoft/deberta-v3-large": _deberta_v3(1024, 24, 16),
    "microsoft/mdeberta-v3-base": _deberta_v3(768, 12, 12, vocab_size=251000),
}


class EntitySpec(msgspec.Struct, frozen=True):
    """How a GLiNER model reads labels and text, and what its scores mean."""

    label_token: str  # precedes each label
    separator: str  # between the labels and the text
    label_token_id: int  # -1: not in the file
    max_words: int  # words read of each text
    max_width: int  # words in the longest span; 0: words are scored, not spans
    # Whether the state of a label is that of its marker, or that of the token after the marker.
    reads_label_token: bool = True

    @property
    def is_token_level(self) -> bool:
        return self.max_width == 0

    @property
    def outputs_per_label(self) -> int:
        return 3 if self.is_token_level else self.max_width


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read config.json, or convert `gliner_config.json` to the same form."""
    return gliner_config(folder / GLINER_FILE) if is_gliner(folder) else read_json(folder / "config.json")


def is_gliner(folder: Path) -> bool:
    return (folder / GLINER_FILE).is_file()


def gliner_config(file: Path) -> dict[str, Any]:
    """The encoder's configuration with GLiNER's own options under `gliner`."""
    given = read_json(file)
    for key, supported in _SUPPORTED.items():
        if key in given and given[key] not in supported:
            names = ", ".join(repr(value) for value in supported if value not in (None, False, ""))
            raise ModelLoadError(
                f"{file} has {key} = {shown(given[key])}: this kind of GLiNER model is not supported; "
                + (f"supported: {names}" if names else f"supported: models without {key}"),
                param="model",
            )
    encoder = _encoder(file, given)
    vocab_size = given.get("vocab_size", -1)
    if vocab_size not in (-1, None):
        encoder["vocab_size"] = vocab_size
    settings = {
        "hidden_size": _integer(file, given, "hidden_size", 512, 1 << 16),
        "max_width": _integer(file, given, "max_width", 12, 256),
        "max_len": _integer(file, given, "max_len", 384, 1 << 16),
        "num_rnn_layers": optional_integer({"num_rnn_layers": 1} | given, "num_rnn_layers") or 0,
        "encoder": encoder["model_type"],
        "span_mode": given.get("span_mode", _SPAN_MODES[0]),
        "embed_ent_token": given.get("embed_ent_token") is not False,
        "ent_token": str(given.get("ent_token", "<<ENT>>")),
        "sep_token": str(given.get("sep_token", "<<SEP>>")),
        "class_token_index": optional_integer(given, "class_token_index") or -1,
    }
    if settings["hidden_size"] % 2 and settings["num_rnn_layers"]:
        raise ModelLoadError(
            f"{file} has hidden_size = {settings['hidden_size']}; it has to be even", param="model"
        )
    return {**encoder, "architectures": [GLINER_CLASS], "model_type": "gliner", "gliner": settings}


def read_entities(config: Mapping[str, Any]) -> EntitySpec | None:
    """Read the options of a GLiNER model; None for a model with fixed labels."""
    settings = config.get("gliner")
    if not isinstance(settings, Mapping):
        return None
    return EntitySpec(
        label_token=settings["ent_token"],
        separator=settings["sep_token"],
        label_token_id=settings["class_token_index"],
        max_words=settings["max_len"],
        max_width=0 if settings["span_mode"] == TOKEN_LEVEL else settings["max_width"],
        reads_label_token=settings["embed_ent_token"],
    )


def check_encoder(file: Path, encoder: dict[str, Any], model: str) -> None:
    """Refuse encoders that `models/gliner.py` cannot build."""
    kind = encoder.setdefault("model_type", ENCODERS[0])
    if kind not in ENCODERS:
        raise ModelLoadError(
            f"{file} has an encoder of model_type {shown(kind)}, which is not supported for {model}; "
            f"supported: {', '.join(ENCODERS)}",
            param="model",
        )


def allow_long_rows(encoder: dict[str, Any]) -> dict[str, Any]:
    """Raise the maximum row length of an encoder that has only relative positions."""
    positions = encoder.get("max_position_embeddings")
    has_relative_positions = (
        encoder.get("relative_attention") and encoder.get("position_biased_input") is False
    )
    if isinstance(positions, int) and has_relative_positions:  # distances are bucketed, so rows may be longer
        if (optional_integer(encoder, "max_relative_positions") or -1) < 1:
            encoder["max_relative_positions"] = positions
        encoder["max_position_embeddings"] = max(positions, _MAX_POSITIONS)
    return encoder


def _encoder(file: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    name, encoder = given.get("model_name"), given.get("encoder_config")
    if encoder is None:
        encoder = _ENCODERS.get(str(name))
        if encoder is None:
            raise ModelLoadError(
                f"{file} names the encoder {shown(name)} without its configuration; give it as "
                f"encoder_config. Known without: {', '.join(_ENCODERS)}",
                param="model",
            )
    if not isinstance(encoder, dict):
        raise ModelLoadError(
            f"{file} has encoder_config = {shown(encoder)}; it has to be an object", param="model"
        )
    encoder = {key: value for key, value in encoder.items() if key not in ("architectures", "text_config")}
    check_encoder(file, encoder, "GLiNER")
    return allow_long_rows(encoder)


def _integer(file: Path, given: Mapping[str, Any], key: str, default: int, high: int) -> int:
    return positive_integer({key: default} | dict(given), key, file=file, high=high)
