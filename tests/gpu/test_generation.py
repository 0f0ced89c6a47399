"""Generation on CUDA: tokens that a CPU finds likely, whatever way rows take, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Engine, SamplingParams
from tests.generation.families import check_nothing_is_held, logits_after, prompts, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2", "phi3", "qwen3-moe", "gritlm"]
FAMILIES += ["gpt-oss", "granite", "smollm3", "olmo3", "exaone4", "gemma3-tower"]
GREEDY = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24}, {"kv_cache_gb": 1e-9}])
@pytest.mark.parametrize("name", FAMILIES)
def test_generated_tokens_are_likely_under_the_reference_model(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(name, tmp_path / name)
    with Engine(str(folder), device="cuda", dtype="bfloat16", **options) as used:
        for _ in range(2):
            got = used.generate(prompts(), GREEDY)
            check_nothing_is_held(used)
    near = []
    for row, made in zip(prompts(), got, strict=True):
        logits = logits_after(name, folder, row, made.token_ids)
        spread = logits.std(dim=-1)
        chosen = logits.gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
        near.append((logits.max(dim=-1).values - chosen) / spread)
    assert torch.cat(near).median() < 1e-3
    assert (torch.cat(near) < 0.25).float().mean() > 0.97
