"""Modules of the sentence-transformers layout that change a vector: Dense, LayerNorm and Normalize."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.files import optional_json, positive_integer, read_json, shown
from penstock.errors import ModelLoadError

MAX_FEATURES = 1 << 20
ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "sigmoid", "silu")


class DenseSpec(msgspec.Struct, frozen=True, tag="dense"):
    """A linear layer after the pooling, or on every token."""

    folder: str  # "": its tensors are stored with the model's
    in_features: int
    out_features: int
    bias: bool
    activation: str  # one of ACTIVATIONS
    residual: bool = False


class LayerNormSpec(msgspec.Struct, frozen=True, tag="layer_norm"):
    """A layer norm of the pooled vector."""

    folder: str
    size: int


class UnitSpec(msgspec.Struct, frozen=True, tag="unit"):
    """Scales the vector to unit length before another module."""


ModuleSpec = DenseSpec | LayerNormSpec | UnitSpec
_DENSE_KEYS = (
    "in_features",
    "out_features",
    "bias",
    "activation_function",
    "module_input_name",
    "module_output_name",
    "use_residual",
)


def refuse_unknown_keys(file: Path, values: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse keys that are not in `known`, because they may change results."""
    if unknown := sorted(set(values) - set(known)):
        raise ModelLoadError(
            f"{file} has {', '.join(unknown)}, which is not supported; supported: {', '.join(known)}",
            param="model",
        )


def read_layer_norm(root: Path, path: str) -> LayerNormSpec:
    file = root / path / "config.json"
    values = read_json(file)
    refuse_unknown_keys(file, values, ("dimension",))
    return LayerNormSpec(path, positive_integer(values, "dimension", file=file, high=MAX_FEATURES))


def check_normalize(root: Path, path: str) -> None:
    """Refuse a Normalize module that does anything but scale the pooled vector."""
    file = root / path / "config.json"  # older folders have none
    values = optional_json(file)
    refuse_unknown_keys(file, values, ("module_input_name", "module_output_name", "normalize_embeddings"))
    if values.get("normalize_embeddings", True) is not True:  # Octen's files have the key
        raise ModelLoadError(
            f"{file} has normalize_embeddings = {shown(values['normalize_embeddings'])}, which is not "
            "supported; it has to be true",
            param="model",
        )
    for name in ("module_input_name", "module_output_name"):
        if values.get(name) not in (None, "sentence_embedding"):
            raise ModelLoadError(
                f"{file} has {name} = {values[name]!r}, which is not supported here; supported: "
                "sentence_embedding",
                param="model",
            )


def read_dense(
    folder: Path, path: str, *, reads: str = "sentence_embedding", activation: str = "tanh"
) -> DenseSpec:
    """Read a Dense module. `reads` is the only accepted input, `activation` the default."""
    file = folder / path / "config.json"
    values = read_json(file)
    named = str(values.get("activation_function") or activation).rsplit(".", 1)[-1].lower()
    if named not in ACTIVATIONS:
        raise ModelLoadError(
            f"{file} has activation_function {named!r}, which is not supported; "
            f"supported: {', '.join(ACTIVATIONS)}"
        )
    refuse_unknown_keys(file, values, _DENSE_KEYS)
    for name in ("module_input_name", "module_output_name"):
        if (values.get(name) or reads) != reads:
            raise ModelLoadError(
                f"{file} has {name} = {values[name]!r}, which is not supported here; supported: {reads}"
            )
    return DenseSpec(
        folder=path,
        in_features=positive_integer(values, "in_features", file=file, high=MAX_FEATURES),
        out_features=positive_integer(values, "out_features", file=file, high=MAX_FEATURES),
        bias=bool(values.get("bias", True)),
        activation=named,
        residual=bool(values.get("use_residual", False)),
    )
