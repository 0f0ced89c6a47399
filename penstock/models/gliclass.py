"""GLiClass: an encoder that reads labels and a text together, and scores the text against each label.

Everything after the encoder runs in fp32, because it is small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.layers.activation import activation
from penstock.layers.build import LayerBuilder
from penstock.layers.head import TaskHead
from penstock.layers.labels import LabelTensors
from penstock.models.gliner import Dense, Encoder, label_encoder
from penstock.types import Task

_MLP_SIZE = 256
_EPSILON = 1e-8  # added to a vector's norm before the division


class _Projector:
    """Two linear layers with an activation between them."""

    def __init__(self, build: LayerBuilder, name: str, size: int, act: str) -> None:
        self.first = Dense.read(build.weights, f"{name}.linear_1", size, size)
        self.second = Dense.read(build.weights, f"{name}.linear_2", size, size)
        self.act = activation(act)

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


class LabelHead:
    """Scores each row's text against its labels."""

    def __init__(self, build: LayerBuilder, size: int, settings: Mapping[str, Any]) -> None:
        act = settings["projector_hidden_act"]
        self.text = _Projector(build, "model.text_projector", size, act)
        self.label = _Projector(build, "model.classes_projector", size, act)
        self.pooling: str = settings["pooling_strategy"]
        self.normalizes: bool = settings["normalize_features"]
        self.scale: Tensor | None = None
        if self.normalizes:
            self.scale = build.weights.take("model.logit_scale").float()
        self.score = _SCORERS[settings["scorer_type"]](build, size)

    def __call__(self, hidden: Tensor, labels: LabelTensors) -> Tensor:
        """Logits [rows, labels]."""
        text, names = self.text(self._pooled(hidden, labels)), self.label(labels.labels(hidden).float())
        if self.scale is None:
            return self.score(text, names)
        text, names = (x / (x.norm(dim=-1, keepdim=True) + _EPSILON) for x in (text, names))
        return self.score(text, names) * self.scale

    def _pooled(self, hidden: Tensor, labels: LabelTensors) -> Tensor:
        """The pooled marked tokens, [rows, width]. `first` and `last` pooling mark one token per row."""
        words = labels.words(hidden).float()
        if self.pooling in ("first", "last"):
            return words[:, 0]
        counts = labels.num_words[:, None]
        if self.pooling == "avg":
            return words.sum(dim=1) / counts
        is_word = torch.arange(labels.max_words, device=words.device) < counts
        return words.masked_fill(~is_word[:, :, None], float("-inf")).amax(dim=1)


Scorer = Callable[
    [Tensor, Tensor], Tensor
]  # text [rows, width], labels [rows, labels, width] → [rows, labels]


def _dot(build: LayerBuilder, size: int) -> Scorer:
    return lambda text, labels: (labels @ text[:, :, None])[:, :, 0]


def _weighted_dot(build: LayerBuilder, size: int) -> Scorer:
    weights = build.weights
    of_text = Dense.read(weights, "model.scorer.proj_text", size, 2 * size)
    of_label = Dense.read(weights, "model.scorer.proj_label", size, 2 * size)
    join = Dense.read(weights, "model.scorer.out_mlp.0", 3 * size, 4 * size)
    out = Dense.read(weights, "model.scorer.out_mlp.3", 4 * size, 1)

    def score(text: Tensor, labels: Tensor) -> Tensor:
        text_first, text_second = of_text(text)[:, None].chunk(2, dim=-1)
        label_first, label_second = of_label(labels).chunk(2, dim=-1)
        joined = torch.cat(
            [text_first.expand_as(label_first), label_first, text_second * label_second], dim=-1
        )
        return out(join(joined).relu_())[:, :, 0]

    return score


def _mlp(build: LayerBuilder, size: int) -> Scorer:
    sizes = (2 * size, _MLP_SIZE, _MLP_SIZE // 2, 1)
    layers = [
        Dense.read(build.weights, f"model.scorer.mlp.{2 * index}", sizes[index], sizes[index + 1])
        for index in range(3)
    ]

    def score(text: Tensor, labels: Tensor) -> Tensor:
        x = torch.cat([text[:, None].expand_as(labels), labels], dim=-1)
        for layer in layers[:-1]:
            x = layer(x).relu_()
        return layers[-1](x)[:, :, 0]

    return score


_SCORERS: dict[str, Callable[[LayerBuilder, int], Scorer]] = {
    "simple": _dot,
    "weighted-dot": _weighted_dot,
    "mlp": _mlp,
}


def gliclass(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Encoder:
    settings: Mapping[str, Any] = config["gliclass"]
    model = label_encoder(build, config, settings["encoder"])
    scorer = LabelHead(build, config["hidden_size"], settings)
    model.heads[Task.ZERO_SHOT] = TaskHead("labels", lambda hidden: hidden, 1, score_labels=scorer)
    return model
