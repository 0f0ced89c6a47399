"""A small decoder that runs with chunked prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from penstock import Engine
from tests.checkpoints import wordpiece_tokenizer, wordpiece_vocabulary, write_json

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "vocab_size": len(wordpiece_vocabulary()),
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def write_decoder(folder: Path) -> Path:
    write_json(folder / "config.json", CONFIG)
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def rows(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(5, CONFIG["vocab_size"], n).tolist() for n in lengths]


def engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", load_format="dummy", **options)


def chunked(folder: Path, **options: Any) -> Engine:
    limits = {"max_num_batched_tokens": 48, "long_prefill_token_threshold": 13}
    return engine(folder, enable_chunked_prefill=True, **(limits | options))


def check_no_memory_is_held(used: Engine) -> None:
    core = used.local.engine.core
    assert core.scheduler.chunking is not None
    pool = core.scheduler.chunking.pool
    pool.check()
    assert pool.available == pool.num_blocks
    assert core.scheduler.queue.num_tokens == core.scheduler.queue.num_rows == 0


LENGTHS = [1, 2, 12, 13, 14, 26, 27, 48, 49, 100, 200, 3, 13]
