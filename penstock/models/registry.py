"""Which file builds which architecture. Model files are imported only when they are needed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from penstock.core import Task
from penstock.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.layers.batch import Batch
    from penstock.layers.build import LayerBuilder
    from penstock.layers.head import TaskHead

# Family: (prefix of the class names in config.json, file:function that builds it).
FAMILIES: dict[str, tuple[str, str]] = {
    "bert": ("Bert", "encoder:bert"),
    "camembert": ("Camembert", "encoder:roberta"),
    "distilbert": ("DistilBert", "encoder:distilbert"),
    "mpnet": ("MPNet", "encoder:mpnet"),
    "roberta": ("Roberta", "encoder:roberta"),
    "xlm-roberta": ("XLMRoberta", "encoder:roberta"),
}
# What follows the prefix: the head that the weights carry.
HEADS: dict[str, Task | None] = {
    "Model": None,
    "ForMaskedLM": None,
    "ForPreTraining": None,
    "ForCausalLM": None,
    "LMHeadModel": None,
    "ForSequenceClassification": Task.CLASSIFY,
    "ForTokenClassification": Task.TOKEN_CLASSIFY,
}


class Model(Protocol):
    """A backbone with the heads of its checkpoint. `unneeded` marks tensors that may stay unread."""

    hidden_size: int
    heads: dict[Task, TaskHead]
    unneeded: tuple[str, ...]

    def __call__(self, batch: Batch) -> Tensor:
        """The last hidden states, [tokens, hidden]."""
        ...


def build_model(architecture: str, config: Mapping[str, Any], build: LayerBuilder) -> Model:
    """Builder functions take (layer builder, config.json, head task or None)."""
    builder, head = find_family(architecture)
    module, function = builder.split(":")
    make = getattr(importlib.import_module(f"penstock.models.{module}"), function)
    model: Model = make(build, config, head)
    build.weights.finish(model.unneeded)
    return model


def find_family(architecture: str) -> tuple[str, Task | None]:
    """(builder, head) of a class name or a model_type."""
    if architecture in FAMILIES:
        return FAMILIES[architecture][1], None
    for prefix, builder in FAMILIES.values():
        suffix = architecture.removeprefix(prefix)
        if architecture.startswith(prefix) and suffix in HEADS:
            return builder, HEADS[suffix]
    raise ModelLoadError(
        f"architecture {architecture!r} is not supported; supported: "
        + ", ".join(f"{prefix}*" for prefix, _ in sorted(FAMILIES.values()))
        + f", each with {', '.join(HEADS)}",
        param="model",
    )
