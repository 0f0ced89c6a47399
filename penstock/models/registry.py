"""Builds models from the records in `checkpoint/families.py`. Imports a model's module only when needed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.checkpoint.families import Architecture, find_architecture
from penstock.checkpoint.files import first_names, shown
from penstock.checkpoint.keys import ReadKeys
from penstock.checkpoint.quantization import stored_format
from penstock.checkpoint.sizes import read_sizes
from penstock.errors import ModelLoadError
from penstock.types import Task

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.layers.batch import Batch
    from penstock.layers.build import LayerBuilder
    from penstock.layers.head import TaskHead
    from penstock.layers.images import VisionTower

log = logging.getLogger("penstock.load")


class Model(Protocol):
    """A backbone with the heads of its checkpoint."""

    hidden_size: int
    is_causal: bool  # no token attends to a later one
    prunes_last_layer: bool  # after the last attention, compute only the tokens that a pooler reads
    heads: dict[Task, TaskHead]
    ignored_tensors: tuple[str, ...]  # substrings of the names of tensors that may stay unread

    def __call__(self, batch: Batch) -> Tensor:
        """The last hidden states [tokens, hidden]; if the model prunes, only of the tokens that are read."""
        ...


class VisionModel(Model, Protocol):
    """A model with a vision tower. Its batches may carry `images`."""

    vision: VisionTower


class CausalModel(Model, Protocol):
    """A model that keeps keys and values in the KV cache, so that a row can span several steps."""

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
    """Build a model with its heads.

    Builder functions take (layer builder, config.json, head task or None). The family's record sets
    `is_causal` in the configuration, and `head_dim` if the family has a default for it.

    `splade` adds the masked-language head, which most checkpoints store but do not use. `score_tokens` adds
    these rows of a decoder's language-model head, and `generates` adds the whole head.
    """
    found = find_architecture(architecture, config)
    sizes = read_sizes(Path("config.json"), found.family, config)
    config = ReadKeys({**config, "is_causal": found.family.is_causal(config)})
    if found.family.default_head_dim is not None:
        config["head_dim"] = sizes.head_dim
    head = found.head
    unread: tuple[str, ...] = ()
    if (stored := stored_format(config)) is not None:
        build.stored = importlib.import_module("penstock.weights.quantized").QuantizedReader(
            build.weights, stored
        )
        unread = stored.unread_tensors
        for note in stored.notes:
            log.info("%s", note)
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
    if build.adapters is not None:
        build.adapters.ignored = model.ignored_tensors
        vars(model)["adapter_sites"] = build.adapters
    unused = build.weights.check_all_read((*model.ignored_tensors, *unread))
    harmless = (*_BUFFERS, *unread, *(("lm_head.",) if config.get("tie_word_embeddings") else ()))
    _report(found, [name for name in unused if not any(mark in name for mark in harmless)], config)
    return model


# Substrings of the names of tensors that are not learned, or needed only for the comparison of vectors.
_BUFFERS = ("position_ids", "inv_freq", ".attn.bias", ".attn.masked_bias", "logit_scale", "logit_bias")


def _report(architecture: Architecture, unused: Sequence[str], config: ReadKeys) -> None:
    """Warn about tensors and keys that the model does not use."""
    if unused:
        words = "tensor of the checkpoint is" if len(unused) == 1 else "tensors of the checkpoint are"
        log.warning("%d %s not used by %s: %s", len(unused), words, architecture.name, first_names(unused))
    if unknown := config.unknown(architecture.family):
        log.warning(
            "config.json has keys that Penstock does not know: %s. If one of them changes what %s computes, "
            "its answers are wrong; compare them with penstock verify",
            ", ".join(f"{key} = {shown(value)}" for key, value in unknown.items()),
            architecture.name,
        )
