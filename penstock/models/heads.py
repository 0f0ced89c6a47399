"""Classification heads as encoders carry them: one token stands for a sequence, or all are labelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from penstock.checkpoint.spec import label_count
from penstock.core import Task
from penstock.layers.build import LayerBuilder
from penstock.layers.head import Stack, TaskHead


class Backbone(Protocol):
    hidden_size: int
    prefix: str  # of the backbone's tensors
    heads: dict[Task, TaskHead]


def add_head(
    model: Backbone,
    build: LayerBuilder,
    config: Mapping[str, Any],
    head: Task,
    name: str,
    *before: Callable[[Tensor], Tensor],
    method: str = "cls",
) -> None:
    """A projection to the labels behind some layers; `method` pools sequences."""
    labels = label_count(config)
    project = Stack(*before, build.linear(name, model.hidden_size, labels))
    model.heads[head] = TaskHead(method if head is Task.CLASSIFY else "all", project, labels)


def add_pooler_head(
    model: Backbone, build: LayerBuilder, config: Mapping[str, Any], head: Task | None
) -> None:
    """BERT's classifier reads sequences through the backbone's pooler, tokens directly."""
    if head is Task.CLASSIFY:
        hidden = model.hidden_size
        dense = build.linear(model.prefix + "pooler.dense", hidden, hidden, "tanh")
        add_head(model, build, config, head, "classifier", dense)
    elif head is Task.TOKEN_CLASSIFY:
        add_head(model, build, config, head, "classifier")


def add_two_step_head(
    model: Backbone, build: LayerBuilder, config: Mapping[str, Any], head: Task | None
) -> None:
    """RoBERTa's classifier for sequences is a dense layer and a projection; for tokens, one layer."""
    if head is Task.CLASSIFY:
        dense = build.linear("classifier.dense", model.hidden_size, model.hidden_size, "tanh")
        add_head(model, build, config, head, "classifier.out_proj", dense)
    elif head is Task.TOKEN_CLASSIFY:
        add_head(model, build, config, head, "classifier")
