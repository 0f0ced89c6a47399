"""EuroBERT: a bidirectional Llama with the heads of an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.checkpoint.labels import label_count
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.layers.head import Stack, TaskHead
from penstock.models.decoder import llama_shape
from penstock.models.decoder_layers import Decoder, DecoderShape
from penstock.models.heads import add_language_head
from penstock.models.options import option
from penstock.types import Task

# classifier_pooling of sequence classifiers → pooling method. "late" pools the logits.
_POOLING = {"bos": "cls", "mean": "mean", "late": "mean"}


def eurobert(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    model = Decoder(build, eurobert_shape(config))
    labels = label_count(config)
    if head is Task.SPARSE:
        add_language_head(model, build, config, Task.SPARSE, bias=bool(config.get("mlp_bias")))
    elif head is Task.TOKEN_CLASSIFY:
        model.heads[head] = TaskHead("all", build.linear("classifier", model.hidden_size, labels), labels)
    elif head is Task.CLASSIFY:
        model.heads[head] = _sequence_head(model, build, config, labels)
    return model


def eurobert_shape(config: Mapping[str, Any]) -> DecoderShape:
    return replace(llama_shape(config), eps=config.get("rms_norm_eps", 1e-5))


def _sequence_head(model: Decoder, build: LayerBuilder, config: Mapping[str, Any], labels: int) -> TaskHead:
    """Dense, GELU, classifier: on the pooled state or, with "late", on every state, then averaging logits."""
    pooling = option(config, "classifier_pooling", "clf_pooling", default="late")  # the newer name first
    if pooling not in _POOLING:
        raise ModelLoadError(
            f"config.json has classifier_pooling = {pooling!r}, which is not supported; "
            f"supported: {', '.join(_POOLING)}"
        )
    dense = build.linear("dense", model.hidden_size, model.hidden_size, "gelu")
    classifier = build.linear("classifier", model.hidden_size, labels)
    return TaskHead(_POOLING[pooling], Stack(dense, classifier), labels, pools_outputs=pooling == "late")
