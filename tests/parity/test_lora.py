"""Adapters give what PEFT gives, in batches where each row has its own or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.types import Task
from tests.parity.encoders import BACKBONES, CASES, Case, make_rows, reference_hidden
from tests.parity.lora import ask, opened_with, reference, write_adapter

ROWS = make_rows((5, 1, 17, 33, 5, 64, 9))
CHOSEN = (0, -1, 1, 0, 2, -1, 1)
TOLERANCE = 1e-4

ENCODERS: dict[str, Case] = {
    "bert": Case("Bert"),
    "roberta": Case("Roberta"),
    "xlm-roberta": Case("XLMRoberta"),
    "distilbert": Case("DistilBert", {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}),
    "mpnet": Case("MPNet"),
    "electra": CASES["electra"],
    "albert": CASES["albert"],
    "modernbert": CASES["modernbert"],
    "nomic": CASES["nomic-port-names"],
    "gte": CASES["gte-port-names"],
    "deberta-v3": CASES["deberta-v3"],
    "deberta-v2": CASES["deberta-v2"],
    "t5": BACKBONES["t5-gated"],
    "eurobert": Case("EuroBert", {"num_key_value_heads": 2, "head_dim": 16}),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_rows_with_different_adapters_give_what_peft_gives(name: str, tmp_path: Path) -> None:
    case = ENCODERS[name]
    base = case.write(tmp_path / "base")
    options: list[dict[str, Any]] = [{"r": 4}, {"r": 9, "use_rslora": True}, {"r": 2, "use_dora": True}]
    folders = [tmp_path / str(number) for number in range(3)]
    adapted = [
        write_adapter(base, folder, number, **each)
        for number, (folder, each) in enumerate(zip(folders, options, strict=True))
    ]
    expected = reference(base, adapted, ROWS, CHOSEN, reference_hidden)
    with opened_with(tmp_path / "base", folders) as engine:
        found = ask(engine, ROWS, CHOSEN, Task.TOKEN_EMBED)
        assert np.abs(found - expected).max() <= TOLERANCE
    changed = reference(base, adapted, ROWS, [-1] * len(ROWS), reference_hidden)
    assert np.abs(changed - expected).max() > 0.01  # the adapters do something
