"""Makes layers from a weight source, so that a model file is only wiring."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.layers.linear import LinearLayer, make_linear
from penstock.layers.norm import LayerNorm
from penstock.weights.stream import WeightSource


class LayerBuilder:
    def __init__(self, weights: WeightSource, quantization: str | None = None) -> None:
        self.weights = weights
        self.quantization = quantization

    def linear(
        self,
        names: str | Sequence[str],
        inputs: int,
        outputs: int,
        act: str = "identity",
        input_act: str = "",
    ) -> LinearLayer:
        """One layer, or several of the same shape fused along their outputs."""
        names = [names] if isinstance(names, str) else list(names)
        weight = self.weights.fuse([f"{name}.weight" for name in names], outputs, inputs)
        bias: Tensor | None = None
        if self.weights.has(f"{names[0]}.bias"):
            bias = self.weights.fuse([f"{name}.bias" for name in names], outputs)
        return make_linear(weight, bias, act, self.quantization, input_act)

    def norm(self, name: str, size: int, eps: float) -> LayerNorm:
        return LayerNorm(
            self.weights.take(f"{name}.weight", size), self.weights.take(f"{name}.bias", size), eps
        )

    def table(self, name: str, rows: int, size: int) -> Tensor:
        return self.weights.take(f"{name}.weight", rows, size)
