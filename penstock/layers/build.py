"""Makes layers from a weight source, so that a model file is only wiring."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from penstock.kernels.blockwise import BlockQuantized, dequantize_blocks
from penstock.layers.fp8 import BlockLinear
from penstock.layers.linear import LinearLayer, make_linear
from penstock.layers.norm import LayerNorm, RMSNorm
from penstock.layers.stored import join_blocks, multiplies_blocks, plain_weight, read_blocks
from penstock.weights.stream import WeightSource

_NUMBER = re.compile(r"(?:^|\.)layers?\.(\d+)\.")  # of the layer that a name lies in


class LayerBuilder:
    def __init__(
        self, weights: WeightSource, quantization: str | None = None, unquantized: Collection[int] = ()
    ) -> None:
        """`unquantized` are numbers of layers whose products stay in the model's precision."""
        self.weights = weights
        self.quantization = quantization
        self.unquantized = unquantized
        self.stored: Callable[[str], bool] | None = (
            None  # whether config.json has a module's weight in blocks
        )

    def linear(
        self,
        names: str | Sequence[str],
        inputs: int,
        outputs: int | Sequence[int],
        act: str = "identity",
        *,
        bias: bool = True,
    ) -> LinearLayer:
        """One layer, or several fused along their outputs; `outputs` is the size of all or of each."""
        names = [names] if isinstance(names, str) else list(names)
        added: Tensor | None = None
        if bias:
            added = self.weights.fuse([f"{name}.bias" for name in names], outputs)
        stored = [self.in_blocks(name) for name in names]
        if not any(stored):
            weight = self.weights.fuse([f"{name}.weight" for name in names], outputs, inputs)
            return make_linear(weight, added, act, self.precision(names[0]))
        sizes = [outputs] * len(names) if isinstance(outputs, int) else outputs
        parts = [
            (read_blocks if blocks else plain_weight)(self.weights, f"{name}.weight", size, inputs)
            for name, size, blocks in zip(names, sizes, stored, strict=True)
        ]
        blocks = [part for part in parts if isinstance(part, BlockQuantized)]
        if len(blocks) == len(parts) and multiplies_blocks(self.weights.device):
            return BlockLinear(join_blocks(blocks), added, act, self.weights.dtype)
        said = [dequantize_blocks(part) if isinstance(part, BlockQuantized) else part for part in parts]
        weight = torch.cat([part.to(dtype=self.weights.dtype, device=self.weights.device) for part in said])
        return make_linear(weight, added, act, self.precision(names[0]))

    def in_blocks(self, name: str) -> bool:
        """Whether this module's weight is stored in blocks of fp8. Heads never are."""
        if self.stored is None or not self.stored(name) or _NUMBER.search(name) is None:
            return False
        return self.weights.has(f"{name}.weight_scale_inv")

    def tied(self, weight: Tensor, bias: str | None) -> LinearLayer:
        """A layer on a weight that another layer already has, with a bias of its own or none."""
        added = None if bias is None else self.weights.take(bias, len(weight))
        return make_linear(weight, added, "identity", self.precision(""))

    def precision(self, name: str) -> str | None:
        """fp8 is for the layers that a model repeats: heads cost little and are read as they are."""
        found = _NUMBER.search(name)
        if found is None:
            return None if self.quantization == "fp8" else self.quantization
        return None if int(found[1]) in self.unquantized else self.quantization

    def norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> LayerNorm:
        added = self.weights.take(f"{name}.bias", size) if bias else None
        return LayerNorm(self.weights.take(f"{name}.weight", size), added, eps)

    def rms_norm(self, name: str, size: int, eps: float, *, plus_one: bool = False) -> RMSNorm:
        """`plus_one`: the checkpoint stores the weight less one, added back before it is rounded."""
        if not plus_one:
            return RMSNorm(self.weights.take(f"{name}.weight", size), eps)
        weight = self.weights.read(f"{name}.weight", (size,)).float() + 1
        return RMSNorm(weight.to(dtype=self.weights.dtype, device=self.weights.device), eps)

    def table(self, name: str, rows: int, size: int) -> Tensor:
        return self.weights.take(f"{name}.weight", rows, size)
