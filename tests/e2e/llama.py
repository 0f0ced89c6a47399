"""A small Llama with a tokenizer and a chat template, for servers that generate."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from penstock.inputs.tokenizer import Tokenizer
from tests.text_models import write_text_model


def write_llama(folder: Path) -> Path:
    write_text_model(folder)
    tokenizer = Tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.max_token_id + 4,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.token_id("<|im_end|>"),
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
