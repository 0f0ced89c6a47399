"""Small seeded decoder rerankers in their published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import processors

from tests.parity.decoders import change_config, randomise
from tests.parity.reference import byte_level_bpe

LIMIT = 512
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": LIMIT,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
LONG = 4096
QWEN3 = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}


def write(folder: Path, name: str, *, seed: int = 0, bos: bool = False, **settings: Any) -> Path:
    tokenizer = byte_level_bpe()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|embed_token|>", "<|rerank_token|>"])
    tokenizer.add_tokens(["<think>", "</think>", "yes", "no", "Yes"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A" if bos else "$A", special_tokens=[("<s>", 0)]
    )
    kind = getattr(transformers, name)
    model = kind(
        kind.config_class(**SIZES | {"vocab_size": tokenizer.get_vocab_size() + 3} | settings)
    ).eval()
    randomise(model, seed)
    model.get_input_embeddings().weight.data *= 0.3  # keeps the scores of tied models far from 0 and 1
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=LIMIT,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
    ).save_pretrained(folder)
    return folder


def write_listwise(folder: Path) -> Path:
    write(folder, "Qwen3ForCausalLM", max_position_embeddings=LONG)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(3)
    for name, shape in {"projector.0.weight": (24, 48), "projector.2.weight": (512, 24)}.items():
        tensors[name] = torch.randn(shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, lambda config: config | {"architectures": ["JinaForRanking"]})
    change_tokenizer = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": LONG}
    (folder / "tokenizer_config.json").write_text(json.dumps(change_tokenizer))
    return folder
