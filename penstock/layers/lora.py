"""Low-rank adapters on a layer or a table. Each row of a batch has its own adapter or none.

All adapters are applied in two narrow products for the whole batch: down to the ranks of all adapters,
masked so that a token keeps only its own adapter's part, and up again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.activation import activation
from penstock.layers.linear import LinearLayer
from penstock.weights.adapters import AdapterSet


class LoraLinear:
    """`base` has no activation of its own, because the adapter's change is added before it."""

    def __init__(self, base: LinearLayer, act: str, down: Tensor, up: Tensor) -> None:
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base = base
        self.act = activation(act)
        self.down = down  # [adapters · rank, in]
        self.up = up  # [out, adapters · rank]

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Without an adapter."""
        out = self.act(self.base(x))
        return out if residual is None else out + residual

    def with_adapters(self, x: Tensor, mask: Tensor, residual: Tensor | None = None) -> Tensor:
        """`mask` comes from `adapter_mask`."""
        change = F.linear(F.linear(x, self.down) * mask, self.up)
        out = self.act(self.base(x, residual=change))
        return out if residual is None else out + residual


class LoraTable:
    """The change that adapters make to rows of an embedding table."""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        self.down = down  # [rows, adapters · rank]
        self.up = up  # [hidden, adapters · rank]

    def change(self, ids: Tensor, mask: Tensor) -> Tensor:
        return F.linear(F.embedding(ids, self.down) * mask, self.up)


def adapter_mask(adapters: Tensor, lengths: Tensor, num_tokens: int, known: AdapterSet) -> Tensor:
    """[tokens, adapters · rank]: the scale at the ranks of each token's adapter, 0 elsewhere.

    `adapters` is int32 [rows], -1 for none.
    """
    of_token = adapters.repeat_interleave(lengths, output_size=num_tokens)
    numbers = torch.arange(known.count, dtype=of_token.dtype, device=of_token.device)
    return (of_token[:, None] == numbers).repeat_interleave(known.rank, dim=1).float() * known.scale


class AdapterChoice:
    """The adapters of the tokens of the step that runs now, for all layers of a model."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None  # [tokens, adapters · rank]
        self._tiled: dict[int, Tensor] = {}

    @property
    def is_none(self) -> bool:
        return self._mask is None

    def choose(self, mask: Tensor | None) -> None:
        """`mask` comes from `adapter_mask`."""
        self._mask, self._tiled = mask, {}

    def mask(self, parts: int) -> Tensor:
        """The mask for a layer that is fused from `parts` layers, [tokens, parts · adapters · rank]."""
        assert self._mask is not None
        if parts not in self._tiled:
            self._tiled[parts] = self._mask if parts == 1 else self._mask.repeat(1, parts)
        return self._tiled[parts]


class AdaptedLinear:
    """One layer, or several fused, with the chosen adapters added: base(x) + up(mask · down(x))."""

    def __init__(
        self, base: LinearLayer, down: Sequence[Tensor], up: Sequence[Tensor], choice: AdapterChoice
    ):
        """`down` [adapters · rank, in] and `up` [out, adapters · rank] are those of the fused layers."""
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base = base
        self.parts = len(down)
        self.down = torch.cat(list(down))
        self.up = torch.block_diag(*up)
        self.choice = choice

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if self.choice.is_none:
            return self.base(x, residual, out)
        if not isinstance(x, Tensor):
            x = dequantize(x, self.down.dtype)
        change = F.linear(F.linear(x, self.down) * self.choice.mask(self.parts), self.up)
        return self.base(x, change if residual is None else change.add_(residual), out)
