"""Products on a CPU use few different numbers of tokens, so the library's cache by shape stays small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.layers import int8
from penstock.layers.cpu_shapes import MAX_EXACT_TOKENS, pad_rows, padded_size, zero_padding
from penstock.layers.int8 import Int8Linear
from penstock.layers.linear import PackedLinear
from penstock.types import LengthGroup


def test_there_are_few_sizes_and_little_padding() -> None:
    sizes = [padded_size(tokens) for tokens in range(1, 8193)]
    assert len(set(sizes[:1024])) == 192 and len(set(sizes)) == 288
    assert all(tokens <= size <= 1.032 * tokens for tokens, size in enumerate(sizes, 1))
    assert sizes[:MAX_EXACT_TOKENS] == list(range(1, MAX_EXACT_TOKENS + 1))
    assert all(padded_size(size) == size for size in set(sizes))


def test_rows_of_zeros_follow_until_the_size_is_reached() -> None:
    x = torch.ones(3, 2)
    assert pad_rows(x, 5).tolist() == [[1, 1], [1, 1], [1, 1], [0, 0], [0, 0]]
    assert pad_rows(x, 3) is x and pad_rows(None, 5) is None


def test_tokens_behind_the_last_group_become_zero() -> None:
    groups = (LengthGroup(0, 2, 1, 0), LengthGroup(2, 1, 3, 2))
    out = zero_padding(torch.full((7, 2), torch.nan), groups)
    assert out[:5].isnan().all() and not out[5:].any()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the layer needs oneDNN")
@pytest.mark.parametrize("act", ["identity", "gelu", "silu"])
def test_the_product_sees_padded_sizes_and_answers_as_without(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(24, 16, generator=generator), torch.randn(24, generator=generator)
    layer, seen = PackedLinear(weight, bias, act), set()
    product = layer._product

    def watched(x: Tensor, residual: Tensor | None) -> Tensor:
        seen.add(len(x))
        return product(x, residual)

    monkeypatch.setattr(layer, "_product", watched)
    counts = [*range(1, 300), 700, 1023, 1025, 2100]
    with torch.inference_mode():
        for rows in counts:
            x = torch.randn(rows, 16, generator=generator)
            added = torch.randn(rows, 24, generator=generator) if rows % 2 else None
            expected = layer.act(F.linear(x, weight, bias))
            torch.testing.assert_close(
                layer(x, added), expected if added is None else expected + added, atol=1e-5, rtol=1e-5
            )
    assert seen == {padded_size(rows) for rows in counts}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the layer needs oneDNN")
def test_an_int8_product_sees_padded_sizes_and_answers_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    layer, seen, onednn = Int8Linear(weight, None), set(), int8._onednn()

    class Watched:
        @staticmethod
        def qlinear_pointwise(levels: Tensor, *rest: Any) -> Any:
            seen.add(len(levels))
            return onednn.qlinear_pointwise(levels, *rest)

    x = torch.randn(300, 16, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(int8, "_onednn", Watched)
    with torch.inference_mode():
        answers = [layer(x[:rows]) for rows in range(1, 301)]
        assert seen == {padded_size(rows) for rows in range(1, 301)}
        for answer in answers:
            torch.testing.assert_close(answer, answers[-1][: len(answer)])
