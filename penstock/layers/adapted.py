"""Low-rank adapters beside a layer or a table, of which each token of a batch has its own or none.

All adapters are applied in two narrow products for the whole run: down to every adapter's rank, masked
so that a token keeps only its own part, and up again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.quantize import Activations
from penstock.layers.activation import activation
from penstock.layers.linear import LinearLayer


class AdaptedLinear:
    """`base` has no activation of its own: the change goes before it."""

    def __init__(self, base: LinearLayer, act: str, down: Tensor, up: Tensor) -> None:
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base = base
        self.act = activation(act)
        self.down = down  # [adapters · rank, in]
        self.up = up  # [out, adapters · rank]

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        out = self.act(self.base(x))
        return out if residual is None else out + residual

    def chosen(self, x: Tensor, select: Tensor, residual: Tensor | None = None) -> Tensor:
        """`select` [tokens, adapters · rank] holds the scale of each token's adapter, 0 for others."""
        change = F.linear(F.linear(x, self.down) * select, self.up)
        out = self.act(self.base(x, residual=change))
        return out if residual is None else out + residual


class AdaptedTable:
    """The change that adapters make to rows of an embedding table."""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        self.down = down  # [rows, adapters · rank]
        self.up = up  # [hidden, adapters · rank]

    def change(self, ids: Tensor, select: Tensor) -> Tensor:
        return F.linear(F.embedding(ids, self.down) * select, self.up)


def selection(adapters: Tensor, lengths: Tensor, tokens: int, count: int, rank: int, scale: float) -> Tensor:
    """adapters int32 [rows], -1 for none → [tokens, count · rank]."""
    of_token = adapters.repeat_interleave(lengths, output_size=tokens)
    numbers = torch.arange(count, dtype=of_token.dtype, device=of_token.device)
    return (of_token[:, None] == numbers).repeat_interleave(rank, dim=1).float() * scale
