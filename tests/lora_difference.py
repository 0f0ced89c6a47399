"""Writes the low-rank difference of two checkpoints of a model as a PEFT adapter: a real adapter without
training.

python -m tests.lora_difference BASE TUNED OUT [RANK]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_difference(base: Path, tuned: Path, out: Path, rank: int = 32) -> float:
    """Write the truncated singular value decomposition of each linear layer's difference as an adapter.

    Returns the smallest share of a layer's squared difference that the adapter keeps.
    """
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tuned))
    tensors, shares = {}, []
    for name, weight in before.items():
        if ".layer." not in name or not name.endswith(".weight") or weight.dim() != 2:
            continue
        left, values, right = torch.linalg.svd(after[name].float() - weight.float(), full_matrices=False)
        root = values[:rank].sqrt()
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = (root[:, None] * right[:rank]).contiguous()
        tensors[f"{module}.lora_B.weight"] = (left[:, :rank] * root).contiguous()
        shares.append(float((values[:rank] ** 2).sum() / (values**2).sum()))
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors")
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (out / "adapter_config.json").write_text(json.dumps(config | {"exclude_modules": ["pooler.dense"]}))
    return min(shares)


if __name__ == "__main__":
    print(write_difference(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:5])))
