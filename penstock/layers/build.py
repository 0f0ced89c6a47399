"""Makes layers from a weight source, so that a model file is only wiring."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.layers.linear import LinearLayer, make_linear
from penstock.layers.norm import LayerNorm, RMSNorm
from penstock.weights.stream import WeightSource


class LayerBuilder:
    def __init__(self, weights: WeightSource, quantization: str | None = None) -> None:
        self.weights = weights
        self.quantization = quantization

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
        weight = self.weights.fuse([f"{name}.weight" for name in names], outputs, inputs)
        added: Tensor | None = None
        if bias:
            added = self.weights.fuse([f"{name}.bias" for name in names], outputs)
        return make_linear(weight, added, act, self.quantization)

    def tied(self, weight: Tensor, bias: str | None) -> LinearLayer:
        """A layer on a weight that another layer already has, with a bias of its own or none."""
        added = None if bias is None else self.weights.take(bias, len(weight))
        return make_linear(weight, added, "identity", self.quantization)

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
