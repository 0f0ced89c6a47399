"""jina-embeddings-v4: Qwen2.5-VL with adapters for three tasks and a projection of token vectors.

PEFT saved the adapters of all tasks in one file, adapters/adapter_model.safetensors, with the task in the
name of each matrix: `….lora_A.retrieval.weight`. They change the decoder and the projection, never the vision
tower. `lora_task` (through `--hf-overrides`) merges one of them. Otherwise, each request chooses one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.checkpoint.adapters import MAX_RANK, adapter_names, read_lora
from penstock.checkpoint.dense import MAX_FEATURES
from penstock.checkpoint.files import positive_integer, read_json
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.layers.head import TaskHead
from penstock.layers.lora import AdapterSites
from penstock.models.adapter_files import read_adapter
from penstock.models.options import require
from penstock.models.qwen_vl import QwenVL, qwen2_5_vl
from penstock.types import Task
from penstock.weights.adapters import ModuleWeights, PartWeights
from penstock.weights.merged import PeftMergedSource
from penstock.weights.stream import DummySource, WeightSource

_TASKS, _DIM = "task_names", "multi_vector_projector_dim"
_PROJECTION = "multi_vector_projector"


def jina_embeddings_v4(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> QwenVL:
    require(config, single_vector_pool_strategy="mean")
    if config.get("truncate_dim") is not None:
        raise ModelLoadError(
            f"config.json has truncate_dim = {config['truncate_dim']!r}, which is not supported; ask for "
            "dimensions in requests"
        )
    if build.folder is None:
        raise ModelLoadError("the adapters of jina-embeddings-v4 are in files beside its weights")
    folder, tasks = build.folder / "adapters", tuple(map(str, config.get(_TASKS) or ()))
    if not tasks:
        raise ModelLoadError(f"{build.folder / 'config.json'} has no {_TASKS}, the names of its adapters")
    if (task := config.get("lora_task")) is None:
        names = adapter_names(config, _TASKS)
        if build.adapters is None:
            build.adapters = AdapterSites(len(names), 1)
        model = _model(build, config, head)
        build.adapters.own = [_read(build.adapters, build, folder, name, tasks) for name in names]
        return model
    if task not in tasks:
        raise ModelLoadError(
            f"lora_task is {task!r}, which is not among the model's adapters: {', '.join(tasks)}"
        )
    merged: WeightSource = build.weights
    if not isinstance(merged, DummySource):
        merged = PeftMergedSource(merged, read_lora(folder, task, tasks))
    own = LayerBuilder(merged, build.quantization, build.unquantized)
    own.adapters, own.folder = build.adapters, build.folder
    model = _model(own, config, head)
    merged.check_all_read(model.ignored_tensors)
    return model


def _model(build: LayerBuilder, config: Mapping[str, Any], head: Task | None) -> QwenVL:
    """The decoder with a projection to token vectors, which is small and therefore never quantised."""
    model = qwen2_5_vl(build, config, head)
    dim = positive_integer(config, _DIM, file=Path("config.json"), high=MAX_FEATURES)
    plain = LayerBuilder(build.weights)
    plain.adapters = build.adapters
    prefix = build.weights.prefix_of(f"{_PROJECTION}.weight")
    project = plain.linear(prefix + _PROJECTION, model.hidden_size, dim)
    model.heads[Task.TOKEN_EMBED] = TaskHead("all", project, dim)
    return model


def _read(
    sites: AdapterSites, build: LayerBuilder, folder: Path, name: str, tasks: Sequence[str]
) -> ModuleWeights:
    """Read one adapter. With dummy weights, which have no files, it is random too."""
    if not isinstance(build.weights, DummySource):
        spec = read_lora(folder, name, tasks)
        sites.grow(0, spec.rank)
        return read_adapter(spec, sites, build.weights.dtype)
    file = folder / "adapter_config.json"
    rank = positive_integer(read_json(file), "r", file=file, high=MAX_RANK)
    sites.grow(0, rank)
    return {
        module: PartWeights(
            build.weights.read("lora_A", (rank, layer.in_features)).cpu(),
            build.weights.read("lora_B", (layer.part_size(number), rank)).cpu(),
        )
        for module, (layer, number) in sites.layers.items()
    }
