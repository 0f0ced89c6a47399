"""Reads an adapter's files into weights for a model's modules, in host memory. Refuses what does not fit."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.adapters import LACKING, LoraSpec, is_saved, match_modules, named_modules
from penstock.checkpoint.files import first_names
from penstock.errors import ModelLoadError
from penstock.layers.adapted_linear import SumOverRanks
from penstock.layers.lora import AdapterSites, SiteRows
from penstock.weights.adapters import (
    ModuleWeights,
    PartWeights,
    TableWeights,
    low_rank_pair,
    read_lora_file,
)

log = logging.getLogger("penstock.adapters")


def read_adapter(
    spec: LoraSpec,
    sites: AdapterSites,
    dtype: torch.dtype,
    sum_over_ranks: SumOverRanks | None = None,
) -> ModuleWeights:
    """The weights of an adapter, by module name of the model, limited to what this rank computes.
    `sum_over_ranks` is required for one rank's part of a model; all ranks call it equally often."""
    return _Reader(spec, sites, dtype, sum_over_ranks).read()


class _Reader:
    def __init__(
        self, spec: LoraSpec, sites: AdapterSites, dtype: torch.dtype, sum_over_ranks: SumOverRanks | None
    ) -> None:
        self.spec = spec
        self.sum_over_ranks = sum_over_ranks
        self.sites = sites
        self.dtype = dtype
        self.places = self._places()
        self.tensors = read_lora_file(spec)

    def read(self) -> ModuleWeights:
        found: ModuleWeights = {}
        parts: dict[str, list[tuple[SiteRows, PartWeights]]] = {}
        for module in self.spec.targets:
            if (place := self.places.get(module)) is None:
                continue
            if place in self.sites.tables:
                found[place] = self._table(module, place)
            else:
                rows = self._rows(place)
                parts.setdefault(rows.site, []).append((rows, self._part(module, rows)))
        found |= {site: self._joined(site, each) for site, each in parts.items()}
        for place, weights in self._saved():
            found[place] = weights
        for module, indices in self.spec.tokens.items():
            if (place := self.places.get(module)) is not None:
                before = found.get(place, TableWeights())
                assert isinstance(before, TableWeights)
                new = self.tensors[f"{module}.token_adapter.trainable_tokens_delta"]
                found[place] = self._with_rows(before, place, module, torch.tensor(indices), new)
        self._check_finite(found)
        return found

    def _check_finite(self, found: ModuleWeights) -> None:
        """Refuse weights that are not finite, or overflow in the model's dtype: they would fail every
        request."""
        for place, weights in found.items():
            if not all(math.isfinite(each.sum(dtype=torch.float32)) for each in weights if each is not None):
                raise _refused(
                    f"the adapter {self.spec.name!r} has values for {place} that are not finite in "
                    f"{str(self.dtype).removeprefix('torch.')}"
                )

    def _places(self) -> dict[str, str]:
        """The model's module for each module of the adapter, without modules that the model does not use."""
        spec, sites = self.spec, self.sites
        if spec.rank > sites.max_rank:
            raise _refused(
                f"the adapter {spec.name!r} has rank {spec.rank}; at most {sites.max_rank} is allowed. Set a "
                "larger --max-lora-rank"
            )
        places = match_modules(spec.modules, sites.names())
        missing = [module for module in spec.modules if module not in places]
        fixed = match_modules(missing, sites.fixed)
        left_out = [name for name in missing if any(mark in f"{name}." for mark in sites.ignored)]
        left_out = [name for name in left_out if name not in fixed]
        if left_out:
            log.info("adapter %r changes parts that are not used: %s", spec.name, first_names(left_out))
        if refused := [module for module in missing if module not in left_out]:
            base = f"; it was made for {spec.base_model}" if spec.base_model else ""
            raise _refused(
                f"the adapter {spec.name!r} changes modules that this model does not have, or that cannot be "
                f"adapted: {first_names(refused)}{base}"
            )
        if not places:
            raise _refused(
                f"the adapter {spec.name!r} would change nothing: the model does not use "
                f"{first_names(left_out)}"
            )
        if len(set(places.values())) < len(places):
            raise _refused(f"the adapter {spec.name!r} names a module of the model twice")
        if lacking := self._lacking(places):
            log.warning(LACKING, spec.name, first_names(lacking))
        return places

    def _lacking(self, places: Mapping[str, str]) -> list[str]:
        """The modules of the model that the adapter's options name but its file does not contain."""
        layers = {place: module for module, place in places.items() if place not in self.sites.tables}
        changed: dict[str, list[SiteRows]] = {}
        for rows in map(self._rows, layers):
            changed.setdefault(rows.site, []).append(rows)
        others: dict[SiteRows, str] = {}  # each with the first of its names
        for name in named_modules(self.spec, layers, (*self.sites.layers, *self.sites.aliases)):
            rows = self._rows(name)
            if not any(
                rows.begin < each.end and each.begin < rows.end for each in changed.get(rows.site, ())
            ):
                others.setdefault(rows, name)
        return list(others.values())

    def _rows(self, place: str) -> SiteRows:
        if (rows := self.sites.aliases.get(place)) is not None:
            return rows
        layer, number = self.sites.layers[place]
        return SiteRows(place, 0, layer.shares[number].outputs)

    def _joined(self, site: str, parts: list[tuple[SiteRows, PartWeights]]) -> PartWeights:
        """The weights of an adapter for a layer: one low-rank pair, or the joined pairs of its parts."""
        layer, number = self.sites.layers[site]
        outputs, share = layer.part_size(number), layer.shares[number]
        rows, part = parts[0]
        if len(parts) == 1 and rows.end - rows.begin == share.outputs and _num_rows(part) == outputs:
            return part
        if sum(each.end - each.begin for each, _ in parts) > share.outputs:
            raise _refused(f"the adapter {self.spec.name!r} changes {site} as a whole and in parts")
        rank = sum(each.rank for _, each in parts)
        up = torch.zeros((outputs, rank), dtype=self.dtype)
        gain, shift, first = torch.ones(outputs), torch.zeros(outputs), 0
        for rows, part in parts:
            assert part.up is not None
            own = share.rows(rows.begin, rows.end).of_part
            up[own, first : first + part.rank] = part.up
            first += part.rank
            if part.gain is not None and part.shift is not None:
                gain[own], shift[own] = part.gain, part.shift
        down = torch.cat([part.down for _, part in parts if part.down is not None])
        if not any(part.gain is not None for _, part in parts):
            return PartWeights(down, up)
        return PartWeights(down, up, gain, shift)

    def _part(self, module: str, rows: SiteRows) -> PartWeights:
        place, target = rows.site, self.spec.targets[module]
        if target.is_table:
            raise self._mismatch(module, "an embedding", "a layer")
        layer, number = self.sites.layers[place]
        outputs, share = rows.end - rows.begin, layer.shares[number]
        if (target.outputs, target.inputs) != (outputs, share.inputs):
            raise self._mismatch(module, f"{target.outputs} × {target.inputs}", f"{outputs} × {share.inputs}")
        own, inputs = share.rows(rows.begin, rows.end), slice(*share.own_inputs)
        if target.has_base:
            stored = self.tensors[f"{module}.base_layer.weight"]
            if stored.shape != (outputs, share.inputs):
                raise self._other_base(module, stored, (outputs, share.inputs))
            found = layer.base_rows(number)[own.of_part]
            if not self._is_same(stored[own.of_asked, inputs], found):
                raise self._other_base(module, stored, stored.shape)
        down, up = low_rank_pair(self.spec, module, self.tensors)
        part = PartWeights(down[:, inputs], up[own.of_asked])
        if target.is_dora:
            lengths = self._magnitude(module)[own.of_asked]
            part = layer.with_lengths(number, part, lengths, own.of_part, self.sum_over_ranks)
        return part._replace(down=self._cast(part.down), up=self._cast(part.up))

    def _magnitude(self, module: str) -> Tensor:
        name = f"{module}.lora_magnitude_vector"
        return self.tensors[name] if name in self.tensors else self.tensors[f"{name}.weight"]

    def _is_same(self, stored: Tensor, weight: Tensor) -> bool:
        """Whether the adapter's copy of a base weight equals the model's weight."""
        stored, weight = stored.to(self.dtype), weight.to(self.dtype).cpu()
        return stored.shape == weight.shape and torch.equal(stored, weight)

    def _other_base(self, module: str, stored: Tensor, shape: Sequence[int]) -> ModelLoadError:
        return _refused(
            f"the adapter {self.spec.name!r} brings another weight for {module}, of shape "
            f"{list(stored.shape)}; the model's has shape {list(shape)}"
        )

    def _table(self, module: str, place: str) -> TableWeights:
        target, table = self.spec.targets[module], self.sites.tables[place]
        if not target.is_table or (target.inputs, target.outputs) != (table.rows, table.width):
            raise self._mismatch(
                module, f"{target.inputs} × {target.outputs}", f"{table.rows} × {table.width}"
            )
        self._check_tied(place, module)
        if target.has_base:
            stored = self.tensors[f"{module}.base_layer.weight"]
            if not self._is_same(stored, table.weight):
                raise self._other_base(module, stored, table.weight.shape)
        down = self.tensors[f"{module}.lora_embedding_A"].float().t()
        up = self.tensors[f"{module}.lora_embedding_B"].float() * target.scale
        return TableWeights(self._cast(down), self._cast(up))

    def _check_tied(self, place: str, module: str) -> None:
        if place in self.sites.tied:
            raise _refused(
                f"the adapter {self.spec.name!r} changes {module}, whose weight the model's head shares; "
                "that is not supported"
            )

    def _saved(self) -> list[tuple[str, PartWeights | TableWeights]]:
        """Whole weights that replace the weights of modules (`modules_to_save`)."""
        found: list[tuple[str, PartWeights | TableWeights]] = []
        modules = dict.fromkeys(name.rpartition(".")[0] for name in self.spec.saved)
        self._check_all_saved(self.places[module] for module in modules if module in self.places)
        for module in modules:
            if (place := self.places.get(module)) is None:
                continue
            kinds = {name.rpartition(".")[2] for name in self.spec.saved if name.rpartition(".")[0] == module}
            if not {"weight"} <= kinds <= {"weight", "bias"}:
                raise _refused(
                    f"the adapter {self.spec.name!r} replaces {', '.join(sorted(kinds))} of {module}; "
                    "it has to be weight, or weight and bias"
                )
            weight = self.tensors[f"{module}.weight"]
            if place in self.sites.tables:
                rows = self._with_rows(TableWeights(), place, module, torch.arange(len(weight)), weight)
                found.append((place, rows))
            else:
                rows_of_site = self._rows(place)
                found.append((rows_of_site.site, self._whole(module, rows_of_site, weight)))
        return found

    def _check_all_saved(self, places: Iterable[str]) -> None:
        """Refuse a file that lacks modules of the model that `modules_to_save` names."""
        found = {self.sites.aliases[place].site if place in self.sites.aliases else place for place in places}
        for site in (*self.sites.layers, *self.sites.tables):
            if site not in found and is_saved(f"{site}.weight", self.spec.modules_to_save):
                raise _refused(
                    f"the adapter {self.spec.name!r} has no tensors of {site}, which modules_to_save names"
                )

    def _whole(self, module: str, rows: SiteRows, weight: Tensor) -> PartWeights:
        layer, number = self.sites.layers[rows.site]
        share = layer.shares[number]
        shape = (rows.end - rows.begin, share.inputs)
        bias = self.tensors.get(f"{module}.bias")
        weight = weight.t() if layer.is_transposed else weight
        if weight.shape != shape or (bias is not None and bias.shape != shape[:1]):
            raise self._mismatch(module, " × ".join(map(str, weight.shape)), " × ".join(map(str, shape)))
        if layer.has_bias != (bias is not None):
            raise self._mismatch(module, "a bias" if bias is not None else "no bias", "the other")
        if len(layer.ends) > 1 or shape[0] < share.outputs:
            raise _refused(
                f"the adapter {self.spec.name!r} replaces the whole weight of {module}, which the model "
                "fuses with others; that is not supported"
            )
        own = share.rows(0, share.outputs).of_asked
        weight = self._cast(weight[own, slice(*share.own_inputs)])
        bias = self._cast(bias[own]) if bias is not None and share.has_bias else None
        missing = layer.part_size(number) - len(weight)  # padding rows after the vocabulary
        if missing:
            weight = F.pad(weight, (0, 0, 0, missing))
            bias = None if bias is None else F.pad(bias, (0, missing))
        return PartWeights(weight=weight, bias=bias)

    def _with_rows(
        self, before: TableWeights, place: str, module: str, indices: Tensor, rows: Tensor
    ) -> TableWeights:
        table = self.sites.tables.get(place)
        if table is None or rows.shape[1:] != (table.width,) or int(indices.max()) >= table.rows:
            shape = "no table" if table is None else f"{table.rows} × {table.width}"
            raise self._mismatch(module, " × ".join(map(str, rows.shape)), shape)
        self._check_tied(place, module)
        return before._replace(indices=indices.long(), rows=self._cast(rows))

    def _cast(self, tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return tensor.to(self.dtype).contiguous()

    def _mismatch(self, module: str, found: str, wanted: str) -> ModelLoadError:
        base = f"; it was made for {self.spec.base_model}" if self.spec.base_model else ""
        return _refused(
            f"the adapter {self.spec.name!r} does not fit this model: {module} has {found} instead of "
            f"{wanted}{base}"
        )


def _num_rows(part: PartWeights) -> int:
    assert part.up is not None
    return len(part.up)


def _refused(message: str) -> ModelLoadError:
    return ModelLoadError(message, param="lora_path")
