"""Small decoders for CUDA tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import wordpiece_tokenizer, wordpiece_vocabulary, write_json

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "vocab_size": len(wordpiece_vocabulary()),
    "max_position_embeddings": 512,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6},
    "llama3": {
        "architectures": ["LlamaModel"],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"architectures": ["MistralModel"], "sliding_window": 20},
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.6,
        },
    },
    "eurobert": {"architectures": ["EuroBertModel"]},
    "pplx-embed": {"architectures": ["PPLXQwen3Model"]},
    "gritlm": {"architectures": ["GritLM"], "sliding_window": 20},
    "gemma3": {"architectures": ["Gemma3TextModel"], "sliding_window": 20, "layer_types": MIXED},
    "embeddinggemma": {
        "architectures": ["Gemma3TextModel"],
        "sliding_window": 20,
        "layer_types": MIXED,
        "use_bidirectional_attention": True,
    },
}


def tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Seeded tensors of a decoder under their usual names."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    gemma = config["architectures"][0].startswith("Gemma")
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config["vocab_size"], hidden), "norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        parts: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        if gemma:
            parts |= {"pre_feedforward_layernorm": (hidden,), "post_feedforward_layernorm": (hidden,)}
        if gemma or "Qwen3" in config["architectures"][0]:
            parts |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    generator, made = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            made[f"{name}.weight"] = 0.3 * noise + (0 if gemma else 1)
        else:
            made[f"{name}.weight"] = noise * (1 if name == "embed_tokens" else 0.8 * shape[1] ** -0.5)
    return made


def write(folder: Path, name: str) -> Path:
    config = SIZES | MODELS[name]
    write_json(folder / "config.json", config)
    save_file(tensors(config), folder / "model.safetensors")
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def make_rows() -> list[list[int]]:
    draw = np.random.default_rng(7)
    return [
        draw.integers(5, SIZES["vocab_size"], n).tolist() for n in (1, 2, 9, 20, 21, 33, 33, 64, 129, 300)
    ]


def cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())
