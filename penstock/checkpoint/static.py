"""Static embeddings: a table with one vector for each token, and no layers.

Two libraries define such folders, and they differ. sentence-transformers (a modules.json that begins with
StaticEmbedding) averages the vectors of all tokens. model2vec (no modules.json) leaves unknown tokens out and
reads at most `max_length` tokens. Neither adds special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.files import STATIC_MODULE, CheckpointFiles, optional_json, read_json, shown
from penstock.checkpoint.layout import FolderLayout
from penstock.checkpoint.tensors import StoredTensor, stored_tensors
from penstock.errors import ModelLoadError

ARCHITECTURE = "StaticModel"
MAX_TOKENS = 1 << 17  # maximum tokens of a text, and the default if the files set no limit
_MODEL2VEC_LENGTH = 512  # default max_length
_TENSORS = {"embeddings", "mapping", "weights"}
_FLOATS = ("F32", "F16", "BF16", "F64")


class StaticSpec(msgspec.Struct, frozen=True):
    """The table: the vector of token `i` is `embeddings[mapping[i]] · weights[i]`."""

    tensor: str  # name of the table
    rows: int  # rows of the table
    dim: int
    vocab_size: int
    has_mapping: bool = False  # several token ids can share a row
    has_weights: bool = False
    drops_unknown: bool = False  # unknown tokens are left out of the mean


def names_static(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "model2vec" or config.get("architectures") == [ARCHITECTURE]


def is_static(layout: FolderLayout) -> bool:
    if layout.modules:
        return layout.modules[0].kind == STATIC_MODULE
    config = optional_json(layout.folder / "config.json")
    if names_static(config):
        return True
    if not config or config.get("architectures") or config.get("model_type"):
        return False
    file = layout.folder / "model.safetensors"  # newer model2vec folders do not name the library
    return file.is_file() and "embeddings" in (found := set(stored_tensors(file))) and found <= _TENSORS


def read_static(layout: FolderLayout) -> StaticSpec:
    file = layout.folder / "model.safetensors"
    stored = stored_tensors(file)
    name = "embedding.weight" if "embedding.weight" in stored else "embeddings"
    if name not in stored or len(stored[name].shape) != 2:
        raise ModelLoadError(
            f"{file} has no table embeddings or embedding.weight; it has {', '.join(sorted(stored)[:8])}",
            param="model",
        )
    unknown = sorted(set(stored) - {name, *(_TENSORS - {"embeddings"})})
    if unknown or (name == "embedding.weight" and len(stored) > 1):
        raise ModelLoadError(
            f"{file} has tensors that static embeddings do not use: {', '.join(unknown or sorted(stored))}",
            param="model",
        )
    rows, dim = stored[name].shape
    mapped, weighted = stored.get("mapping"), stored.get("weights")
    sizes = {tensor.shape for tensor in (mapped, weighted) if tensor is not None}
    vocab_size = rows if mapped is None else mapped.shape[0]
    if sizes - {(vocab_size,)} or min(rows, dim, vocab_size) < 1:
        raise ModelLoadError(
            f"{file} has tensors of shapes that do not fit one another: "
            f"{ {key: list(tensor.shape) for key, tensor in stored.items()} }",
            param="model",
        )
    _check_types(file, stored, name)
    return StaticSpec(
        name,
        rows,
        dim,
        vocab_size,
        mapped is not None,
        weighted is not None,
        drops_unknown=not layout.modules,
    )


def _check_types(file: Path, stored: dict[str, StoredTensor], name: str) -> None:
    accepted = {name: (*_FLOATS, "I8"), "weights": _FLOATS, "mapping": ("I64", "I32")}
    for key, tensor in stored.items():
        if tensor.dtype not in accepted[key]:
            raise ModelLoadError(
                f"{file} stores {key} as {tensor.dtype}, which is not supported; "
                f"supported: {', '.join(accepted[key])}",
                param="model",
            )


def normalizes(files: CheckpointFiles) -> bool:
    """Read model2vec's option; the sentence-transformers layout has a Normalize module instead."""
    value = files.config.get("normalize", False)
    if not isinstance(value, bool):
        raise ModelLoadError(
            f"{files.config_file} has normalize = {shown(value)}; it has to be true or false", param="model"
        )
    return value


def static_length(files: CheckpointFiles) -> int:
    """Maximum tokens of a text: from the tokenizer's truncation settings, or model2vec's max_length."""
    file = files.folder / "tokenizer.json"
    cut = read_json(file).get("truncation")
    if files.modules and isinstance(cut, dict):
        if cut.get("direction", "Right") != "Right":
            raise ModelLoadError(
                f"{file} truncates texts at their beginning, which is not supported", param="model"
            )
        return _length(cut.get("max_length"), f"{file}: truncation.max_length")
    if files.modules:
        return MAX_TOKENS
    length = files.config.get("max_length", _MODEL2VEC_LENGTH)
    return MAX_TOKENS if length is None else _length(length, f"{files.config_file}: max_length")


def _length(value: Any, source: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(
            f"{source} is {shown(value)}; it has to be an integer of at least 1", param="model"
        )
    return min(value, MAX_TOKENS)
