"""Seeded checkpoints in block-wise fp8, and the same checkpoints with dequantised weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from penstock.kernels.blockwise import dequantize_blocks, quantize_blocks
from tests.parity.decoders import MOE, Family

STORED: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head", "model.layers.2.self_attn.o_proj"],
}
# Widths that are not multiples of a block. The blocks of queries, keys and values are not aligned when fused.
WIDE = {"hidden_size": 160, "intermediate_size": 200, "num_attention_heads": 6, "head_dim": 32}
MODELS: dict[str, Family] = {
    "qwen3-moe": Family("Qwen3MoeForCausalLM", MOE | WIDE | {"moe_intermediate_size": 136}),
    "qwen3": Family("Qwen3ForCausalLM", WIDE | {"attention_bias": True}, old=True),
    "llama": Family("LlamaForCausalLM", WIDE | {"head_dim": 128, "num_attention_heads": 2}),
}
_PROJECTION = re.compile(r"layers\.\d+\..*_proj\.weight$")


def write_blocks(name: str, root: Path) -> tuple[Path, Path]:
    """Write both checkpoints. Returns the fp8 folder, and the folder with dequantised weights."""
    stored, plain = root / "stored", root / "plain"
    for folder in (stored, plain):
        MODELS[name].write(folder)
    tensors = load_file(stored / "model.safetensors")
    said = dict(tensors)
    for tensor in [key for key in tensors if _PROJECTION.search(key)]:
        if tensor.removesuffix(".weight") in STORED["modules_to_not_convert"]:
            continue
        blocks = quantize_blocks(tensors[tensor])
        tensors[tensor], tensors[f"{tensor}_scale_inv"] = blocks
        said[tensor] = dequantize_blocks(blocks)
    for folder, held in ((stored, tensors), (plain, said)):
        save_file(
            {key: held[key].contiguous() for key in held},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": STORED}))
    return stored, plain
