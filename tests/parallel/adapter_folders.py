"""LoRA adapters for tensor-parallel models, written without PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.checkpoint.adapters import LoraSpec, read_lora
from penstock.layers.build import LayerBuilder
from penstock.layers.lora import AdapterSites
from penstock.models.registry import build_model
from tests.checkpoints import write_json
from tests.parallel.threads import NamedSource


def sites_of(config: dict[str, Any]) -> AdapterSites:
    """The layers of a seeded checkpoint that an adapter can change."""
    architecture: str = config["architectures"][0]
    builder = LayerBuilder(NamedSource(("lm_head",) if config.get("tie_word_embeddings") else ()))
    builder.adapters = AdapterSites(1, 1)
    with torch.inference_mode():
        build_model(architecture, config, builder, generates=architecture.endswith("ForCausalLM"))
    return builder.adapters


def write_adapter(folder: Path, sites: AdapterSites, *, rank: int, use_dora: bool, seed: int) -> LoraSpec:
    """Write an adapter for every layer, and for every table that can have one."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return 0.1 * torch.randn(shape, generator=draw)

    tensors = {}
    for name, (layer, part) in sites.layers.items():
        share = layer.shares[part]
        tensors[f"{name}.lora_A.weight"] = noise(rank, share.inputs)
        tensors[f"{name}.lora_B.weight"] = noise(share.outputs, rank)
        if use_dora:
            tensors[f"{name}.lora_magnitude_vector"] = 1 + noise(share.outputs)
    for name, table in sites.tables.items():
        if not use_dora and name not in sites.tied:
            tensors[f"{name}.lora_embedding_A"] = noise(rank, table.rows)
            tensors[f"{name}.lora_embedding_B"] = noise(table.width, rank)
    return save_adapter(folder, tensors, r=rank, use_dora=use_dora)


def save_adapter(folder: Path, tensors: dict[str, Tensor], **options: Any) -> LoraSpec:
    folder.mkdir()
    save_file(
        {f"base_model.model.{name}": value for name, value in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    targets = sorted({name.split(".lora_")[0] for name in tensors if ".lora_" in name})
    config = {"peft_type": "LORA", "lora_alpha": 4, "target_modules": targets} | options
    write_json(folder / "adapter_config.json", config)
    return read_lora(folder, folder.name)
