"""Sequences with different adapters: their base checkpoint, and what PEFT and Penstock generate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.types import PoolingParams, Request, SamplerParams, Task
from tests.generation.streams import read_stream
from tests.helpers import ints
from tests.parity.decoders import FAMILIES, SIZES, randomise, write_tokenizer
from tests.parity.encoders import Opened
from tests.parity.lora import FIRST_ID

PROMPTS = [[5, 9, 30], [7] * 20 + [11], [100, 3, 8, 50, 60], [5, 9, 30], [40, 41, 42, 43] * 9, [5, 9, 30]]
CHOSEN = (0, 1, -1, 1, 0, -1)
TARGETS = {"gpt2": ["c_attn", "c_fc"], "qwen3": ["q_proj", "v_proj", "down_proj", "lm_head"]}


def write_base(folder: Path, name: str) -> Any:
    family = FAMILIES[name]
    suffix = "LMHeadModel" if name == "gpt2" else "ForCausalLM"
    kind = getattr(transformers, family.model.replace("Model", suffix))
    untied = {} if name == "gpt2" else {"tie_word_embeddings": False}
    model = kind(kind.config_class(**(SIZES | family.settings | untied))).eval()
    randomise(model, 3)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=1,
    )
    new: list[int] = made[0, len(prompt) :].tolist()
    return new


def request_of(number: int, count: int) -> Request:
    adapter = CHOSEN[number]
    return Request(
        f"r{number}",
        ints(PROMPTS[number]),
        ints([len(PROMPTS[number])]),
        PoolingParams(Task.GENERATE),
        sampling=SamplerParams(max_tokens=count, temperature=0, ignore_eos=True),
        adapters=None if adapter < 0 else ints([FIRST_ID + adapter]),
    )


def generate(engine: Opened, count: int) -> list[list[int]]:
    """Generate from all prompts at once, with one request for each."""

    async def read(number: int) -> list[int]:
        parts = [part async for part in read_stream(engine.engine, request_of(number, count))]
        return [token for part in parts for token in part.token_ids.tolist()]

    async def read_all() -> list[list[int]]:
        return list(await asyncio.gather(*map(read, range(len(PROMPTS)))))

    return asyncio.run(read_all())
