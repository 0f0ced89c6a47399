"""Dense modules of the sentence-transformers layout: a linear layer in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.checkpoint.files import integer, read_json
from penstock.errors import ModelLoadError

ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "sigmoid", "silu")


class DenseSpec(msgspec.Struct, frozen=True):
    """A linear layer that stands after the pooling, or on every token."""

    folder: str  # "": its tensors lie beside the model's
    in_features: int
    out_features: int
    bias: bool
    activation: str  # one of ACTIVATIONS
    residual: bool = False


def read_dense(
    folder: Path, path: str, *, reads: str = "sentence_embedding", activation: str = "tanh"
) -> DenseSpec:
    """`reads` is the only input that is accepted, `activation` the one that is meant if none is named."""
    file = folder / path / "config.json"
    values = read_json(file)
    named = str(values.get("activation_function") or activation).rsplit(".", 1)[-1].lower()
    if named not in ACTIVATIONS:
        raise ModelLoadError(
            f"{path}: activation {named!r} is not supported; known: {', '.join(ACTIVATIONS)}"
        )
    if values.get("module_input_name", reads) != reads:
        raise ModelLoadError(f"{path}: a Dense module on {values['module_input_name']!r} is not supported")
    return DenseSpec(
        folder=path,
        in_features=integer(values, "in_features", file=file),
        out_features=integer(values, "out_features", file=file),
        bias=bool(values.get("bias", True)),
        activation=named,
        residual=bool(values.get("use_residual", False)),
    )
