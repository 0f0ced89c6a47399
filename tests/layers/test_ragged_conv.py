from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from penstock.layers.ragged_conv import RaggedConv1d
from tests.layers.inputs import ordered_batch


@pytest.mark.parametrize(("kernel", "groups"), [(1, 1), (3, 1), (5, 2)])
def test_a_row_is_convolved_with_zero_padding(kernel: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(kernel)
    lengths = [1, 2, 4, 4, 9]
    x = torch.randn(sum(lengths), 6, generator=generator)
    weight, bias = (
        torch.randn(6, 6 // groups, kernel, generator=generator),
        torch.randn(6, generator=generator),
    )
    rows = [
        F.conv1d(row.T[None], weight, bias, padding=kernel // 2, groups=groups)[0].T
        for row in x.split(lengths)
    ]
    ours = RaggedConv1d(weight, bias, "tanh", groups)(x, ordered_batch(lengths))
    torch.testing.assert_close(ours, torch.cat(rows).tanh())
