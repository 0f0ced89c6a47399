"""Builds layers from a weight source, so that a model file is only wiring."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from penstock.kernels.blockwise import BlockQuantized, dequantize_blocks
from penstock.layers.fp8 import BlockLinear
from penstock.layers.fp8_blocks import join_blocks, read_blocks, read_plain_weight, supports_fp8_blocks
from penstock.layers.linear import LinearLayer, make_linear
from penstock.layers.norm import LayerNorm, RMSNorm
from penstock.weights.stream import WeightSource

_LAYER_NUMBER = re.compile(r"(?:^|\.)(?:block|layers?)\.(\d+)\.")  # in the name of a tensor


class LayerBuilder:
    def __init__(
        self, weights: WeightSource, quantization: str | None = None, unquantized: Collection[int] = ()
    ) -> None:
        """`unquantized` lists the layers, by number, that quantisation skips."""
        self.weights = weights
        self.quantization = quantization
        self.unquantized = unquantized
        # Whether config.json says that a module's weight is stored in fp8 blocks; None: none is.
        self.has_block_format: Callable[[str], bool] | None = None

    def linear(
        self,
        names: str | Sequence[str],
        inputs: int,
        outputs: int | Sequence[int],
        act: str = "identity",
        *,
        bias: bool = True,
    ) -> LinearLayer:
        """One layer, or several fused along their outputs. `outputs` is one size for all, or one for each."""
        names = [names] if isinstance(names, str) else list(names)
        added: Tensor | None = None
        if bias:
            added = self.weights.fuse([f"{name}.bias" for name in names], outputs)
        stored = [self.is_stored_in_blocks(name) for name in names]
        if not any(stored):
            weight = self.weights.fuse([f"{name}.weight" for name in names], outputs, inputs)
            return make_linear(weight, added, act, self.precision(names[0]))
        sizes = [outputs] * len(names) if isinstance(outputs, int) else outputs
        parts = [
            (read_blocks if blocks else read_plain_weight)(self.weights, f"{name}.weight", size, inputs)
            for name, size, blocks in zip(names, sizes, stored, strict=True)
        ]
        blocks = [part for part in parts if isinstance(part, BlockQuantized)]
        if len(blocks) == len(parts) and supports_fp8_blocks(self.weights.device):
            return BlockLinear(join_blocks(blocks), added, act, self.weights.dtype)
        plain = [dequantize_blocks(part) if isinstance(part, BlockQuantized) else part for part in parts]
        weight = torch.cat([part.to(dtype=self.weights.dtype, device=self.weights.device) for part in plain])
        return make_linear(weight, added, act, self.precision(names[0]))

    def is_stored_in_blocks(self, name: str) -> bool:
        """Whether this module's weight is stored in fp8 blocks. Heads never are."""
        if self.has_block_format is None or not self.has_block_format(name):
            return False
        if _LAYER_NUMBER.search(name) is None:
            return False
        return self.weights.has(f"{name}.weight_scale_inv")

    def tied(self, weight: Tensor, bias: str | None) -> LinearLayer:
        """A layer that shares another layer's weight, with a bias of its own or none."""
        added = None if bias is None else self.weights.take(bias, len(weight))
        return make_linear(weight, added, "identity", self.precision(""))

    def precision(self, name: str) -> str | None:
        """The quantisation of a module. fp8 covers the repeated layers only: heads cost little."""
        found = _LAYER_NUMBER.search(name)
        if found is None:
            return None if self.quantization == "fp8" else self.quantization
        return None if int(found[1]) in self.unquantized else self.quantization

    def norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> LayerNorm:
        added = self.weights.take(f"{name}.bias", size) if bias else None
        return LayerNorm(self.weights.take(f"{name}.weight", size), added, eps)

    def rms_norm(self, name: str, size: int, eps: float, *, plus_one: bool = False) -> RMSNorm:
        """`plus_one`: the checkpoint stores weight − 1; the 1 is added before rounding."""
        if not plus_one:
            return RMSNorm(self.weights.take(f"{name}.weight", size), eps)
        weight = self.weights.read(f"{name}.weight", (size,)).float() + 1
        return RMSNorm(weight.to(dtype=self.weights.dtype, device=self.weights.device), eps)

    def table(self, name: str, rows: int, size: int) -> Tensor:
        return self.weights.take(f"{name}.weight", rows, size)
