"""A real device runs out of memory, or is lost.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import Engine
from penstock.errors import RowFailed
from tests.checkpoints import write_bert

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONFIG = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 16384,  # determines most of a row's memory
    "num_hidden_layers": 2,
    "max_position_embeddings": 40_000,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "wide", config=CONFIG)


@pytest.fixture
def little_memory() -> Iterator[Callable[[int], None]]:
    """A function that limits this process to some bytes more than it uses now."""

    def leave(extra: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra) / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_a_step_that_does_not_fit_is_divided_and_the_row_that_cannot_fit_fails_alone(
    folder: Path, little_memory: Callable[[int], None]
) -> None:
    random = np.random.default_rng(0)
    inputs = [random.integers(5, 60, n).tolist() for n in random.integers(10, 500, 400)]
    options = {"device": "cuda", "load_format": "dummy", "max_model_len": 40_000}
    with Engine(str(folder), max_num_batched_tokens=65_536, **options) as engine:  # type: ignore[arg-type]
        expected = engine.embed(inputs)
        little_memory(400 << 20)  # a row of 500 tokens needs 16 MB per layer, a row of 40,000 needs 1.3 GB
        np.testing.assert_allclose(engine.embed(inputs), expected, atol=2e-2)
        budget = engine.local.engine.core.scheduler.budget.max_tokens
        assert budget < 65_536, "memory ran out, or this proves nothing"
        with pytest.raises(RowFailed, match="more memory than the device has"):
            engine.embed([random.integers(5, 60, 40_000).tolist()])
        np.testing.assert_allclose(engine.embed(inputs[:5]), expected[:5], atol=2e-2)


LOST = """
import torch
from penstock.errors import DeviceFailed
from penstock.runner.faults import typed_faults

device = torch.device("cuda")
try:
    with typed_faults(device):
        torch.zeros(8, device=device)[torch.full((8,), 1 << 20, device=device)].sum().item()
except DeviceFailed as error:
    print("failed:", error.message)
"""


def test_a_device_assertion_is_a_lost_device() -> None:
    """Runs in a process of its own, because the process cannot use the device afterwards."""
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, check=False)
    assert "failed: the device failed: " in done.stdout, done.stderr[-2000:]
