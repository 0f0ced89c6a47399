"""Small checkpoints of tensors in several formats."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
EXPERTS, OUTPUTS, INPUTS = 3, 136, 256  # a weight has 2 × 2 blocks


def write(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def write_shards(folder: Path, shards: list[dict[str, Tensor]]) -> Path:
    names = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write(folder, tensors, file)
        names |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    experts = {}
    for number in range(EXPERTS):
        for part in ("gate", "up"):
            name = f"experts.{number}.{part}_proj.weight"
            experts[name] = draw(OUTPUTS, INPUTS).to(FP8)
            experts[f"{name}_scale_inv"] = draw(2, 2).abs().bfloat16()
            experts[name.replace("experts", "plain")] = draw(OUTPUTS, INPUTS).bfloat16()
    return experts | {
        "q": draw(6, 50),
        "k": draw(2, 50).bfloat16(),
        "v": draw(3, 50).half(),
        "one": draw(1)[0],
        "none": draw(0, 50),
        "fp8": draw(4, 4).to(FP8),
        "ids": torch.arange(7),
    }
