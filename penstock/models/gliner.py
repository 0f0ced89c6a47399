"""GLiNER: an encoder that reads labels and a text together, and scores spans of words against labels.

Everything after the encoder runs in fp32: it is small, and scores are compared with a threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.gliner import TOKEN_LEVEL
from penstock.layers.build import LayerBuilder
from penstock.layers.head import TaskHead
from penstock.layers.labels import LabelTensors
from penstock.layers.lstm import BiLSTM
from penstock.models.deberta import Deberta, deberta
from penstock.models.modernbert import ModernBert, modernbert
from penstock.types import Task
from penstock.weights.stream import WeightSource

_UNUSED = ("position_ids", "logit_scale")


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer of the head, in fp32."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def read(cls, weights: WeightSource, name: str, inputs: int, outputs: int) -> Dense:
        return cls(
            weights.take(f"{name}.weight", outputs, inputs).float(),
            weights.take(f"{name}.bias", outputs).float(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Projection:
    """Two linear layers with a ReLU between them."""

    first: Dense
    second: Dense

    @classmethod
    def read(cls, weights: WeightSource, name: str, inputs: int, outputs: int, inner: int) -> _Projection:
        return cls(
            Dense.read(weights, f"{name}.0", inputs, inner),
            Dense.read(weights, f"{name}.3", inner, outputs),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu_())


class _WordStates:
    """The states of words and labels: encoder states, projected to the head's width. Words also run through
    an LSTM."""

    def __init__(self, build: LayerBuilder, encoder_size: int, settings: Mapping[str, Any]) -> None:
        size, weights = settings["hidden_size"], build.weights
        self.project: Dense | None = None
        if size != encoder_size:
            self.project = Dense.read(weights, "token_rep_layer.projection", encoder_size, size)
        layers = settings["num_rnn_layers"]
        self.lstm = BiLSTM(weights, "rnn.lstm.", size, size // 2, layers) if layers else None

    def __call__(self, hidden: Tensor, labels: LabelTensors) -> tuple[Tensor, Tensor]:
        """Words [rows, max words, width] and labels [rows, labels, width]."""
        words, names = labels.words(hidden).float(), labels.labels(hidden).float()
        if self.project is not None:
            words, names = self.project(words), self.project(names)
        if self.lstm is not None:
            words = self.lstm(words, labels.num_words)
        return words, names


class SpanHead:
    """Scores every span of up to `max_width` words against every label.

    The last projection of spans is multiplied into the labels instead, because there are far fewer labels
    than spans.
    """

    def __init__(self, build: LayerBuilder, encoder_size: int, settings: Mapping[str, Any]) -> None:
        size, weights, spans = settings["hidden_size"], build.weights, "span_rep_layer.span_rep_layer."
        self.states = _WordStates(build, encoder_size, settings)
        self.max_width: int = settings["max_width"]
        inner = 2 * size if settings["span_mode"] == "marker" else 4 * size
        self.start = _Projection.read(weights, f"{spans}project_start", size, size, inner)
        self.end = _Projection.read(weights, f"{spans}project_end", size, size, inner)
        self.label = _Projection.read(weights, "prompt_rep_layer", size, size, 4 * size)
        self.join: Dense  # joins both ends of a span
        self.out: Dense | None = None
        if settings["span_mode"] == "marker":
            self.join = Dense.read(weights, f"{spans}out_project", 2 * size, size)
        else:
            joined = _Projection.read(weights, f"{spans}out_project", 2 * size, size, 4 * size)
            self.join, self.out = joined.first, joined.second

    def __call__(self, hidden: Tensor, labels: LabelTensors) -> Tensor:
        """Probabilities [tokens, width · labels] of the spans that begin at each word, by width."""
        words, names = self.states(hidden, labels)
        start_weight, end_weight = self.join.weight.chunk(2, dim=1)
        starts = F.linear(self.start(words).relu_(), start_weight, self.join.bias)
        ends = F.linear(self.end(words).relu_(), end_weight)
        queries = self.label(names)
        added: Tensor | None = None
        if self.out is not None:  # fold the second projection of spans into the labels
            added = (queries @ self.out.bias)[:, None, :]
            queries = queries @ self.out.weight
        queries = queries.transpose(1, 2)
        rows, steps, _ = words.shape
        scores = words.new_zeros((rows, steps, self.max_width, labels.num_labels))
        index = torch.arange(steps, device=words.device)
        for width in range(min(self.max_width, steps)):
            joined = starts[:, : steps - width] + ends[:, width:]
            logits = (joined if self.out is None else joined.relu_()) @ queries
            logits = logits if added is None else logits + added
            is_inside = (index[width:] < labels.num_words[:, None])[:, :, None]
            scores[:, : steps - width, width] = torch.where(is_inside, logits.sigmoid_(), 0.0)
        return labels.by_token(scores)


class TokenHead:
    """Scores every word as the start, the end and the inside of an entity, for every label."""

    def __init__(self, build: LayerBuilder, encoder_size: int, settings: Mapping[str, Any]) -> None:
        size, weights = settings["hidden_size"], build.weights
        self.states = _WordStates(build, encoder_size, settings)
        self.word = Dense.read(weights, "scorer.proj_token", size, 2 * size)
        self.label = Dense.read(weights, "scorer.proj_label", size, 2 * size)
        self.join = Dense.read(weights, "scorer.out_mlp.0", 3 * size, 4 * size)
        self.out = Dense.read(weights, "scorer.out_mlp.3", 4 * size, 3)

    def __call__(self, hidden: Tensor, labels: LabelTensors) -> Tensor:
        """Probabilities [tokens, labels · 3]."""
        words, names = self.states(hidden, labels)
        word_weight, label_weight, both_weight = self.join.weight.chunk(3, dim=1)
        word_first, word_second = self.word(words).chunk(2, dim=-1)
        label_first, label_second = self.label(names).chunk(2, dim=-1)
        from_words = F.linear(word_first, word_weight, self.join.bias)
        from_labels = F.linear(label_first, label_weight)
        scores = [
            self.out(
                (
                    from_words
                    + from_labels[:, label, None]
                    + F.linear(word_second * label_second[:, label, None], both_weight)
                ).relu_()
            )
            for label in range(labels.num_labels)
        ]
        return labels.by_token(torch.stack(scores, dim=2).sigmoid_())


Encoder = Deberta | ModernBert


def label_encoder(build: LayerBuilder, config: Mapping[str, Any], kind: str) -> Encoder:
    """The encoder of a model that reads labels from the prompt."""
    model = modernbert(build, config, None) if kind == "modernbert" else deberta(build, config, None)
    model.ignored_tensors = _UNUSED
    return model


def gliner(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Encoder:
    settings: Mapping[str, Any] = config["gliner"]
    model = label_encoder(build, config, settings["encoder"])
    is_token_level = settings["span_mode"] == TOKEN_LEVEL
    scorer = (TokenHead if is_token_level else SpanHead)(build, config["hidden_size"], settings)
    width = 3 if is_token_level else settings["max_width"]
    model.heads[Task.ENTITIES] = TaskHead("labels", lambda hidden: hidden, width, score_labels=scorer)
    return model
