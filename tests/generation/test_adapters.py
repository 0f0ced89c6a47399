"""Sequences with different adapters and without one generate side by side what PEFT generates for each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.types import PoolingParams, Request, SamplerParams, Task
from tests.generation.streams import read_stream
from tests.helpers import ints
from tests.parity.decoders import FAMILIES, SIZES, randomise, write_tokenizer
from tests.parity.encoders import Opened
from tests.parity.lora import FIRST_ID, opened_with, write_adapter

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
    """All prompts at once, as requests of their own."""

    async def read(number: int) -> list[int]:
        parts = [part async for part in read_stream(engine.engine, request_of(number, count))]
        return [token for part in parts for token in part.token_ids.tolist()]

    async def read_all() -> list[list[int]]:
        return list(await asyncio.gather(*map(read, range(len(PROMPTS)))))

    return asyncio.run(read_all())


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("max_loras", "step_tokens"), [(1, 256), (4, 256), (4, 16)])
def test_greedy_tokens_are_those_of_peft(name: str, max_loras: int, step_tokens: int, tmp_path: Path) -> None:
    """With room for all adapters and for one at a time; with prompts in one step and in chunks."""
    base = write_base(tmp_path / "base", name)
    folders = [tmp_path / "0", tmp_path / "1"]
    adapted = [
        write_adapter(base, folder, number, r=3 + number, target_modules=TARGETS[name])
        for number, folder in enumerate(folders)
    ]
    count = 6
    expected = [
        greedy(base if each < 0 else adapted[each], prompt, count)
        for prompt, each in zip(PROMPTS, CHOSEN, strict=True)
    ]
    options = {"enable_generation": True, "max_loras": max_loras, "max_num_seqs": 8, "kv_cache_gb": 0.001}
    options["max_num_batched_tokens"] = step_tokens
    with opened_with(tmp_path / "base", folders, **options) as engine:
        assert generate(engine, count) == expected
        # Prefixes of one adapter are never used for another: the same prompts again, from the cache.
        assert generate(engine, count) == expected
    assert expected[0] != expected[3] != expected[5]
