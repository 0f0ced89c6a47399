"""Embedders that are published with their own code: small seeded checkpoints in their layouts, and the steps
of that code, written with transformers' modules."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.parity.decoders import SIZES, change_config, old_form, randomise, write_tokenizer
from tests.parity.reference import Vectors

WIDTH = 80  # width of voyage's projected states
HEADS = {"head_dim": 16}


class Reference(nn.Module):
    """A model of transformers, bidirectional by default, and the layers after it."""

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


def write_published_voyage(folder: Path) -> Reference:
    """Write the published layout: config.json names Qwen3's class, and auto_map the published class."""
    reference = write_voyage(folder)
    code = {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"}
    names = {"architectures": ["Qwen3ForCausalLM"], "use_bidirectional_attention": True, "auto_map": code}
    change_config(folder, lambda config: config | names)
    return reference


def write_voyage(folder: Path) -> Reference:
    body = transformers.Qwen3Model(transformers.Qwen3Config(**SIZES | HEADS)).eval()
    reference = Voyage(body)
    randomise(reference, 0)
    body.save_pretrained(folder)
    save(folder, {f"model.{name}": value for name, value in body.state_dict().items()}, reference.linear)
    names = {"architectures": ["VoyageQwen3BidirectionalEmbedModel"], "num_labels": WIDTH}
    change_config(folder, lambda config: old_form(config) | names)
    write_tokenizer(folder)
    return reference


TASKS = {"retrieval": (4, False), "text-matching": (4, True), "clustering": (2, False)}  # rank, rsLoRA
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class JinaV5(Reference):
    """jina-embeddings-v5-text: the adapter of a task is merged into the weights that it targets."""

    def __init__(self, body: nn.Module, is_causal: bool, task: str) -> None:
        super().__init__(body, is_causal)
        self.task = task

    def apply(self, adapters: dict[str, dict[str, Tensor]]) -> None:  # type: ignore[override]
        rank, rescaled = TASKS[self.task]
        scale = 6 / (rank**0.5 if rescaled else rank)
        for name, module in self.body.named_modules():
            if isinstance(module, nn.Linear):
                parts = (adapters[self.task][f"base_model.model.{name}.lora_{x}.weight"] for x in "BA")
                module.weight.data += scale * torch.matmul(*parts)


def write_jina_v5(folder: Path, base: str, task: str = "text-matching") -> Reference:
    """Write the checkpoint; returns a reference with the adapter of `task`."""
    kind, settings = (
        (transformers.Qwen3Model, HEADS) if base == "Qwen3" else (transformers.EuroBertModel, HEADS)
    )
    body = kind(kind.config_class(**SIZES | settings)).eval()
    randomise(body, 0)
    body.save_pretrained(folder)
    names = {"architectures": ["JinaEmbeddingsV5Model"], "model_type": "jina_embeddings_v5"}
    tasks = {"task_names": list(TASKS), "tie_word_embeddings": False}
    change_config(folder, lambda config: old_form(config) | names | tasks)
    write_tokenizer(folder)
    write_modules(folder, ("custom_st.Transformer", "", None))
    prompts = {"query": "Query: ", "document": "Document: "}
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "document"}))
    adapters = {name: write_adapter(folder / "adapters" / name, name, body) for name in TASKS}
    reference = JinaV5(body, base == "Qwen3", task)
    reference.apply(adapters)
    return reference


def write_adapter(folder: Path, task: str, body: nn.Module) -> dict[str, Tensor]:
    """Write an adapter in PEFT's format; returns its tensors."""
    rank, rescaled = TASKS[task]
    generator = torch.Generator().manual_seed(len(task))
    tensors = {}
    for name, module in body.named_modules():
        if isinstance(module, nn.Linear):
            shapes = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
            for part, shape in shapes.items():
                values = 0.15 * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = values
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "use_rslora": rescaled, "bias": "none"}
    config |= {"target_modules": list(TARGETS), "modules_to_save": None, "use_dora": False}
    config |= {"lora_dropout": 0.1, "rank_pattern": {}, "task_type": "FEATURE_EXTRACTION"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


class NVEmbed(Reference):
    """NV-Embed: hidden states attend to latent vectors, then pass a gated feed-forward block."""

    LATENTS, HEADS, HEAD_DIM = 10, 4, 24

    def __init__(self, body: nn.Module) -> None:
        super().__init__(body)
        hidden, inner = SIZES["hidden_size"], self.HEADS * self.HEAD_DIM
        self.latents = nn.Parameter(torch.empty(self.LATENTS, hidden))
        self.norm, self.norm_context, self.norm_mlp = (nn.LayerNorm(hidden) for _ in range(3))
        self.to_q = nn.Linear(hidden, inner, bias=False)
        self.to_kv = nn.Linear(hidden, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, hidden, bias=False)
        self.first, self.second = nn.Linear(hidden, 8 * hidden), nn.Linear(4 * hidden, hidden)

    def states(self, row: list[int]) -> Tensor:
        states = super().states(row)
        key, value = self.to_kv(self.norm_context(self.latents)).chunk(2, dim=-1)
        query = self.to_q(self.norm(states))
        split = (x.view(len(x), self.HEADS, self.HEAD_DIM).transpose(0, 1) for x in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(*split).transpose(0, 1).flatten(1)
        states = self.to_out(mixed) + states
        up, gate = self.first(self.norm_mlp(states)).chunk(2, dim=-1)
        out: Tensor = self.second(up * nn.functional.gelu(gate)) + states
        return out

    def tensors(self) -> dict[str, Tensor]:
        """The tensors under their published names."""
        first, second = (f"latent_attention_model.cross_attend_blocks.{i}." for i in range(2))
        parts = {
            "embedding_model.": self.body,
            first + "norm.": self.norm,
            first + "norm_context.": self.norm_context,
            first + "fn.to_q.": self.to_q,
            first + "fn.to_kv.": self.to_kv,
            first + "fn.to_out.": self.to_out,
            second + "norm.": self.norm_mlp,
            second + "fn.net.0.": self.first,
            second + "fn.net.2.": self.second,
        }
        named = {p + name: value for p, part in parts.items() for name, value in part.state_dict().items()}
        return named | {"latent_attention_model.latents": self.latents.data}


def write_nv_embed(folder: Path) -> Reference:
    body = transformers.MistralModel(
        transformers.MistralConfig(**SIZES | HEADS | {"sliding_window": None})
    ).eval()
    reference = NVEmbed(body)
    randomise(reference, 0)
    body.save_pretrained(folder)
    save(folder, reference.tensors())
    latent = {"num_latents_value": 10, "num_cross_heads": 4, "cross_dim_head": 24, "output_normalize": True}
    latent |= {"hidden_dim": SIZES["hidden_size"], "latent_dim": SIZES["hidden_size"]}
    outer = {"architectures": ["NVEmbedModel"], "model_type": "nvembed", "add_eos": True, "mask_type": "b"}
    outer |= {"is_mask_instruction": True, "padding_side": "right", "latent_attention_config": latent}
    text = {"sliding_window": 16, "model_type": "bidir_mistral"}  # the published code ignores it in attention
    change_config(folder, lambda config: outer | {"text_config": old_form(config) | text})
    write_tokenizer(folder, "<s> $A")
    return reference


def save(folder: Path, tensors: dict[str, Tensor], linear: nn.Linear | None = None) -> None:
    if linear is not None:
        tensors = tensors | {"linear.weight": linear.weight.data}
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def write_modules(folder: Path, *modules: tuple[str, str, dict[str, Any] | None]) -> None:
    """Write modules.json. Each module has a type, a folder and a config.json."""
    rows = []
    for number, (kind, path, config) in enumerate(modules):
        rows.append({"idx": number, "name": str(number), "path": path, "type": kind})
        if config is not None:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(rows))


@dataclass(frozen=True)
class Embedder:
    write: Callable[[Path], Reference]  # writes the checkpoint; returns the reference
    reads_last: bool = False  # the vector is the last state, not the mean
    overrides: dict[str, Any] = field(default_factory=dict)  # overrides of config.json

    def pooled(self, states: list[Vectors]) -> Vectors:
        return np.stack([row[-1] if self.reads_last else row.mean(0) for row in states])


MERGED = {"lora_task": "text-matching"}
EMBEDDERS: dict[str, Embedder] = {
    "voyage": Embedder(write_voyage),
    "voyage-published": Embedder(write_published_voyage),
    "nv-embed": Embedder(write_nv_embed),
    "jina-v5-small": Embedder(partial(write_jina_v5, base="Qwen3"), reads_last=True, overrides=MERGED),
    "jina-v5-nano": Embedder(partial(write_jina_v5, base="EuroBert"), reads_last=True, overrides=MERGED),
}
