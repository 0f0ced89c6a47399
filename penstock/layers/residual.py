"""Residual connections: a part of a layer, the residual that it is added to, and the norm that follows.

On a CPU the matrix kernel adds the residual while its tile is in registers. On CUDA the norm kernel adds it;
a separate addition would cost another pass over memory.
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
from penstock.layers.moe import SparseMLP
from penstock.layers.norm import Norm


class Part(Protocol):
    """A linear layer or a feed-forward block."""

    def __call__(
        self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...


class ScaledPart:
    """A part whose output is scaled before the residual is added."""

    def __init__(self, part: Part, scale: float) -> None:
        self.part = part
        self.scale = scale

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        scaled = self.part(x, out=out).mul_(self.scale)
        return scaled if residual is None else scaled.add_(residual)


def post_norm_residual(
    part: Part, norm: Norm, x: Activations, residual: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Activations]:
    """Compute norm(part(x) + residual) for post-norm models: the next residual, and the next part's input.

    `part` may write to `out`, which must not be the residual.
    """
    if use_kernel(residual):
        return norm.post_norm(part(x, out=out), residual)
    out = norm(part(x, residual))
    return out, out


def pre_norm_residual(part: Part, norm: Norm, x: Activations, residual: Tensor) -> tuple[Tensor, Activations]:
    """Return (part(x) + residual, the normalised sum) for pre-norm models: the next residual and input."""
    if use_kernel(residual):
        return norm.pre_norm(part(x), residual)
    hidden = part(x, residual)
    return hidden, norm(hidden)


class PostNormLayer(Protocol):
    @property
    def qkv(self) -> LinearLayer: ...
    @property
    def mlp(self) -> MLP | GatedMLP | SparseMLP: ...
    @property
    def attention_norm(self) -> Norm: ...
    @property
    def output_norm(self) -> Norm: ...


def connect_post_norms(layers: Sequence[PostNormLayer]) -> None:
    """Set each norm to quantise for the layer that reads it. A pooler or head reads the last norm."""
    for layer in layers:
        layer.attention_norm.quantize_for(layer.mlp.input_layer)
    for layer, following in pairwise(layers):
        layer.output_norm.quantize_for(following.qkv)
