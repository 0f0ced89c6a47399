from __future__ import annotations

import pytest
import torch

from penstock.kernels.product import Tiles, fits, linear_act, linear_act_reference

SMALL = Tiles(rows=16, columns=32, depth=16, group=2, warps=4, stages=2)


@pytest.mark.parametrize("tokens", [1, 16, 37, 100])
@pytest.mark.parametrize("act", ["gelu", "gelu_new", "silu"])
def test_the_product_with_its_activation_equals_the_reference(
    tokens: int, act: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    x, weight, bias = (torch.randn(*s, device=device).to(dtype) for s in ((tokens, 48), (96, 48), (96,)))
    got = linear_act(x, weight, bias, act, SMALL)
    expected = linear_act_reference(x.float(), weight.float(), bias.float(), act)
    torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=1e-2)


def test_only_weights_of_whole_tiles_fit() -> None:
    assert fits(torch.empty(3072, 768)) and fits(torch.empty(4096, 1024))
    assert not fits(torch.empty(3000, 768)) and not fits(torch.empty(3072, 100))
