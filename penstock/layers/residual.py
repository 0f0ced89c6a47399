"""A part of a model, what it adds to, and the norm behind: joined where that is cheapest.

A CPU adds the residual while the matrix kernel has its tile in registers. On CUDA the addition costs a
pass over memory wherever it is done, so it is done by the norm, which makes that pass anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from penstock.kernels.language import use_kernel
from penstock.kernels.quantize import Activations
from penstock.layers.linear import LinearLayer
from penstock.layers.mlp import MLP, GatedMLP
from penstock.layers.norm import Norm


class Part(Protocol):
    """A linear layer or a feed-forward block."""

    def __call__(
        self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...


def add_norm(
    part: Part, norm: Norm, x: Activations, residual: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Activations]:
    """norm(part(x) + residual), what a post-norm model does: as it goes on, and for the next part. `out` is
    a place for it, not that of the residual."""
    if use_kernel(residual):
        return norm.after(part(x, out=out), residual)
    out = norm(part(x, residual))
    return out, out


def join_norm(part: Part, norm: Norm, x: Activations, residual: Tensor) -> tuple[Tensor, Activations]:
    """(part(x) + residual, the same normalised): the sum goes on beside the next part of a pre-norm model."""
    if use_kernel(residual):
        return norm.join(part(x), residual)
    hidden = part(x, residual)
    return hidden, norm(hidden)


class PostNormLayer(Protocol):
    @property
    def qkv(self) -> LinearLayer: ...
    @property
    def mlp(self) -> MLP | GatedMLP: ...
    @property
    def attention_norm(self) -> Norm: ...
    @property
    def output_norm(self) -> Norm: ...


def feed_post_norms(layers: Sequence[PostNormLayer]) -> None:
    """Tell each norm which product reads it; the last one's reader is no product."""
    for layer in layers:
        layer.attention_norm.feed(layer.mlp.first)
    for layer, behind in pairwise(layers):
        layer.output_norm.feed(behind.qkv)
