"""Which library is the reference for a model: what its files say. Free of torch."""

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
_OTHERS = {  # kinds of folders whose own library is not driven here
    "gliner_config.json": "the gliner package",
}


def choose(spec: ModelSpec) -> Library:
    """The library that the authors of such files use."""
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
        has_own_prompt = bool(score.tokens or score.template)  # which no file tells CrossEncoder
        if has_modules or not has_own_prompt:
            return "cross-encoder"
    return "sentence-transformers" if has_modules else "transformers"


def limits(spec: ModelSpec, library: Library) -> str:
    """What a comparison with this library leaves open; empty if nothing."""
    if library == "transformers" and spec.score is not None:
        return (
            "no library scores pairs with this model as its authors do: the model's states were compared, "
            "its prompt and its scores were not"
        )
    return ""
