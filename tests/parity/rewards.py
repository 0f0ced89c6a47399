"""Small reward models in their published layout."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.decoders import FAMILIES, change_config


def write_reward_model(folder: Path, kind: str, labels: int, family: str = "qwen2") -> dict[str, Tensor]:
    """Write a backbone with the two layers of a reward head; returns the head's tensors."""
    FAMILIES[family].write(folder, vocab_size=408)
    file = folder / "model.safetensors"
    tensors = {f"model.{name}": tensor for name, tensor in load_file(file).items()}
    generator = torch.Generator().manual_seed(3)
    hidden = 48
    head = {
        "score.0.weight": torch.randn((hidden, hidden), generator=generator),
        "score.0.bias": torch.randn(hidden, generator=generator),
        "score.2.weight": torch.randn((labels, hidden), generator=generator),
        "score.2.bias": torch.randn(labels, generator=generator),
    }
    save_file(tensors | head, file, metadata={"format": "pt"})
    change_config(folder, lambda config: config | {"architectures": [kind]})
    return head
