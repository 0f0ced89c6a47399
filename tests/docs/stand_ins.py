"""Small seeded models that replace published ones when an example runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.checkpoints import (
    BERT_CONFIG,
    bert_tensors,
    write_bert,
    write_cross_encoder,
    write_json,
    write_m3,
    write_splade,
)
from tests.parity.dual import CLIP
from tests.text_models import write_text_model

WIDTH = BERT_CONFIG["hidden_size"]


def with_prompts(folder: Path) -> Path:
    write_bert(folder)
    prompts = {"query": "query: ", "document": "passage: "}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})
    return folder


def colbert(folder: Path) -> Path:
    config = BERT_CONFIG | {"architectures": ["HF_ColBERT"], "dim": 16}
    tensors = _prefixed(config)
    tensors["linear.weight"] = torch.randn((16, WIDTH), generator=torch.Generator().manual_seed(2))
    write_bert(folder, tensors=tensors, config=config, modules=False)
    write_json(folder / "special_tokens_map.json", {"mask_token": "[MASK]", "unk_token": "[UNK]"})
    markers = {"query_maxlen": 32, "query_token_id": "query", "doc_token_id": "document"}
    write_json(folder / "artifact.metadata", markers)
    return folder


def tagger(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(1)
    tensors = _prefixed(BERT_CONFIG)
    tensors["classifier.weight"] = torch.randn(3, WIDTH, generator=generator)
    tensors["classifier.bias"] = torch.zeros(3)
    labels = {"0": "O", "1": "B-PER", "2": "I-PER"}
    config = {"architectures": ["BertForTokenClassification"], "id2label": labels}
    return write_bert(folder, tensors=tensors, config=config, modules=False)


def classifier(folder: Path) -> Path:
    return write_cross_encoder(folder, labels=4)


def nli(folder: Path) -> Path:
    names = {"0": "entailment", "1": "neutral", "2": "contradiction"}
    return write_cross_encoder(folder, labels=3, id2label=names)


def llama(folder: Path) -> Path:
    """A decoder with a chat template, written without transformers, because its import takes seconds."""
    write_text_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size, inner, vocabulary = 64, 112, tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    shapes = {"model.embed_tokens": (vocabulary, size), "lm_head": (vocabulary, size), "model.norm": (size,)}
    for layer in (f"model.layers.{number}" for number in range(2)):
        shapes |= {f"{layer}.self_attn.{name}_proj": (size, size) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (size // 2, size) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, size) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (size, inner)}
        shapes |= {f"{layer}.{name}_layernorm": (size,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 0.1
        for name, shape in shapes.items()
    }
    write_json(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _prefixed(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"bert.{name}": tensor for name, tensor in bert_tensors(config).items()}


def clip(folder: Path) -> Path:
    CLIP.write(folder)
    return folder


STAND_INS: dict[str, Callable[[Path], Path]] = {
    "clip": clip,
    "nli": nli,
    "prompts": with_prompts,
    "cross-encoder": write_cross_encoder,
    "colbert": colbert,
    "splade": write_splade,
    "m3": write_m3,
    "classifier": classifier,
    "tagger": tagger,
    "llama": llama,
}
