"""The examples of docs/kernels.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_the_examples_give_a_score_for_each_pair() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
        assert names["scores"].shape == (3,) and names["scores"].dtype == torch.float32
