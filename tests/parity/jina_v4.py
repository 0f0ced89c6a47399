"""A small seeded jina-embeddings-v4 in its published layout, and its published forward pass in plain
PyTorch."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.parity.qwen_vl import HIDDEN, VISION_END, VISION_START, as_published, make_model, write_model
from tests.parity.reference import Vectors, randomise

TASKS = ("retrieval", "text-matching", "code")
DIM, RANK, ALPHA = 20, 4, 6
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PROJECTIONS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
TARGETS = (
    "(.*(model).*(down_proj|gate_proj|up_proj|k_proj|q_proj|v_proj|o_proj).*$"
    "|.*(single_vector_projector|multi_vector_projector).*$)"
)


class JinaV4:
    """The files, and the steps of the model's code: LoRA adapters, the mean over a text or over an image with
    its marker tokens, and a projection of all tokens, which has adapters too."""

    def __init__(self, folder: Path) -> None:
        self.base = make_model("qwen2_5_vl")
        self.projector = torch.nn.Linear(HIDDEN, DIM)
        randomise(self.projector, 8)
        write_model(folder, self.base)
        config = json.loads((folder / "config.json").read_text()) | {
            "architectures": ["JinaEmbeddingsV4Model"],
            "task_names": list(TASKS),
            "multi_vector_projector_dim": DIM,
            "single_vector_pool_strategy": "mean",
            "matryoshka_dims": [8, 16, 48],
            "truncate_dim": None,
        }
        renamed = {"model.language_model.": "model.", "model.visual.": "visual."}
        as_published(folder, renamed, config)
        extra = {f"multi_vector_projector.{key}": value for key, value in self.projector.state_dict().items()}
        save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors")
        self.pairs = self._write_adapters(folder / "adapters")

    def _write_adapters(self, folder: Path) -> dict[str, torch.Tensor]:
        draw, tensors = torch.Generator().manual_seed(5), {}
        modules = {
            f"model.language_model.layers.{number}.{name}": layer.get_submodule(name)
            for number, layer in enumerate(self.base.model.language_model.layers)
            for name in PROJECTIONS
        } | {"multi_vector_projector": self.projector}
        for module, linear in modules.items():
            for task in TASKS:
                shapes = {"A": (RANK, linear.in_features), "B": (linear.out_features, RANK)}
                for part, shape in shapes.items():
                    name = f"base_model.model.{module}.lora_{part}.{task}.weight"
                    tensors[name] = 0.2 * torch.randn(shape, generator=draw)
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        settings = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": TARGETS,
            "exclude_modules": ".*visual.*",
            "init_lora_weights": "gaussian",
            "lora_dropout": 0.1,
            "base_model_name_or_path": "jinaai/jina-embeddings-v4",
        }
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        return tensors

    def model(self, task: str) -> tuple[Any, torch.nn.Linear]:
        """The backbone and the projection with a task's adapter merged into their weights."""
        base, projector = copy.deepcopy(self.base), copy.deepcopy(self.projector)
        for name, up in self.pairs.items():
            module, _, end = name.removeprefix("base_model.model.").rpartition(".lora_B.")
            if end != f"{task}.weight":
                continue
            down = self.pairs[name.replace(".lora_B.", ".lora_A.")]
            linear = projector if module == "multi_vector_projector" else base.get_submodule(module)
            linear.weight.data += ALPHA / RANK * up @ down
        return base, projector


def single_vector(states: Vectors, ids: list[int]) -> Vectors:
    """The normalised mean over a text, or over an image and its two marker tokens."""
    if VISION_START in ids:
        states = states[ids.index(VISION_START) : ids.index(VISION_END) + 1]
    mean: Vectors = states.mean(axis=0)
    return mean / np.linalg.norm(mean)


def token_vectors(states: Vectors, projector: torch.nn.Linear) -> Vectors:
    with torch.inference_mode():
        vectors = projector(torch.from_numpy(states))
        found: Vectors = torch.nn.functional.normalize(vectors, dim=-1).numpy()
    return found
