"""Generation as on a GPU: decode graphs, mixed steps of prompts and decodes, and verified proposals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Engine, SamplingParams
from penstock.runner.model_runner import ModelRunner
from tests.generation.families import check_nothing_is_held, logits_after, prompts, write
from tests.generation.speculative import ALWAYS, REPETITIVE
from tests.thinning import thorough

DRAFT = {"draft": True, "graph_capture_seconds": 30.0}  # the model is its own draft model
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
ROWS = [row[:12] for row in prompts()[:3]] + [row[:20] for row in REPETITIVE[:1]]
SIZES = {"max_model_len": 48, "max_num_seqs": 4, "max_num_batched_tokens": 32, "graph_capture_seconds": 0.5}


def replays(engine: Engine, kind: str) -> int:
    runner = engine.local.engine.core.runner
    assert isinstance(runner, ModelRunner)
    count: int = getattr(runner, kind).replays
    return count


def check_likely(name: str, folder: Path, made: list[list[int]]) -> None:
    """Check that tokens equal the reference model's, except for near-ties that 16 bits decide differently."""
    for row, new in zip(ROWS, made, strict=True):
        logits = logits_after(name, folder, row, new)
        chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
        assert float(((logits.max(dim=-1).values - chosen) / logits.std(dim=-1)).max()) < 0.05


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        pytest.param("llama", {"speculative_config": ALWAYS}, "decode", id="speculation"),
        pytest.param("llama", {"target_itl_ms": 20, "max_num_batched_tokens": 24}, "mixed", id="mixed"),
        pytest.param("llama", {}, "decode", id="decodes", marks=thorough),
        pytest.param("llama", DRAFT, "decode", id="draft", marks=thorough),
        pytest.param("gpt-oss", {"dtype": "bfloat16"}, "decode", id="experts", marks=thorough),
        pytest.param("gemma2", {"enable_prefix_caching": True}, "decode", id="windows", marks=thorough),
    ],
)
def test_graphs_give_the_tokens_of_the_reference(
    name: str, options: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    folder = write(name, tmp_path / name)
    settings = SIZES | {"dtype": "float16"} | options
    if settings.pop("draft", False):
        own = {"model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
        settings["speculative_config"] = own
    with Engine(str(folder), device="cuda", **settings) as engine:
        for _ in range(2):
            check_likely(name, folder, [made.token_ids for made in engine.generate(ROWS, GREEDY)])
        assert replays(engine, kind) > 0
        check_nothing_is_held(engine)
