"""Settings for all tests that need a CUDA device."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draw the same random tensors in every run, on the CPU and on the device."""
    torch.manual_seed(0)
