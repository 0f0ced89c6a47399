"""Builds models from the records in `checkpoint/families.py`. Imports a model file only when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.checkpoint.families import find_architecture
from penstock.checkpoint.quantization import block_format
from penstock.errors import ModelLoadError
from penstock.types import Task

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.layers.batch import Batch
    from penstock.layers.build import LayerBuilder
    from penstock.layers.head import TaskHead


class Model(Protocol):
    """A backbone with the heads of its checkpoint. `ignored_tensors` marks tensors that may stay unread."""

    hidden_size: int
    is_causal: bool  # no token sees one that comes after it
    prunes_last_layer: bool  # it finishes the needed tokens of a batch alone, where not all are
    heads: dict[Task, TaskHead]
    ignored_tensors: tuple[str, ...]

    def __call__(self, batch: Batch) -> Tensor:
        """The last hidden states, [tokens, hidden]: of the needed tokens, where it narrows."""
        ...


class CausalModel(Model, Protocol):
    """A model whose rows can go on over steps."""

    kv_shape: tuple[int, int, int]  # layers, key/value heads, head size


def build_model(
    architecture: str,
    config: Mapping[str, Any],
    build: LayerBuilder,
    *,
    splade: bool = False,
    score_tokens: Sequence[int] = (),
    generates: bool = False,
) -> Model:
    """Builder functions take (layer builder, config.json, head task or None). They find `is_causal` in the
    configuration: the family's record settles it.

    `splade` asks for the masked-language head, which most checkpoints carry without a use for it;
    `score_tokens`, for these rows of a decoder's language-model head; `generates`, for all of it.
    """
    found = find_architecture(architecture, config)
    config = {**config, "is_causal": found.family.is_causal(config)}
    head = found.head
    if stored := block_format(config):
        build.stored = stored.covers
    if splade:
        head = Task.SPARSE
    elif score_tokens:
        head = None
    for task in (head, Task.GENERATE if generates else None):
        if task is not None and task not in found.family.heads:
            raise ModelLoadError(f"task {task.value!r} is not supported on {architecture}", param="model")
    module, function = found.family.builder.split(":")
    model: Model = getattr(importlib.import_module(f"penstock.models.{module}"), function)(
        build, config, head
    )
    heads = importlib.import_module("penstock.models.heads")
    if found.is_colbert:
        heads.add_token_projection(model, build, config)
    if score_tokens:
        heads.add_token_head(model, build, config, score_tokens)
    if generates:
        heads.add_language_head(model, build, config)
    build.weights.finish(model.ignored_tensors)
    return model
