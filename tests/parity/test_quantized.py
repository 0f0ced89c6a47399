"""Quantised checkpoints as published, compared with transformers on the weights that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock import Engine
from tests.parity.decoders import ROWS
from tests.parity.quantized import FORMATS, write_quantized
from tests.parity.reference import cosines

SHORT = [ROWS[3], ROWS[5]]


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **options)


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMATS)
def test_states_equal_those_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    stored, plain = write_quantized(name, tmp_path)
    kind = getattr(transformers, FORMATS[name].family.model)
    reference = kind.from_pretrained(plain, dtype=torch.float32).eval()
    theirs = [reference.model(torch.tensor([row])).last_hidden_state[0].numpy() for row in SHORT]
    with open_engine(stored) as engine:
        ours = np.concatenate(engine.token_embed(SHORT, normalize=False))
    assert cosines(ours, np.concatenate(theirs)).min() >= 0.99999
    assert np.abs(ours - np.concatenate(theirs)).max() < 1e-3
