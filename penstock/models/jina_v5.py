"""jina-embeddings-v5-text: Qwen3 (small) or EuroBERT (nano) with task adapters in PEFT's format.

`lora_task` (through `--hf-overrides`) merges one of them into the weights. Otherwise, each request chooses
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.adapters import adapter_names, read_lora, read_lora_options
from penstock.checkpoint.files import inside
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.layers.lora import AdapterSites
from penstock.models.adapter_files import read_adapter
from penstock.models.decoder import qwen3_shape
from penstock.models.decoder_layers import Decoder
from penstock.models.eurobert import eurobert_shape
from penstock.types import Task
from penstock.weights.adapters import ModuleWeights, PartWeights
from penstock.weights.merged import PeftMergedSource
from penstock.weights.stream import DummySource, WeightSource

_TASKS = "task_names"


def jina_embeddings_v5(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> Decoder:
    shape = qwen3_shape(config) if config["is_causal"] else eurobert_shape(config)
    folder, task = build.folder, config.get("lora_task")
    if folder is None:
        raise ModelLoadError("the adapters of jina-embeddings-v5 are in files beside its weights")
    if task is None:
        names = adapter_names(config, _TASKS)
        if not names:
            raise ModelLoadError(f"{folder / 'config.json'} has no {_TASKS}, the names of its adapters")
        if build.adapters is None:
            build.adapters = AdapterSites(len(names), 1)
        model = Decoder(build, shape)
        build.adapters.own = [_read(build.adapters, build, _folder(folder, name), name) for name in names]
        return model
    if task not in (known := list(map(str, config.get(_TASKS) or ()))):
        raise ModelLoadError(
            f"lora_task is {task!r}, which is not among the model's adapters: {', '.join(known) or 'none'}"
        )
    merged: WeightSource = build.weights
    if not isinstance(merged, DummySource):
        merged = PeftMergedSource(merged, read_lora(_folder(folder, task), task))
    own = LayerBuilder(merged, build.quantization, build.unquantized)
    own.adapters = build.adapters
    model = Decoder(own, shape)
    merged.check_all_read(model.ignored_tensors)
    return model


def _folder(folder: Path, name: str) -> Path:
    return inside(folder, f"adapters/{name}", folder / "config.json")


def _read(sites: AdapterSites, build: LayerBuilder, folder: Path, name: str) -> ModuleWeights:
    """Read one adapter. With dummy weights, which have no files, it is random too."""
    if not isinstance(build.weights, DummySource):
        spec = read_lora(folder, name)
        sites.grow(0, spec.rank)
        return read_adapter(spec, sites, build.weights.dtype)
    rank, targets = read_lora_options(folder)
    sites.grow(0, rank)
    found: ModuleWeights = {}
    for module, (layer, number) in sites.layers.items():
        if module.rpartition(".")[2] in targets:
            down = build.weights.read("lora_A", (rank, layer.in_features)).cpu()
            found[module] = PartWeights(
                down, build.weights.read("lora_B", (layer.part_size(number), rank)).cpu()
            )
    return found
