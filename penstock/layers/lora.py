"""The layers and tables of a model that adapters can change, by module name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from penstock.layers.adapted_linear import AdaptedLinear
from penstock.layers.adapted_table import AdaptedTable
from penstock.layers.adapter_state import AdapterSlots
from penstock.weights.adapters import ModuleWeights, PartWeights, TableWeights


class SiteRows(NamedTuple):
    """Outputs of a layer that are a separate module in another layout of the model's checkpoints."""

    site: str
    begin: int
    end: int


class AdapterSites(AdapterSlots):
    """The layers and tables of a model that adapters can change, by module name."""

    def __init__(self, num_slots: int, max_rank: int) -> None:
        super().__init__(num_slots, max_rank)
        self.layers: dict[str, tuple[AdaptedLinear, int]] = {}  # layer, and number of the part
        self.tables: dict[str, AdaptedTable] = {}
        self.aliases: dict[str, SiteRows] = {}  # names of the same modules in other layouts
        self.own: list[ModuleWeights] = []  # adapters of the checkpoint itself
        self.tied: set[str] = set()  # tables whose weight a head shares
        self.fixed: set[str] = set()  # modules of the model that adapters cannot change
        self.ignored: tuple[str, ...] = ()  # name fragments of modules that the model does not build

    def share_table(self, weight: Tensor) -> None:
        """Record that a head shares the weight of a table."""
        self.tied.update(name for name, table in self.tables.items() if table.weight is weight)

    def names(self) -> Iterable[str]:
        yield from self.layers
        yield from self.tables
        yield from self.aliases

    def add_aliases(self, names: Sequence[str], others: Sequence[str]) -> None:
        """Add other names of modules: one for each module, or several for parts of one module."""
        if any(name not in self.layers for name in names):
            return
        if len(names) > 1 and len(names) != len(others):
            return
        for number, other in enumerate(others):
            site = names[number] if len(names) == len(others) else names[0]
            layer, part = self.layers[site]
            size = layer.shares[part].outputs
            if len(names) < len(others):  # parts of one module are joined into a pair of higher rank
                layer.rank_factor = len(others)
                size //= len(others)
            begin = number * size if len(names) < len(others) else 0
            self.aliases[other] = SiteRows(site, begin, begin + size)

    def compile_kernels(self, weights: ModuleWeights, rank: int) -> None:
        """Compile the kernels of steps with an adapter before its first step."""
        layers: dict[int, tuple[AdaptedLinear, bool]] = {}
        for name, each in weights.items():
            if isinstance(each, PartWeights) and each.down is not None:
                layer, _ = self.layers[name]
                has_gain = each.gain is not None or layers.get(id(layer), (layer, False))[1]
                layers[id(layer)] = layer, has_gain
        for layer, has_gain in layers.values():
            layer.compile_kernels(rank, has_gain=has_gain)

    def reserve(self, weights: ModuleWeights) -> None:
        """Allocate memory for an adapter in any slot, before it is written to one."""
        for name, each in weights.items():
            if isinstance(each, TableWeights):
                self.tables[name].reserve(each)
        for layer, parts in self._by_layer(weights).values():
            layer.reserve(parts)

    def _by_layer(self, weights: ModuleWeights) -> dict[int, tuple[AdaptedLinear, dict[int, PartWeights]]]:
        """Group an adapter's weights by layer and part. The keys are the `id` of the layer."""
        layers: dict[int, tuple[AdaptedLinear, dict[int, PartWeights]]] = {}
        for name, each in weights.items():
            if isinstance(each, PartWeights):
                layer, part = self.layers[name]
                layers.setdefault(id(layer), (layer, {}))[1][part] = each
        return layers

    def write(self, slot: int, weights: ModuleWeights) -> bool:
        """Write an adapter to a slot, on the current stream.

        Return whether a layer allocated memory. Graphs of steps with adapters are then no longer valid.
        """
        grew = False
        layers = self._by_layer(weights)
        for name, each in weights.items():
            if isinstance(each, TableWeights):
                grew |= self.tables[name].write(slot, each)
        for layer, parts in layers.values():
            grew |= layer.write(slot, parts)
        written = {id(table) for name, table in self.tables.items() if name in weights}
        for layer, _ in self.layers.values():
            if id(layer) not in layers:
                layer.clear(slot)
        for table in self.tables.values():
            if id(table) not in written:
                table.clear(slot)
        return grew
