"""Builds layers from a weight source, so that a model file is only wiring."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.blockwise import BlockQuantized, dequantize_blocks
from penstock.layers.adapted_linear import AdaptedLinear
from penstock.layers.adapted_table import AdaptedTable
from penstock.layers.embedding import EncoderEmbedding
from penstock.layers.fp8 import BlockLinear, Fp8Linear
from penstock.layers.fp8_blocks import join_blocks, join_rows, read_blocks, supports_fp8_blocks
from penstock.layers.int4 import Int4Linear, WeightScratch, join_int4, supports_int4
from penstock.layers.linear import LinearLayer, make_linear
from penstock.layers.lora import AdapterSites
from penstock.layers.norm import LayerNorm, RMSNorm
from penstock.layers.parallel import ModuleShare, RowParallelLinear, Shard, Units
from penstock.weights.quantized import IntGroups, QuantizedReader, ScaledFp8, StoredPart, dequantize_part
from penstock.weights.stream import Wanted, WeightSource

_LAYER_NUMBER = re.compile(r"(?:^|\.)(?:block|layers?)\.(\d+)\.")  # matches names of tensors


class LayerBuilder:
    """Builds whole layers, or with a `shard` one rank's share of divided layers."""

    def __init__(
        self, weights: WeightSource, quantization: str | None = None, unquantized: Collection[int] = ()
    ) -> None:
        """`unquantized` has the numbers of layers that quantisation skips."""
        self.weights = weights
        self.quantization = quantization
        self.unquantized = unquantized
        self.folder: Path | None = None  # folder of the checkpoint
        self.stored: QuantizedReader | None = None  # set if the checkpoint is quantised
        self.shard: Shard | None = None  # None: this process computes the whole model
        self.adapters: AdapterSites | None = None  # None: the model supports no adapters
        self._scratch = WeightScratch()

    def linear(
        self,
        names: str | Sequence[str],
        inputs: int,
        outputs: int | Sequence[int],
        act: str = "identity",
        *,
        bias: bool = True,
    ) -> LinearLayer:
        """Build a layer, or several fused along their outputs. `outputs` is one size for all or one each."""
        names = [names] if isinstance(names, str) else list(names)
        sizes = [outputs] * len(names) if isinstance(outputs, int) else outputs
        layer = self._plain_linear(names, inputs, sizes, act, bias=bias)
        return self.adapted(layer, names, sizes, act, bias=bias)

    def _plain_linear(
        self, names: Sequence[str], inputs: int, outputs: Sequence[int], act: str, *, bias: bool
    ) -> LinearLayer:
        added: Tensor | None = None
        if bias:
            added = self.weights.fuse([f"{name}.bias" for name in names], outputs)
        if not any(self.is_quantized(name) for name in names):
            weight = self.weights.fuse([f"{name}.weight" for name in names], outputs, inputs)
            return make_linear(weight, added, act, self.precision(names[0]))
        parts = [self._read_part(name, size, inputs) for name, size in zip(names, outputs, strict=True)]
        return self._from_parts(parts, added, act, self.precision(names[0]))

    def adapted(
        self,
        layer: LinearLayer,
        names: Sequence[str],
        outputs: Sequence[int],
        act: str = "identity",
        *,
        bias: bool,
        is_transposed: bool = False,
        shares: Sequence[ModuleShare] = (),
    ) -> LinearLayer:
        """Wrap a layer so that adapters can change it, if the model supports adapters.

        It may be fused from the modules `names`. `act` is the activation that it applies. On one of several
        ranks, `shares` says which part of each module it has.
        """
        if (sites := self.adapters) is None:
            return layer
        like = self.weights.dtype, self.weights.device
        found = AdaptedLinear(
            layer,
            act,
            outputs,
            sites,
            like,
            has_bias=bias,
            is_transposed=is_transposed,
            shares=shares,
        )
        sites.layers.update((name, (found, number)) for number, name in enumerate(names))
        return found

    def without_adapters(self) -> LayerBuilder:
        """Return a builder of layers that adapters cannot change."""
        plain = copy(self)
        plain.adapters = None
        return plain

    def alias(self, prefix: str, names: Sequence[str], other_prefix: str, others: Sequence[str]) -> None:
        """Let adapters name modules as in another layout of the model's checkpoints."""
        if self.adapters is not None:
            self.adapters.add_aliases(
                [prefix + name for name in names], [other_prefix + name for name in others]
            )

    def alias_prefix(self, prefix: str, other: str) -> None:
        """Let adapters use `other` in place of `prefix` in the names of layers."""
        if self.adapters is not None:
            names = [name for name in self.adapters.layers if name.startswith(prefix)]
            self.adapters.add_aliases(names, [other + name.removeprefix(prefix) for name in names])

    def adapted_table(self, name: str, weight: Tensor) -> AdaptedTable | None:
        """Make a table adaptable; None if the model supports no adapters."""
        if (sites := self.adapters) is None:
            return None
        return sites.tables.setdefault(name, AdaptedTable(weight, sites))

    def column(
        self,
        names: str | Sequence[str],
        inputs: int,
        outputs: Sequence[Units],
        act: str = "identity",
        *,
        bias: bool = True,
    ) -> LinearLayer:
        """Build a layer whose outputs are divided among ranks.

        It is fused along its outputs, from one tensor for each entry of `outputs` or from a single tensor.
        """
        names = [names] if isinstance(names, str) else list(names)
        sizes = [units.total for units in outputs]
        if self.shard is None:
            return self.linear(names, inputs, sum(sizes) if len(names) == 1 else sizes, act, bias=bias)
        weight = self.weights.join(self._columns([f"{name}.weight" for name in names], outputs, inputs))
        added = None
        if bias:
            added = self.weights.join(self._columns([f"{name}.bias" for name in names], outputs))
        layer = make_linear(weight, added, act, self.precision(names[0]))
        shares = self._column_shares(self.shard, len(names), inputs, outputs)
        own = [sum(end - begin for begin, end in share.own_outputs) for share in shares]
        return self.adapted(layer, names, own, act, bias=bias, shares=shares)

    @staticmethod
    def _column_shares(
        shard: Shard, num_names: int, inputs: int, outputs: Sequence[Units]
    ) -> list[ModuleShare]:
        """This rank's share of each module that a column layer is fused from."""
        held = [shard.outputs(units) for units in outputs]
        whole = (0, inputs)
        if num_names > 1 or len(outputs) == 1:
            return [
                ModuleShare(units.total, inputs, (each,), whole)
                for units, each in zip(outputs, held, strict=True)
            ]
        first, own = 0, []
        for units, (begin, end) in zip(outputs, held, strict=True):
            own.append((first + begin, first + end))
            first += units.total
        return [ModuleShare(first, inputs, tuple(own), whole)]

    def _columns(self, names: Sequence[str], outputs: Sequence[Units], *rest: int) -> list[Wanted]:
        """This rank's parts of tensors [outputs, ..]."""
        assert self.shard is not None
        sizes, wanted = [units.total for units in outputs], []
        for number, units in enumerate(outputs):
            begin, end = self.shard.outputs(units)
            name, rows, first = names[number % len(names)], sizes[number], 0
            if len(names) == 1:  # the tensor has the outputs of all kinds of units, one kind after another
                rows, first = sum(sizes), sum(sizes[:number])
            wanted.append(Wanted(name, (rows, *rest), ((first + begin, first + end),)))
        return wanted

    def row(self, name: str, inputs: Units, outputs: int, *, bias: bool = True) -> LinearLayer:
        """Build a layer whose inputs are divided among ranks like the outputs of a column layer.

        Every rank has all of its outputs.
        """
        if (shard := self.shard) is None:
            return self.linear(name, inputs.total, outputs, bias=bias)
        shape, ranges = (outputs, inputs.total), ((0, outputs), shard.inputs(inputs))
        weight = self.weights.join([Wanted(f"{name}.weight", shape, ranges)])
        added = None
        if bias and shard.group.rank == 0:
            added = self.weights.take(f"{name}.bias", outputs)
        elif bias:
            self.weights.skip(f"{name}.bias", (outputs,))
        layer = make_linear(weight, added, "identity", self.precision(name))
        share = ModuleShare(
            outputs, inputs.total, ((0, outputs),), shard.inputs(inputs), has_bias=shard.group.rank == 0
        )
        part = self.adapted(layer, [name], [outputs], bias=bias, shares=[share])
        return RowParallelLinear(part, shard.group)

    def num_heads(self, count: int) -> int:
        """The number of the model's `count` attention heads that are computed here."""
        return count if self.shard is None else len(self.shard.divide(count))

    def num_kv_heads(self, count: int) -> int:
        """The number of the model's `count` key/value heads that are computed here."""
        return count if self.shard is None else len(self.shard.hold(count))

    def own_heads(self, table: Tensor) -> Tensor:
        """Select the columns of a table [.., attention heads] for the heads that are computed here."""
        if self.shard is None:
            return table
        held = self.shard.divide(table.shape[-1])
        return table[..., held.start : held.stop].contiguous()

    def experts(self, count: int) -> range:
        """Which of the model's `count` experts are computed here."""
        return range(count) if self.shard is None else self.shard.divide(count)

    def _read_part(self, name: str, outputs: int, inputs: int) -> StoredPart | BlockQuantized:
        if self.is_stored_in_blocks(name):
            return read_blocks(self.weights, f"{name}.weight", outputs, inputs)
        if self.stored is not None and (how := self.stored.find(name)) is not None:
            return self.stored.read(name, outputs, inputs, how)
        return self.weights.read_plain(f"{name}.weight", (outputs, inputs))

    def _from_parts(
        self,
        parts: Sequence[StoredPart | BlockQuantized],
        bias: Tensor | None,
        act: str,
        quantization: str | None,
    ) -> LinearLayer:
        """Build a layer that keeps the stored format if all parts share it and the device supports it.

        Otherwise parts are dequantised, and quantised again if `--quantization` is set.
        """
        dtype, device = self.weights.dtype, self.weights.device
        blocks = [part for part in parts if isinstance(part, BlockQuantized)]
        if len(blocks) == len(parts) and supports_fp8_blocks(device):
            return BlockLinear(join_blocks(blocks), bias, act, dtype)
        rows = [part for part in parts if isinstance(part, ScaledFp8) and part.has_quantized_inputs]
        if len(rows) == len(parts) and supports_fp8_blocks(device):
            weight = join_rows(rows)
            if Fp8Linear.fits(weight.values, dtype):
                return Fp8Linear(weight, bias, act, dtype)
        ints = [part for part in parts if isinstance(part, IntGroups)]
        is_int4 = len(ints) == len(parts) and supports_int4(device, dtype)
        if is_int4 and (joined := join_int4(ints)) is not None:
            return Int4Linear(joined[0], bias, act, dtype, self._scratch, joined[1])
        plain = [
            dequantize_blocks(part) if isinstance(part, BlockQuantized) else dequantize_part(part, dtype)
            for part in parts
        ]
        return make_linear(
            torch.cat([part.to(dtype=dtype, device=device) for part in plain]), bias, act, quantization
        )

    def is_quantized(self, name: str) -> bool:
        """Whether the checkpoint stores this module's weight in a quantised format."""
        return self.stored is not None and self.stored.find(name) is not None

    def is_stored_in_blocks(self, name: str) -> bool:
        """Whether this module is in a repeated layer and its weight is stored in fp8 blocks."""
        if self.stored is None or _LAYER_NUMBER.search(name) is None:
            return False
        return self.stored.is_in_blocks(name)

    def has_weight(self, name: str) -> bool:
        return self.weights.has(f"{name}.weight") or self.is_quantized(name)

    def plain_weight(self, name: str, outputs: int, inputs: int) -> Tensor:
        """Read a module's weight in the model's dtype, and dequantise it if necessary."""
        if self.stored is None:
            return self.weights.take(f"{name}.weight", outputs, inputs)
        return self.stored.read_plain(name, outputs, inputs)

    def expert_weight(self, name: str, outputs: int, inputs: int) -> Tensor | BlockQuantized:
        """Read the weight of a module that will be stacked with others: in fp8 blocks, or not quantised."""
        part = self._read_part(name, outputs, inputs)
        return part if isinstance(part, Tensor | BlockQuantized) else part.dequantize(self.weights.dtype)

    def tied(self, weight: Tensor, bias: str | None) -> LinearLayer:
        """Build a layer that shares another layer's weight and has its own bias or none."""
        added = None if bias is None else self.weights.take(bias, len(weight))
        return make_linear(weight, added, "identity", self.precision(""))

    def precision(self, name: str) -> str | None:
        """The quantisation of a module. fp8 applies only to repeated layers, because heads cost little."""
        found = _LAYER_NUMBER.search(name)
        if found is None:
            return None if self.quantization == "fp8" else self.quantization
        return None if int(found[1]) in self.unquantized else self.quantization

    def norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> LayerNorm:
        added = self.weights.take(f"{name}.bias", size) if bias else None
        return LayerNorm(self.weights.take(f"{name}.weight", size), added, eps)

    def rms_norm(self, name: str, size: int, eps: float, *, plus_one: bool = False) -> RMSNorm:
        """With `plus_one`, the checkpoint stores weight − 1, and 1 is added before rounding."""
        if not plus_one:
            return RMSNorm(self.weights.take(f"{name}.weight", size), eps)
        weight = self.weights.read(f"{name}.weight", (size,)).float() + 1
        return RMSNorm(weight.to(dtype=self.weights.dtype, device=self.weights.device), eps)

    def adapt_embedding(self, embedding: EncoderEmbedding, tables: str) -> EncoderEmbedding:
        """Let adapters change the word and segment tables of an encoder's embedding."""
        words = self.adapted_table(tables + "word_embeddings", embedding.words)
        segments = None
        if embedding.segments is not None:
            segments = self.adapted_table(tables + "token_type_embeddings", embedding.segments)
        embedding.adapted = words, segments
        return embedding

    def share_table(self, weight: Tensor, *modules: str) -> None:
        """Record that a head shares this weight, and that adapters cannot change these modules."""
        if self.adapters is not None:
            self.adapters.share_table(weight)
            self.adapters.fixed.update(modules)

    def table(self, name: str, rows: int, size: int) -> Tensor:
        return self.weights.take(f"{name}.weight", rows, size)
