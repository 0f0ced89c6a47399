"""Small checkpoints with LoRA adapters, and the same checkpoints with each adapter merged by PEFT."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from tests.checkpoints import write_bert, write_cross_encoder
from tests.e2e.llama import write_llama
from tests.parity.lora import write_adapter

TEXTS = ["water finds its level", "the capital of france", "a river runs"]


@dataclass(frozen=True)
class Adapted:
    """A checkpoint, its adapters by name, and the folders in which each is merged into the weights."""

    base: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]

    def modules(self, *names: str) -> dict[str, str]:
        return {name: str(self.adapters[name]) for name in names}


def adapted_embedder(folder: Path, *names: str) -> Adapted:
    write_bert(folder / "base")
    return _adapted(folder, transformers.BertModel.from_pretrained(folder / "base"), names)


def adapted_reranker(folder: Path, *names: str) -> Adapted:
    """A cross-encoder whose adapters have their own classifier."""
    write_cross_encoder(folder / "base")
    base = transformers.BertForSequenceClassification.from_pretrained(folder / "base")
    targets = ["query", "value", "dense"]
    return _adapted(folder, base, names, target_modules=targets, modules_to_save=["classifier"])


def adapted_llama(folder: Path, *names: str) -> Adapted:
    """A decoder that generates."""
    write_llama(folder / "base")
    base = transformers.LlamaForCausalLM.from_pretrained(folder / "base")
    return _adapted(folder, base, names)


def _adapted(folder: Path, base: nn.Module, names: tuple[str, ...], **options: Any) -> Adapted:
    made = Adapted(folder / "base", {}, {})
    for seed, name in enumerate(names):
        add_adapter(made, base, folder, name, seed, **options)
    return made


def add_adapter(made: Adapted, base: nn.Module, folder: Path, name: str, seed: int, **options: Any) -> None:
    path, merged = folder / "adapters" / name, folder / "merged" / name
    model: Any = write_adapter(base, path, seed, **options)
    shutil.copytree(made.base, merged)
    model.merge_and_unload().save_pretrained(str(merged))
    made.adapters[name], made.merged[name] = path, merged
