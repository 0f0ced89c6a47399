"""Model shapes, and folders with only a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from penstock.planning.shape import ModelShape
from tests.checkpoints import write_bert, write_json

BERT_BASE = ModelShape(layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, intermediate=3072)
MOE = ModelShape(
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=6144,
    is_gated=True,
    is_causal=True,
    active_experts=8,
    expert_intermediate=768,
)


def with_config(folder: Path, **config: Any) -> Path:
    """Write a folder with a configuration and no weights."""
    write_bert(folder)
    (folder / "model.safetensors").unlink()
    write_json(folder / "config.json", msgspec.json.decode((folder / "config.json").read_bytes()) | config)
    return folder
