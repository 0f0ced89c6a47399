"""Dense modules of the sentence-transformers layout: a linear layer in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.checkpoint.files import positive_integer, read_json
from penstock.errors import ModelLoadError

MAX_FEATURES = 1 << 20
ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "sigmoid", "silu")


class DenseSpec(msgspec.Struct, frozen=True):
    """A linear layer after the pooling, or on every token."""

    folder: str  # "": its tensors are stored with the model's
    in_features: int
    out_features: int
    bias: bool
    activation: str  # one of ACTIVATIONS
    residual: bool = False


def read_dense(
    folder: Path, path: str, *, reads: str = "sentence_embedding", activation: str = "tanh"
) -> DenseSpec:
    """`reads` is the only accepted input, `activation` the default where the file names none."""
    file = folder / path / "config.json"
    values = read_json(file)
    named = str(values.get("activation_function") or activation).rsplit(".", 1)[-1].lower()
    if named not in ACTIVATIONS:
        raise ModelLoadError(
            f"{file} has activation_function {named!r}, which is not supported; "
            f"supported: {', '.join(ACTIVATIONS)}"
        )
    if values.get("module_input_name", reads) != reads:
        raise ModelLoadError(
            f"{file} has module_input_name = {values['module_input_name']!r}, which is not supported here; "
            f"supported: {reads}"
        )
    return DenseSpec(
        folder=path,
        in_features=positive_integer(values, "in_features", file=file, high=MAX_FEATURES),
        out_features=positive_integer(values, "out_features", file=file, high=MAX_FEATURES),
        bias=bool(values.get("bias", True)),
        activation=named,
        residual=bool(values.get("use_residual", False)),
    )
