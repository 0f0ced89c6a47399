"""LoRA adapters for the small models, written without PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.runner.small_models import SIZES


def write(
    folder: Path, seed: int, rank: int = 2, module: str = "encoder.layer.0.attention.self.query"
) -> str:
    draw = torch.Generator().manual_seed(seed)
    folder.mkdir()
    size = SIZES["hidden_size"]
    shapes = {"A": (rank, size), "B": (size, rank)}
    tensors = {
        f"base_model.model.{module}.lora_{name}.weight": torch.randn(shape, generator=draw)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["query"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)
