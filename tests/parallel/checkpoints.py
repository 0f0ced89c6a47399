"""Seeded checkpoints of any family, written without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.layers.build import LayerBuilder
from penstock.models.registry import build_model
from tests.checkpoints import wordpiece_tokenizer, wordpiece_vocabulary, write_json, write_modules
from tests.parallel.threads import NamedSource

VOCABULARY = len(wordpiece_vocabulary())
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
QWEN3 = SIZES | {"architectures": ["Qwen3Model"], "model_type": "qwen3"}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
RERANKER = SIZES | {
    "architectures": ["Qwen3ForSequenceClassification"],
    "model_type": "qwen3",
    "id2label": {"0": "score"},
}
EXPERTS = SIZES | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}


class _Recorded(NamedSource):
    """A source that records every tensor that a model reads."""

    def __init__(self, without: Sequence[str]) -> None:
        super().__init__(without)
        self.tensors: dict[str, Tensor] = {}

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = super().read(name, shape)
        if len(shape) == 2 and "embed" not in name:  # keep the scale of activations
            tensor = tensor / self.scale / shape[1] ** 0.5
        self.tensors[name] = tensor
        return tensor


def write_checkpoint(
    folder: Path, config: dict[str, Any], *, pooling: str | None = None, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a model folder; with `pooling`, such as "lasttoken", the folder of an embedder."""
    architecture: str = config["architectures"][0]
    generates = architecture.endswith("ForCausalLM")
    source = _Recorded(("lm_head",) if config.get("tie_word_embeddings", not generates) else ())
    with torch.inference_mode():
        build_model(architecture, config, LayerBuilder(source), generates=generates)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in source.tensors.items()},
        folder / "model.safetensors",
    )
    write_json(folder / "config.json", config)
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    if pooling is not None:
        write_modules(folder, [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")])
        sizes = {"word_embedding_dimension": config["hidden_size"], f"pooling_mode_{pooling}": True}
        write_json(folder / "1_Pooling/config.json", sizes)
    return folder
