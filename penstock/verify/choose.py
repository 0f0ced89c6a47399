"""Choice of the reference library for a model, by its files. Does not import torch."""

from __future__ import annotations

from typing import Literal

from penstock.checkpoint.families import COLBERT_CLASS
from penstock.checkpoint.spec import ModelSpec
from penstock.errors import ConfigError
from penstock.types import Task

Library = Literal[
    "sentence-transformers",
    "sparse-encoder",
    "multi-vector-encoder",
    "cross-encoder",
    "transformers",
    "model2vec",
]
_OTHERS = {  # files of models whose reference library is not supported here
    "gliner_config.json": "the gliner package",
}


def choose(spec: ModelSpec) -> Library:
    """Choose the library that the authors of such a model use."""
    for name, library in _OTHERS.items():
        if (spec.path / name).is_file():
            raise ConfigError(
                f"{spec.name} has {name}: its reference is {library}, which `penstock verify` does not drive",
                param="model",
            )
    has_modules = (spec.root_path / "modules.json").is_file()
    if spec.static is not None and not has_modules:
        return "model2vec"
    if spec.late is not None or spec.architecture == COLBERT_CLASS:
        return "multi-vector-encoder"
    if spec.tasks[0] is Task.SPARSE:
        return "sparse-encoder"
    if (score := spec.score) is not None and not score.marks:
        has_own_prompt = bool(score.tokens or score.template)  # CrossEncoder cannot read it from the files
        if has_modules or not has_own_prompt:
            return "cross-encoder"
    return "sentence-transformers" if has_modules else "transformers"


def limits(spec: ModelSpec, library: Library) -> str:
    """Describe what a comparison with this library does not cover; empty if nothing."""
    if library == "transformers" and spec.score is not None:
        return (
            "no library scores pairs with this model as its authors do: the model's states were compared, "
            "its prompt and its scores were not"
        )
    return ""
