"""A model's head for one task: the tokens that it reads, and their projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.layers.labels import LabelTensors


@dataclass(frozen=True, slots=True)
class TaskHead:
    """A head. `method` is a pooling method, or "all" to project every token.

    A model that reads labels from the prompt has a head with `score_labels` and `outputs` values per label.
    """

    method: str
    project: Callable[[Tensor], Tensor]  # [n, hidden] → [n, outputs]
    outputs: int
    pools_outputs: bool = False  # whether every token is projected before pooling
    # hidden states → [n, outputs · labels]
    score_labels: Callable[[Tensor, LabelTensors], Tensor] | None = None


class Stack:
    """Layers in sequence, as one projection."""

    def __init__(self, *layers: Callable[[Tensor], Tensor]) -> None:
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
