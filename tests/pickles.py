"""Checkpoints that torch.save wrote, good and malicious."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Payload:
    """An object that creates a file when an unpickler that runs code reads it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


def write_malicious(file: Path, mark: Path, *, legacy: bool = False) -> None:
    """Write a file that would create `mark`, after tensors that look harmless."""
    values = {"weight": torch.ones(2, 2), "bias": Payload(mark)}
    torch.save(values, file, _use_new_zipfile_serialization=not legacy)


def pickle_weights(folder: Path, *, shards: int = 1, legacy: bool = False) -> dict[str, Tensor]:
    """Replace a folder's model.safetensors with pytorch_model.bin, or with shards and their index."""
    file = folder / "model.safetensors"
    tensors = dict(load_file(file))
    file.unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        return tensors
    names = {}
    for number in range(shards):
        part = dict(list(tensors.items())[number::shards])
        name = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        torch.save(part, folder / name, _use_new_zipfile_serialization=not legacy)
        names |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return tensors
