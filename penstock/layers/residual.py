"""A part of a model, what it adds to, and the norm behind: joined where that is cheapest.

A CPU adds the residual while the matrix kernel has its tile in registers. On CUDA the addition costs a
pass over memory wherever it is done, so it is done by the norm, which makes that pass anyway.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.language import fused
from penstock.layers.norm import Norm


class Part(Protocol):
    """A linear layer or a feed-forward block."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


def add_norm(part: Part, norm: Norm, x: Tensor, residual: Tensor) -> Tensor:
    """norm(part(x) + residual): what a post-norm model does."""
    if fused(x):
        return norm.join(part(x), residual, keep=False)[1]
    return norm(part(x, residual))


def join_norm(part: Part, norm: Norm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(part(x) + residual, the same normalised): the sum goes on beside the next part of a pre-norm model."""
    if fused(x):
        return norm.join(part(x), residual)
    hidden = part(x, residual)
    return hidden, norm(hidden)
