"""The examples of docs/kernels.md run as written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def blocks(heading: str) -> list[str]:
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_the_examples_give_a_score_for_each_pair() -> None:
    found = blocks("MaxSim")
    assert len(found) == 2
    names: dict[str, Any] = {}
    for block in found:
        exec(block, names)
        assert names["scores"].shape == (3,) and names["scores"].dtype == torch.float32


def test_the_example_samples_a_token_for_each_row() -> None:
    names: dict[str, Any] = {}
    exec(blocks("Sampling")[0], names)
    sampled = names["sampled"]
    assert sampled.token_ids.shape == (2,) and sampled.token_ids.dtype == torch.int32
    assert sampled.logprobs.values.shape == (1, 3) and sampled.logprob_rows.tolist() == [0]


def test_the_example_adds_adapters_to_some_lines() -> None:
    names: dict[str, Any] = {}
    exec(blocks("Adapters")[0], names)
    assert names["y"].shape == (17, 128) and names["y"].isfinite().all()
