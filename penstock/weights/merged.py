"""Merges a PEFT adapter into a checkpoint's weights, tensor by tensor, as they are read.

Sums are computed in fp32: W + scale · B A. Tensors that the adapter replaces are read from its file. Each
module of the adapter must be in the checkpoint, or the adapter must have all weights of the module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.checkpoint.adapters import (
    LACKING,
    LoraSpec,
    LoraTarget,
    match_modules,
    named_modules,
    without_wrappers,
)
from penstock.checkpoint.files import first_names
from penstock.errors import ModelLoadError
from penstock.weights.adapters import low_rank_pair, read_lora_file
from penstock.weights.stream import WeightSource

log = logging.getLogger("penstock.load")


class PeftMergedSource(WeightSource):
    """Presents a checkpoint and one adapter as a plain checkpoint."""

    def __init__(self, inner: WeightSource, spec: LoraSpec) -> None:
        super().__init__(inner.dtype, inner.device)
        self._inner = inner
        self._spec = spec
        self._tensors = read_lora_file(spec)
        self._modules = self._matched()  # module name in the checkpoint → module name in the adapter
        saved: dict[str, str] = {}  # name in the checkpoint → name of the adapter's replacement
        for name in spec.saved:
            module, _, kind = name.rpartition(".")
            place = next((mine for mine, its in self._modules.items() if its == module), module)
            saved[f"{place}.{kind}"] = name
        self._saved = saved
        self._new = {without_wrappers(name): name for name in saved if not inner.has(name)}
        self._left = {*spec.targets, *spec.tokens, *spec.saved}
        self._unchanged: list[str] = []  # modules that were read and that the adapter does not change

    def _matched(self) -> dict[str, str]:
        stored = dict.fromkeys(name.rpartition(".")[0] for name in self._inner.names())
        found = match_modules(self._spec.modules, stored)
        places = {place: module for module, place in found.items()}
        if len(places) < len(found):
            twice = sorted(module for module, place in found.items() if places[place] != module)
            raise self._refused(f"names modules of its base model twice: {first_names(twice)}")
        return places

    def names(self) -> Iterable[str]:
        return {**dict.fromkeys(self._inner.names()), **self._saved}

    def has(self, name: str) -> bool:
        return self._inner.has(name) or self._saved_name(name) is not None

    def check(self, name: str, shape: Sequence[int]) -> None:
        if (saved := self._saved_name(name)) is None:
            self._inner.check(name, shape)
        elif tuple(self._tensors[saved].shape) != tuple(shape):
            raise self._refused(
                f"has {saved} of shape {list(self._tensors[saved].shape)}, but config.json asks for "
                f"{list(shape)}"
            )

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        if (saved := self._saved_name(name)) is not None:
            return tuple(self._tensors[saved].shape)
        return self._inner.shape_of(name)

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        module, _, kind = name.rpartition(".")
        if (saved := self._saved_name(name)) is not None:
            self.check(name, shape)
            self._left.discard(saved)
            if self._inner.has(name):
                self._inner.skip(name, shape)
            return self._tensors[saved].to(self.device)
        weight = self._inner.read(name, shape)
        its = self._modules.get(module)
        if kind != "weight":
            return weight
        if its is None:
            self._unchanged.append(module)
            return weight
        self._left.discard(its)
        if (target := self._spec.targets.get(its)) is not None:
            weight = self._changed(its, target, weight)
        if (rows := self._spec.tokens.get(its)) is not None:
            weight = self._with_rows(its, rows, weight)
        return weight

    def skip(self, name: str, shape: Sequence[int]) -> None:
        self.read(name, shape)

    def prefix_of(self, *names: str) -> str:
        for name in names:
            if found := [key[: -len(name)] for key in self._new.values() if key.endswith(name)]:
                return min(found, key=len)
        return self._inner.prefix_of(*names)

    def check_tied(self, vocabulary: int, heads: Sequence[str]) -> None:
        """Refuse an adapter that changes the word table or the head, if they share one weight. It was trained
        on separate weights, and merging would change both."""
        spec = self._spec
        changed = [
            *match_modules(spec.modules, heads),
            *(
                name
                for name, target in spec.targets.items()
                if target.is_table and target.inputs == vocabulary
            ),
            *spec.tokens,
            *(name for name, shape in spec.saved.items() if len(shape) == 2 and shape[0] == vocabulary),
        ]
        if changed:
            raise self._refused(
                f"changes {changed[0].removesuffix('.weight')}, but word table and head of this model share "
                "one weight, so that merging it would change both; serve it for a task without the head"
            )

    def check_all_read(self, ignored_tensors: Iterable[str]) -> list[str]:
        marks = tuple(ignored_tensors)
        unused = sorted(name for name in self._left if any(mark in f"{name}." for mark in marks))
        if refused := sorted(self._left.difference(unused)):
            raise self._refused(f"changes modules that this model does not have: {first_names(refused)}")
        if unused:
            log.info("%s changes parts that are not used: %s", self._spec.file, first_names(unused))
        if lacking := named_modules(self._spec, self._modules, self._unchanged):
            log.warning(LACKING, self._spec.name, first_names(lacking))
        return self._inner.check_all_read(marks)

    def close(self) -> None:
        self._inner.close()

    def _saved_name(self, name: str) -> str | None:
        """The name of the adapter's tensor that replaces this tensor."""
        return self._saved.get(self._new.get(without_wrappers(name), name))

    def _changed(self, module: str, target: LoraTarget, weight: Tensor) -> Tensor:
        wanted = (target.inputs, target.outputs) if target.is_table else (target.outputs, target.inputs)
        if tuple(weight.shape) != wanted:
            raise self._refused(
                f"changes {module} by a matrix of {' × '.join(map(str, wanted))}; the model's has "
                f"{' × '.join(map(str, weight.shape))}"
            )
        if target.has_base:
            stored = self._tensors[f"{module}.base_layer.weight"].to(weight)
            if not torch.equal(stored, weight):
                raise self._refused(f"has a weight of {module} that differs from the base model's")
        merged = weight.float() + self._change(module, target, weight.device)
        if target.is_dora:
            lengths = self._tensors.get(f"{module}.lora_magnitude_vector")
            if lengths is None:
                lengths = self._tensors[f"{module}.lora_magnitude_vector.weight"]
            merged *= (lengths.float().to(weight.device) / merged.norm(dim=1))[:, None]
        return merged

    def _change(self, module: str, target: LoraTarget, device: torch.device) -> Tensor:
        if not target.is_table:
            down, up = low_rank_pair(self._spec, module, self._tensors)
            return up.to(device) @ down.to(device)
        up = self._tensors[f"{module}.lora_embedding_B"].float().to(device) * target.scale
        return (up @ self._tensors[f"{module}.lora_embedding_A"].float().to(device)).t()

    def _with_rows(self, module: str, rows: Sequence[int], weight: Tensor) -> Tensor:
        new = self._tensors[f"{module}.token_adapter.trainable_tokens_delta"]
        if max(rows, default=0) >= len(weight) or new.shape[1:] != weight.shape[1:]:
            raise self._refused(
                f"replaces rows of {module} by a tensor of shape {list(new.shape)}; the model's has shape "
                f"{list(weight.shape)}"
            )
        out = weight.float().clone()
        out[torch.tensor(rows, device=out.device)] = new.float().to(out.device)
        return out

    def _refused(self, what: str) -> ModelLoadError:
        base = f"; it was made for {self._spec.base_model}" if self._spec.base_model else ""
        return ModelLoadError(f"the adapter in {self._spec.folder} {what}{base}", param="model")
