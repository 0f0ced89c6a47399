"""Which file builds which architecture. Model files are imported only when they are needed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder

_FAMILIES = {  # family: (architecture prefix in config.json, model_type, builder)
    "bert": ("Bert", "encoder:bert"),
    "roberta": ("Roberta", "encoder:roberta"),
    "xlm-roberta": ("XLMRoberta", "encoder:roberta"),
    "camembert": ("Camembert", "encoder:roberta"),
    "distilbert": ("DistilBert", "encoder:distilbert"),
    "mpnet": ("MPNet", "encoder:mpnet"),
}
_SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining")
ARCHITECTURES: dict[str, str] = {
    prefix + suffix: builder for prefix, builder in _FAMILIES.values() for suffix in _SUFFIXES
} | {model_type: builder for model_type, (_, builder) in _FAMILIES.items()}


class Model(Protocol):
    hidden_size: int

    def __call__(self, batch: Batch) -> Tensor:
        """The last hidden states, [tokens, hidden]."""
        ...


def build_model(architecture: str, config: Mapping[str, Any], build: LayerBuilder) -> Model:
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"architecture {architecture!r} is not supported; supported: "
            + ", ".join(sorted(name for name in ARCHITECTURES if name[0].isupper())),
            param="model",
        )
    module, function = ARCHITECTURES[architecture].split(":")
    _check(config)
    model: Model = getattr(importlib.import_module(f"penstock.models.{module}"), function)(build, config)
    return model


def _check(config: Mapping[str, Any]) -> None:
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ModelLoadError(f"position_embedding_type {kind!r} is not supported; only 'absolute' is")
