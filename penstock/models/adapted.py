"""A rotary encoder whose adapters are chosen row by row: jina-embeddings-v3."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.layers.adapted import AdaptedLinear, AdaptedTable, selection
from penstock.layers.attention import attend, attend_fused
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.linear import LinearLayer
from penstock.layers.mlp import MLP
from penstock.layers.rotary import Angles
from penstock.models.rotary_encoder import RotaryEncoder, RotaryEncoderLayer, Shape, TensorNames
from penstock.weights.adapters import AdapterSet, MergedSource


class AdaptedBuilder(LayerBuilder):
    """Makes layers that carry the adapters which lie beside their weights."""

    def __init__(
        self,
        weights: MergedSource,
        adapters: AdapterSet,
        quantization: str | None,
        unquantized: Collection[int] = (),
    ) -> None:
        super().__init__(weights, quantization, unquantized)
        self.source = weights
        self.adapters = adapters

    def linear(
        self,
        names: str | Sequence[str],
        inputs: int,
        outputs: int | Sequence[int],
        act: str = "identity",
        *,
        bias: bool = True,
    ) -> LinearLayer:
        name = names if isinstance(names, str) else names[0]
        single = isinstance(names, str) or len(names) == 1
        weight = f"{name}.weight"
        if not single or not isinstance(outputs, int) or not self.source.has_adapters(weight):
            return super().linear(names, inputs, outputs, act, bias=bias)
        base = super().linear(names, inputs, outputs, bias=bias)
        left, right = self.source.adapters(weight, (outputs, inputs), self.adapters)
        down = right.flatten(0, 1)  # [adapters · rank, in]
        up = left.permute(1, 0, 2).flatten(1)  # [out, adapters · rank]
        return AdaptedLinear(base, act, self._placed(down), self._placed(up))

    def adapted_table(self, name: str, rows: int, size: int) -> AdaptedTable | None:
        weight = f"{name}.weight"
        if not self.source.has_adapters(weight):
            return None
        left, right = self.source.adapters(weight, (rows, size), self.adapters)
        down = left.permute(1, 0, 2).flatten(1)  # [rows, adapters · rank]
        up = right.permute(2, 0, 1).flatten(1)  # [hidden, adapters · rank]
        return AdaptedTable(self._placed(down), self._placed(up))

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(dtype=self.weights.dtype, device=self.weights.device).contiguous()


class AdaptedEncoder(RotaryEncoder):
    """Without an adapter in the batch it is the plain encoder."""

    def __init__(
        self,
        build: AdaptedBuilder,
        shape: Shape,
        layouts: tuple[TensorNames, ...],
        ignored_tensors: tuple[str, ...],
    ) -> None:
        super().__init__(build, shape, layouts, ignored_tensors)
        if shape.gated:
            raise ModelLoadError("adapters on gated blocks are not supported")
        tables = self.prefix + "embeddings."
        self.adapters = build.adapters
        self.words = build.adapted_table(tables + "word_embeddings", shape.vocabulary, shape.hidden)
        self.segments = None
        if shape.segments:
            self.segments = build.adapted_table(
                tables + "token_type_embeddings", shape.segments, shape.hidden
            )

    def __call__(self, batch: Batch) -> Tensor:
        if batch.adapters is None:
            return super().__call__(batch)
        hidden = self.embedding.sum(batch)
        own = self.adapters
        sizes = (batch.num_tokens, own.count, own.rank, own.scale)
        select = selection(batch.adapters, batch.lengths, *sizes).to(hidden.dtype)
        if self.words is not None:
            hidden = hidden + self.words.change(batch.token_ids, select)
        if self.segments is not None:
            segments = (
                batch.token_ids.new_zeros(batch.num_tokens) if batch.type_ids is None else batch.type_ids
            )
            hidden = hidden + self.segments.change(segments, select)
        hidden = hidden if self.embedding.norm is None else self.embedding.norm(hidden)
        angles = None if self.rotary is None else self.rotary.angles(batch)
        for layer in self.layers:
            hidden = _run(layer, hidden, batch, angles, select)
        return hidden


def _run(
    layer: RotaryEncoderLayer, hidden: Tensor, batch: Batch, angles: Angles | None, select: Tensor
) -> Tensor:
    """As the layer does it, with each token's adapter."""
    qkv = _chosen(layer.qkv, hidden, select)
    if layer.rotary is None or angles is None:
        context = attend_fused(qkv, layer.heads, batch)
    else:
        context = attend(*layer.rotary.fused(qkv, layer.heads, angles), batch)
    hidden = layer.attention_norm(_chosen(layer.out, context, select, hidden))
    assert isinstance(layer.mlp, MLP)
    inner = _chosen(layer.mlp.up, hidden, select)
    return layer.output_norm(_chosen(layer.mlp.down, inner, select, hidden))


def _chosen(layer: LinearLayer, x: Tensor, select: Tensor, residual: Tensor | None = None) -> Tensor:
    return layer.chosen(x, select, residual) if isinstance(layer, AdaptedLinear) else layer(x, residual)
