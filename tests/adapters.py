"""Random adapters for the layers of a model, without files."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.layers.lora import AdapterSites
from penstock.weights.adapters import ModuleWeights, PartWeights, TableWeights


def random_adapters(sites: AdapterSites, ranks: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
    """Give the model its own adapters with these ranks, on all of its layers and tables. Every second adapter
    leaves out every third layer; the last one has gains, as in DoRA."""
    draw = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return (0.1 * torch.randn(shape, generator=draw)).to(dtype)

    sites.own = []
    for number, rank in enumerate(ranks):
        found: ModuleWeights = {}
        for place, (name, (layer, part)) in enumerate(sites.layers.items()):
            if number % 2 and place % 3 == 0:
                continue
            outputs = layer.part_size(part)
            weights = PartWeights(noise(rank, layer.in_features), noise(outputs, rank))
            if number == len(ranks) - 1:
                weights = weights._replace(gain=1 + noise(outputs).float(), shift=noise(outputs).float())
            found[name] = weights
        for name, table in sites.tables.items():
            found[name] = TableWeights(noise(table.rows, rank), noise(table.width, rank))
            if number == 0:
                found[name] = TableWeights(indices=torch.tensor([1, 0]), rows=noise(2, table.width))
        sites.own.append(found)
