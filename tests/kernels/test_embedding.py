from __future__ import annotations

import pytest
import torch

from penstock.kernels.embedding import embed, embed_reference


@pytest.mark.parametrize("width", [8, 37, 384, 768])
@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("typed", ["none", "zero", "given"])
@pytest.mark.parametrize("normed", ["none", "plain", "bias"])
def test_embeddings_equal_the_reference(
    width: int, placed: bool, typed: str, normed: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    tokens, vocabulary, limit = 6, 40, 20

    def integers(high: int) -> torch.Tensor:
        return torch.randint(0, high, (tokens,), dtype=torch.int32, device=device)

    words = torch.randn(vocabulary, width, device=device)
    place_table = torch.randn(limit, width, device=device) if placed else None
    type_table = None if typed == "none" else torch.randn(2, width, device=device)
    types = integers(2) if typed == "given" else None
    norm = None
    if normed != "none":
        bias = torch.randn(width, device=device) if normed == "bias" else None
        norm = (torch.rand(width, device=device) + 0.5, bias, 1e-12)
    arguments = (integers(vocabulary), words, integers(limit), place_table, types, type_table, norm)
    torch.testing.assert_close(embed(*arguments), embed_reference(*arguments), atol=1e-5, rtol=1e-5)


def test_the_output_has_the_dtype_of_the_tables(device: torch.device) -> None:
    words = torch.randn(10, 16, device=device).bfloat16()
    ids = torch.arange(4, dtype=torch.int32, device=device)
    out = embed(ids, words, ids, None, None, None, None)
    assert out.dtype == torch.bfloat16 and torch.equal(out, words[:4])
