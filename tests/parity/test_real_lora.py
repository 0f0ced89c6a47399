"""A real adapter, the low-rank difference of two published embedders, against PEFT.

PENSTOCK_REAL_MODELS names a folder with `minilm` and its fine-tune `sre-minilm`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers

from penstock.types import Task
from tests.lora_difference import write_difference
from tests.parity.encoders import reference_hidden
from tests.parity.lora import ask, opened_with, reference

MODELS = Path(os.environ.get("PENSTOCK_REAL_MODELS", "/nowhere"))
pytestmark = pytest.mark.skipif(
    not (MODELS / "sre-minilm").is_dir(), reason="PENSTOCK_REAL_MODELS has no sre-minilm"
)


def test_a_real_adapter_gives_what_peft_gives_and_moves_towards_its_model(tmp_path: Path) -> None:
    base, tuned = MODELS / "minilm", MODELS / "sre-minilm"
    share = write_difference(base, tuned, tmp_path / "sre")
    assert share > 0.2
    draw = np.random.default_rng(0)
    rows = [[101, *draw.integers(1000, 20000, length).tolist(), 102] for length in (3, 30, 60, 7, 15, 90)]
    chosen = (0, -1, 0, 0, -1, 0)
    with torch.inference_mode():
        plain, wanted = (transformers.AutoModel.from_pretrained(folder).eval() for folder in (base, tuned))
        other = transformers.AutoModel.from_pretrained(base)
        adapted = peft.PeftModel.from_pretrained(other, str(tmp_path / "sre")).eval()
    expected = reference(plain, [adapted], rows, chosen, reference_hidden)
    with opened_with(base, [tmp_path / "sre"], max_lora_rank=32) as engine:
        found = ask(engine, rows, chosen, Task.TOKEN_EMBED)
    assert np.abs(found - expected).max() <= 1e-4
    goal = reference(wanted, [], rows, [-1] * len(rows), reference_hidden)
    before = reference(plain, [], rows, [-1] * len(rows), reference_hidden)
    lines = np.repeat(np.array(chosen) == 0, [len(row) for row in rows])
    assert np.abs(found - goal)[lines].mean() < 0.7 * np.abs(before - goal)[lines].mean()
