"""A model's head for one task: which tokens it reads, and how it projects them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TaskHead:
    """`method` is a pooling method, or "all" to project every token."""

    method: str
    project: Callable[[Tensor], Tensor]  # [n, hidden] → [n, outputs]
    outputs: int
    pools_outputs: bool = False  # every token is projected, and the outputs are pooled


class Stack:
    """Layers in sequence, as one projection."""

    def __init__(self, *layers: Callable[[Tensor], Tensor]) -> None:
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
