"""Layers that several ranks compute together, each with a share of the weights.

In a column layer, a rank has a share of the outputs: whole attention heads, or some neurons of a feed-forward
block. In the row layer that follows, it has the same share of the inputs, and one all-reduce sums the
products of all ranks. All other parts of a layer are the same on every rank.
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
        """Replace contiguous `x` by its sum over all ranks."""
        ...

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`, all of one shape, on rank 0, and an empty list on others."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Replace contiguous `x` by the `x` of rank 0."""
        ...


@dataclass(frozen=True, slots=True)
class Units:
    """Outputs or inputs of a layer, divided among ranks in whole units."""

    count: int  # attention heads, or neurons of a feed-forward block
    size: int = 1  # outputs or inputs per unit

    @property
    def total(self) -> int:
        return self.count * self.size


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of a model that one rank computes."""

    group: Group

    def divide(self, count: int) -> range:
        """This rank's part of `count` units. All parts are equally large."""
        rank, size = self.group.rank, self.group.size
        if count % size:
            raise ValueError(f"{count} units cannot be divided among {size} ranks")
        return range(rank * count // size, (rank + 1) * count // size)

    def hold(self, count: int) -> range:
        """Like `divide`, but several ranks hold the same unit if there are fewer units than ranks."""
        rank, size = self.group.rank, self.group.size
        if count >= size:
            return self.divide(count)
        if size % count:
            raise ValueError(f"{size} ranks cannot share {count} units evenly")
        return range(rank * count // size, rank * count // size + 1)

    def outputs(self, units: Units) -> tuple[int, int]:
        """The outputs of these units on this rank, (begin, end)."""
        held = self.hold(units.count)
        return held.start * units.size, held.stop * units.size

    def inputs(self, units: Units) -> tuple[int, int]:
        """The inputs of these units on this rank, (begin, end). No other rank has them."""
        held = self.divide(units.count)
        return held.start * units.size, held.stop * units.size

    def vocabulary(self, size: int) -> tuple[int, int]:
        """The tokens whose logits this rank computes, (begin, end). The last ranks may have fewer."""
        width = -(-size // self.group.size)
        return min(size, self.group.rank * width), min(size, (self.group.rank + 1) * width)


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """The outputs and inputs of a module that are computed here."""

    outputs: int  # of the whole module
    inputs: int  # of the whole module
    own_outputs: tuple[tuple[int, int], ...]  # (begin, end), in ascending order
    own_inputs: tuple[int, int]
    has_bias: bool = True  # whether this rank adds the module's bias, if there is one

    @classmethod
    def whole(cls, outputs: int, inputs: int) -> ModuleShare:
        return cls(outputs, inputs, ((0, outputs),), (0, inputs))

    @property
    def is_summed(self) -> bool:
        """Whether the module's output is the sum over all ranks."""
        return self.own_inputs != (0, self.inputs)

    def rows(self, begin: int, end: int) -> ShareRows:
        """The module's outputs from `begin` to `end` that are computed here."""
        if self.own_outputs == ((0, self.outputs),):
            return ShareRows(slice(None), slice(begin, end))
        own = torch.cat([torch.arange(*each) for each in self.own_outputs])
        own_indices = torch.nonzero((own >= begin) & (own < end)).flatten()
        return ShareRows(own[own_indices] - begin, own_indices)


class ShareRows(NamedTuple):
    """Indices of some outputs of a module: within the requested range, and within the rank's part."""

    of_asked: slice | Tensor
    of_part: slice | Tensor


class RowParallelLinear:
    """A layer that reads this rank's share of the inputs and sums the products of all ranks.

    Only one rank's `part` has the bias, so that it is added once.
    """

    def __init__(self, part: LinearLayer, group: Group) -> None:
        self.part = part
        self.group = group
        self.in_features, self.out_features = part.in_features, part.out_features

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        total = self.part(x).contiguous()
        self.group.all_reduce(total)
        return total if residual is None else total.add_(residual)


class VocabularyParallelLinear:
    """Computes logits of this rank's share of the vocabulary, and gathers all logits on rank 0."""

    def __init__(self, part: LinearLayer, group: Group, vocabulary: int) -> None:
        self.part = part
        self.group = group
        self.vocabulary = vocabulary
        self.in_features, self.out_features = part.in_features, vocabulary

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return [n, vocabulary] on rank 0. Other ranks return their own share, which nothing reads."""
        own = self.part(x).contiguous()
        if not (parts := self.group.gather(own)):
            return own
        return torch.cat(parts, dim=1)[:, : self.vocabulary].contiguous()


def pad_vocabulary(weight: Tensor, shard: Shard, vocabulary: int) -> Tensor:
    """Pad this rank's rows of a head with zero rows, so that all ranks have the same number."""
    missing = -(-vocabulary // shard.group.size) - len(weight)
    return F.pad(weight, (0, 0, 0, missing) if weight.dim() == 2 else (0, missing)) if missing else weight
