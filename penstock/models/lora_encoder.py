"""A rotary encoder with an adapter per row: jina-embeddings-v3."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.layers.attention import attend, attend_fused
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.linear import LinearLayer
from penstock.layers.lora import LoraLinear, LoraTable, adapter_mask
from penstock.layers.mlp import MLP
from penstock.layers.rotary import Angles
from penstock.models.rotary_encoder import RotaryEncoder, RotaryEncoderLayer, Shape, TensorNames
from penstock.weights.adapters import AdapterSet, MergedSource


class LoraBuilder(LayerBuilder):
    """Builds layers with the adapters that the checkpoint stores next to their weights."""

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
        return LoraLinear(base, act, self._placed(down), self._placed(up))

    def lora_table(self, name: str, rows: int, size: int) -> LoraTable | None:
        weight = f"{name}.weight"
        if not self.source.has_adapters(weight):
            return None
        left, right = self.source.adapters(weight, (rows, size), self.adapters)
        down = left.permute(1, 0, 2).flatten(1)  # [rows, adapters · rank]
        up = right.permute(2, 0, 1).flatten(1)  # [hidden, adapters · rank]
        return LoraTable(self._placed(down), self._placed(up))

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(dtype=self.weights.dtype, device=self.weights.device).contiguous()


class LoraEncoder(RotaryEncoder):
    """The plain encoder, unless a row of the batch has an adapter."""

    def __init__(
        self,
        build: LoraBuilder,
        shape: Shape,
        layouts: tuple[TensorNames, ...],
        ignored_tensors: tuple[str, ...],
    ) -> None:
        super().__init__(build, shape, layouts, ignored_tensors)
        if shape.gated:
            raise ModelLoadError("adapters on a gated feed-forward block are not supported")
        tables = self.prefix + "embeddings."
        self.adapters = build.adapters
        self.words = build.lora_table(tables + "word_embeddings", shape.vocabulary, shape.hidden)
        self.segments = None
        if shape.segments:
            self.segments = build.lora_table(tables + "token_type_embeddings", shape.segments, shape.hidden)

    def __call__(self, batch: Batch) -> Tensor:
        if batch.adapters is None:
            return super().__call__(batch)
        hidden = self.embedding.sum(batch)
        mask = adapter_mask(batch.adapters, batch.lengths, batch.num_tokens, self.adapters).to(hidden.dtype)
        if self.words is not None:
            hidden = hidden + self.words.change(batch.token_ids, mask)
        if self.segments is not None:
            segments = (
                batch.token_ids.new_zeros(batch.num_tokens) if batch.type_ids is None else batch.type_ids
            )
            hidden = hidden + self.segments.change(segments, mask)
        hidden = hidden if self.embedding.norm is None else self.embedding.norm(hidden)
        angles = None if self.rotary is None else self.rotary.angles(batch)
        for layer in self.layers:
            hidden = _run(layer, hidden, batch, angles, mask)
        return hidden


def _run(
    layer: RotaryEncoderLayer, hidden: Tensor, batch: Batch, angles: Angles | None, mask: Tensor
) -> Tensor:
    """What the layer computes, with each token's adapter."""
    qkv = _adapted(layer.qkv, hidden, mask)
    if layer.rotary is None or angles is None:
        context = attend_fused(qkv, layer.heads, batch)
    else:
        context = attend(*layer.rotary.rotate_qkv(qkv, layer.heads, angles), batch)
    hidden = layer.attention_norm(_adapted(layer.out, context, mask, hidden))
    if not isinstance(layer.mlp, MLP):
        raise TypeError("adapters on gated blocks are refused when the model is built")
    inner = _adapted(layer.mlp.up, hidden, mask)
    return layer.output_norm(_adapted(layer.mlp.down, inner, mask, hidden))


def _adapted(layer: LinearLayer, x: Tensor, mask: Tensor, residual: Tensor | None = None) -> Tensor:
    return layer.with_adapters(x, mask, residual) if isinstance(layer, LoraLinear) else layer(x, residual)
