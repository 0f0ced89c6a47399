"""Generation on CUDA: tokens are likely under a CPU reference, whatever path rows take, and nothing leaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Engine, SamplingParams
from penstock.runner.model_runner import ModelRunner
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
    check_likely(name, folder, prompts(), [made.token_ids for made in got])


def check_likely(name: str, folder: Path, rows: list[list[int]], outputs: Sequence[Sequence[int]]) -> None:
    """Check that the reference model finds nearly every token about the most likely after the same tokens."""
    near = []
    for row, tokens in zip(rows, outputs, strict=True):
        logits = logits_after(name, folder, row, list(tokens))
        spread = logits.std(dim=-1)
        chosen = logits.gather(1, torch.tensor(list(tokens))[:, None])[:, 0]
        near.append((logits.max(dim=-1).values - chosen) / spread)
    assert torch.cat(near).median() < 1e-3
    assert (torch.cat(near) < 0.25).float().mean() > 0.97


LATER = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
ENDS = (7, 25, 40, 13, 31, 18, 36, 10, 28, 22)  # tokens per row, so that rows end while others decode


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3", "gpt-oss", "qwen3-moe"])
def test_mixed_steps_are_replayed_and_give_likely_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runner.mixed.MixedGraphs.uses_before_capture", 0)
    monkeypatch.setattr("penstock.runner.mixed._CAPTURE_PAUSE", 0.0)
    folder = write(name, tmp_path / name)
    rows = prompts(5, (3, 60, 1, 90, 17, 70, 33, 80, 5, 64))  # most start while others decode
    options: dict[str, Any] = {"max_num_seqs": 4, "enable_prefix_caching": False, "target_itl_ms": 2.0}
    sampling = [SamplingParams(max_tokens=end, temperature=0, ignore_eos=True) for end in ENDS]
    with Engine(str(folder), device="cuda", dtype="bfloat16", **options) as used:
        for _ in range(3):
            got = used.generate(rows, sampling)
            check_nothing_is_held(used)
        runner = used.local.engine.core.runner
        assert isinstance(runner, ModelRunner) and runner.mixed is not None
        assert runner.mixed.replays > 5 and not runner.mixed.refused
    check_likely(name, folder, rows, [made.token_ids for made in got])


def test_a_model_without_mixed_graphs_keeps_separate_steps(tmp_path: Path) -> None:
    """The model's attention scores are soft-capped, which no prompt kernel supports."""
    folder = write("gemma2", tmp_path / "gemma2")
    with Engine(str(folder), device="cuda", dtype="bfloat16", target_itl_ms=5.0) as used:
        generation = used.local.engine.core.generation
        assert generation is not None and not generation.can_mix_steps()
        assert len(used.generate(prompts(), LATER)) == len(prompts())
        check_nothing_is_held(used)
