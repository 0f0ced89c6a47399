"""Seeded checkpoints of every generative family, and what transformers generates with them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock import AsyncEngine, Engine, SamplingParams
from tests.parity.decoders import (
    CAPPED,
    EXAONE4,
    GEMMA,
    GPT2,
    GPT_OSS,
    GRANITE,
    IMAGES,
    LLAMA3,
    MINISTRAL3,
    MOE,
    OLMO3,
    VOCABULARY,
    Family,
)
from tests.thinning import ALL_CASES

TOKENS = 70 if ALL_CASES else 36  # more than the attention windows and than two KV cache blocks
LENGTHS = (1, 2, 5, 16, 17, 33, 64, 90)
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", {"head_dim": 16, "rope_parameters": LLAMA3}, old=True),
    "mistral": Family("MistralForCausalLM", {"sliding_window": 16, "head_dim": 16}),
    "ministral3": Family("Ministral3ForCausalLM", MINISTRAL3),
    "qwen2": Family("Qwen2ForCausalLM", {"num_key_value_heads": 3}),
    "qwen3": Family("Qwen3ForCausalLM", {"head_dim": 12, "tie_word_embeddings": True}, old=True),
    "gemma": Family("GemmaForCausalLM", {"head_dim": 16}, old=True),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        CAPPED,
    ),
    "gemma3": Family("Gemma3ForCausalLM", GEMMA | {"attention_bias": True}, old=True),
    "phi3": Family("Phi3ForCausalLM"),
    "gpt2": Family("GPT2LMHeadModel", GPT2),
    "gpt-oss": Family("GptOssForCausalLM", GPT_OSS),
    "gemma3-tower": Family("Gemma3ForConditionalGeneration", GEMMA, nested=True, outer=IMAGES),
    "granite": Family("GraniteForCausalLM", GRANITE),
    "smollm3": Family("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}, old=True),
    "olmo2": Family("Olmo2ForCausalLM"),
    "olmo3": Family("Olmo3ForCausalLM", OLMO3),
    "exaone4": Family("Exaone4ForCausalLM", EXAONE4),
    "qwen3-moe": Family("Qwen3MoeForCausalLM", MOE),
    "gritlm": Family(
        "MistralForCausalLM", {"sliding_window": 16}, {"architectures": ["GritLM"]}, full=True, old=True
    ),
}
# Only benchmarks/parity_generation.py compares these families: other families cover their parts.
TABLE_ONLY = ("gemma3-tower", "olmo2", "olmo3", "smollm3")
TESTED = tuple(name for name in FAMILIES if name not in TABLE_ONLY)


def prompts(seed: int = 3, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(5, VOCABULARY, length).tolist() for length in lengths]


def write(name: str, folder: Path) -> Path:
    """Write a checkpoint with small word embeddings, so that the model repeats itself less: with tied
    embeddings, a token then predicts itself less often."""
    FAMILIES[name].write(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for tensor, values in tensors.items():
        if tensor.endswith(("embed_tokens.weight", "wte.weight")):
            values *= 0.05
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@cache
def reference(name: str, folder: Path) -> Any:
    kind = getattr(transformers, FAMILIES[name].model)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    limits = [module.limit for module in model.modules() if type(module).__name__ == "GptOssExperts"]
    if any(limit != GPT_OSS["swiglu_limit"] for limit in limits):
        pytest.skip(f"transformers {transformers.__version__} ignores swiglu_limit of config.json")
    return model


@torch.inference_mode()
def logits_after(name: str, folder: Path, row: list[int], new: list[int]) -> torch.Tensor:
    """The logits of transformers for each new token, [new, vocabulary]."""
    logits: torch.Tensor = reference(name, folder)(torch.tensor([row + new])).logits[0, len(row) - 1 : -1]
    return logits


def check_greedy(name: str, folder: Path, rows: list[list[int]], made: list[list[int]]) -> None:
    """Check that transformers finds each token the most likely after those before it.

    By induction this is the output of its `generate`, but it takes only one forward pass per row.
    """
    for row, new in zip(rows, made, strict=True):
        logits = logits_after(name, folder, row, new)
        chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
        assert (logits.max(dim=-1).values - chosen).max() < 1e-4


def engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", **options)


def check_nothing_is_held(used: Engine | AsyncEngine) -> None:
    """Check that all blocks and slots are free. Tests use it after every call."""
    core = used.local.engine.core
    assert core.generation is not None and not core.generation.busy
    core.check_integrity()
    core.generation.pool.check_integrity()
