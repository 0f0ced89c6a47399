"""Layers that several ranks compute together, each with a share of the weights.

A column layer has a share of the outputs: whole attention heads, or some neurons of a feed-forward block. The
row layer behind it has the same share of the inputs, so its products are summed over the ranks, once for each
row layer. Everything else of a layer is the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.quantize import Activations
from penstock.layers.linear import LinearLayer


class Group(Protocol):
    """The ranks of one model. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> None:
        """Replace `x`, which is contiguous, by its sum over all ranks."""
        ...

    def gather(self, x: Tensor) -> list[Tensor]:
        """On rank 0, the `x` of every rank, all of one shape; elsewhere nothing."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Replace `x`, which is contiguous, by that of rank 0."""
        ...


@dataclass(frozen=True, slots=True)
class Units:
    """Outputs or inputs of a layer, which are divided among ranks in whole units."""

    count: int  # attention heads, or neurons of a feed-forward block
    size: int = 1  # outputs or inputs of each

    @property
    def total(self) -> int:
        return self.count * self.size


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of a model that one rank computes."""

    group: Group

    def divide(self, count: int) -> range:
        """This rank's part of `count` units, which every rank has as many of."""
        rank, size = self.group.rank, self.group.size
        if count % size:
            raise ValueError(f"{count} units cannot be divided among {size} ranks")
        return range(rank * count // size, (rank + 1) * count // size)

    def hold(self, count: int) -> range:
        """As `divide`, but several ranks hold the same unit where there are fewer units than ranks."""
        rank, size = self.group.rank, self.group.size
        if count >= size:
            return self.divide(count)
        if size % count:
            raise ValueError(f"{size} ranks cannot share {count} units evenly")
        return range(rank * count // size, rank * count // size + 1)

    def outputs(self, units: Units) -> tuple[int, int]:
        """The outputs of these units that this rank has, (begin, end)."""
        held = self.hold(units.count)
        return held.start * units.size, held.stop * units.size

    def inputs(self, units: Units) -> tuple[int, int]:
        """The inputs of these units that this rank has, (begin, end); no other rank has them."""
        held = self.divide(units.count)
        return held.start * units.size, held.stop * units.size

    def vocabulary(self, size: int) -> tuple[int, int]:
        """The tokens whose logits this rank computes, (begin, end). The last ranks may have fewer."""
        width = -(-size // self.group.size)
        return min(size, self.group.rank * width), min(size, (self.group.rank + 1) * width)


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """Which outputs and inputs of a module are computed here. By default all of them."""

    outputs: int  # of the whole module
    inputs: int
    own_outputs: tuple[tuple[int, int], ...]  # (begin, end), in ascending order
    own_inputs: tuple[int, int]
    has_bias: bool = True  # this rank adds the module's bias, if there is one

    @classmethod
    def whole(cls, outputs: int, inputs: int) -> ModuleShare:
        return cls(outputs, inputs, ((0, outputs),), (0, inputs))

    @property
    def is_summed(self) -> bool:
        """Whether the module's output is the sum of what all ranks compute."""
        return self.own_inputs != (0, self.inputs)

    def rows(self, begin: int, end: int) -> ShareRows:
        """The outputs from `begin` to `end` of the module, as far as they are computed here."""
        if self.own_outputs == ((0, self.outputs),):
            return ShareRows(slice(None), slice(begin, end))
        own = torch.cat([torch.arange(*each) for each in self.own_outputs])
        own_indices = torch.nonzero((own >= begin) & (own < end)).flatten()
        return ShareRows(own[own_indices] - begin, own_indices)


class ShareRows(NamedTuple):
    """Some outputs of a module: where they are among those that were asked for, and in a rank's part."""

    of_asked: slice | Tensor
    of_part: slice | Tensor


class RowParallelLinear:
    """A layer on this rank's share of the inputs; the products of all ranks are summed. Only one rank's
    `part` has the bias, so that it is added once."""

    def __init__(self, part: LinearLayer, group: Group) -> None:
        self.part = part
        self.group = group
        self.in_features, self.out_features = part.in_features, part.out_features

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        total = self.part(x).contiguous()
        self.group.all_reduce(total)
        return total if residual is None else total.add_(residual)


class VocabularyParallelLinear:
    """Logits of this rank's share of the vocabulary; on rank 0 those of all ranks side by side."""

    def __init__(self, part: LinearLayer, group: Group, vocabulary: int) -> None:
        self.part = part
        self.group = group
        self.vocabulary = vocabulary
        self.in_features, self.out_features = part.in_features, vocabulary

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """[n, vocabulary] on rank 0; elsewhere this rank's share alone, which nothing reads."""
        own = self.part(x).contiguous()
        if not (parts := self.group.gather(own)):
            return own
        return torch.cat(parts, dim=1)[:, : self.vocabulary].contiguous()


def pad_vocabulary(weight: Tensor, shard: Shard, vocabulary: int) -> Tensor:
    """This rank's rows of a head, with zero rows so that every rank has as many."""
    missing = -(-vocabulary // shard.group.size) - len(weight)
    return F.pad(weight, (0, 0, 0, missing) if weight.dim() == 2 else (0, missing)) if missing else weight
