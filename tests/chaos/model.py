"""A checkpoint that supports every kind of request on one engine, and has a poisoned token."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import write_json, write_modules
from tests.e2e.llama import write_llama

POISON = "tool call"  # one token; no text of the load contains it


def write_poisoned_llama(folder: Path) -> Path:
    """Write a small Llama that embeds, scores and generates. `POISON` in a text makes values non-finite."""
    from penstock.inputs.tokenizer import Tokenizer

    write_llama(folder)
    token_id = int(Tokenizer(folder).encode([POISON], add_special_tokens=False)[0][0])
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][token_id] = torch.nan
    weights["lm_head.weight"][token_id] = 0.0  # below other tokens' logits, so that it is never generated
    save_file(weights, file, metadata={"format": "pt"})
    write_modules(folder, [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")])
    hidden_size = weights["model.norm.weight"].numel()
    pooling = {"word_embedding_dimension": hidden_size, "pooling_mode_lasttoken": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    return folder
