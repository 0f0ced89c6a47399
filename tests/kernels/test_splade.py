from __future__ import annotations

import pytest
import torch

from penstock.kernels.splade import log1p_relu, splade_pool, splade_pool_reference


@pytest.mark.parametrize("reduce", ["max", "sum"])
@pytest.mark.parametrize("logs", [1, 2])
@pytest.mark.parametrize("width", [8, 300, 513])
def test_splade_pooling_equals_the_reference(
    reduce: str, logs: int, width: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    cu = torch.tensor([0, 1, 4, 4, 21, 60], dtype=torch.int32, device=device)
    logits = torch.randn(60, width, device=device) * 4 - 3  # some terms have no logit above 0
    whole = torch.cat([cu[:3], cu[4:]])  # the reference does not support rows without tokens
    expected = splade_pool_reference(logits, whole, logs=logs, reduce=reduce)
    got = splade_pool(logits, cu, logs=logs, reduce=reduce)
    torch.testing.assert_close(got[[0, 1, 3, 4]], expected, atol=1e-5, rtol=1e-5)
    assert (got[2] == 0).all()
    tile = splade_pool(logits[4:], cu[3:], logs=logs, reduce=reduce, first_token=4)
    torch.testing.assert_close(tile, expected[2:], atol=1e-5, rtol=1e-5)


def test_small_logits_keep_their_weight(device: torch.device) -> None:
    logits = torch.tensor([[1e-9, 1e-5, 0.0, -1.0]], device=device)
    cu = torch.tensor([0, 1], dtype=torch.int32, device=device)
    got = splade_pool(logits, cu, logs=1, reduce="max")
    torch.testing.assert_close(got, log1p_relu(logits, 1), atol=0, rtol=1e-5)
