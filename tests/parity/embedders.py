"""Embedders whose code is published with their weights: small seeded checkpoints in their layouts, and the
steps of that code, written with the modules of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.parity.decoders import SIZES, change_config, old_form, randomise, write_tokenizer
from tests.parity.reference import Vectors

WIDTH = 80  # of voyage's projected states
QWEN3 = {"head_dim": 16}


class Reference(nn.Module):
    """A model of transformers in which every token sees every other, and what follows it."""

    def __init__(self, body: nn.Module, is_causal: bool = False) -> None:
        super().__init__()
        self.body = body
        self.is_causal = is_causal

    def states(self, row: list[int]) -> Tensor:
        mask = None
        if not self.is_causal:
            mask = torch.zeros(1, 1, len(row), len(row), dtype=next(self.parameters()).dtype)
        found: Tensor = self.body(input_ids=torch.tensor([row]), attention_mask=mask).last_hidden_state[0]
        return found

    @torch.inference_mode()
    def token_states(self, rows: list[list[int]]) -> list[Vectors]:
        return [self.states(row).float().numpy() for row in rows]


class Voyage(Reference):
    """voyage-4-nano: `linear` projects every state."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__(body)
        self.linear = nn.Linear(SIZES["hidden_size"], WIDTH, bias=False)

    def states(self, row: list[int]) -> Tensor:
        projected: Tensor = self.linear(super().states(row))
        return projected


def write_voyage(folder: Path) -> Reference:
    body = transformers.Qwen3Model(transformers.Qwen3Config(**SIZES | QWEN3)).eval()
    reference = Voyage(body)
    randomise(reference, 0)
    body.save_pretrained(folder)
    save(folder, {f"model.{name}": value for name, value in body.state_dict().items()}, reference.linear)
    names = {"architectures": ["VoyageQwen3BidirectionalEmbedModel"], "num_labels": WIDTH}
    change_config(folder, lambda config: old_form(config) | names)
    write_tokenizer(folder)
    return reference


def save(folder: Path, tensors: dict[str, Tensor], linear: nn.Linear | None = None) -> None:
    if linear is not None:
        tensors = tensors | {"linear.weight": linear.weight.data}
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def write_modules(folder: Path, *modules: tuple[str, str, dict[str, Any] | None]) -> None:
    """modules.json: each module's type, folder and config.json."""
    rows = []
    for number, (kind, path, config) in enumerate(modules):
        rows.append({"idx": number, "name": str(number), "path": path, "type": kind})
        if config is not None:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(rows))


@dataclass(frozen=True)
class Embedder:
    write: Callable[[Path], Reference]  # the checkpoint; returns the reference
    reads_last: bool = False  # the vector is the last state, not the mean
    options: dict[str, Any] = field(default_factory=dict)  # of the engine

    def pooled(self, states: list[Vectors]) -> Vectors:
        return np.stack([row[-1] if self.reads_last else row.mean(0) for row in states])


EMBEDDERS: dict[str, Embedder] = {"voyage": Embedder(write_voyage)}
