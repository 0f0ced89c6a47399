from __future__ import annotations

import pytest
import torch

from penstock.kernels import pooling
from penstock.kernels.pooling import (
    METHODS,
    copy_rows,
    copy_rows_reference,
    normalize_rows,
    normalize_rows_reference,
    pool,
    pool_reference,
)


def ragged(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [8, 37, 200])
@pytest.mark.parametrize("long", [128, 2], ids=["row by row", "shared out"])
@pytest.mark.parametrize("skipped", [False, True])
def test_every_method_equals_the_reference(
    method: str, width: int, long: int, skipped: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "_LONG_ROW", long)
    torch.manual_seed(0)
    lengths = [1, 3, 3, 17, 70]
    cu = ragged(lengths, device)
    hidden = torch.randn(sum(lengths), width, device=device)
    skip = torch.tensor([0, 1, 2, 16, 5], dtype=torch.int32, device=device) if skipped else None
    for dims, normalize, rows in ((None, False, None), (5, True, None), (None, True, [4, 0, 3])):
        chosen = None if rows is None else torch.tensor(rows, dtype=torch.int32, device=device)
        options = {"skip": skip, "chosen": chosen, "dims": dims, "normalize": normalize}
        expected = pool_reference(hidden, cu, method, **options)
        got = pool(hidden, cu, method, max_length=70, **options)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_row_whose_tokens_are_all_skipped_pools_to_zero(device: torch.device) -> None:
    hidden = torch.randn(4, 8, device=device)
    cu, skip = ragged([4], device), torch.tensor([4], dtype=torch.int32, device=device)
    assert (pool(hidden, cu, "mean", max_length=4, skip=skip, normalize=True) == 0).all()
    assert torch.equal(pool(hidden, cu, "cls", max_length=4, skip=skip)[0], hidden[3])


@pytest.mark.parametrize("method", ["cls", "last"])
def test_an_empty_row_in_front_reads_no_token_before_the_first(method: str, device: torch.device) -> None:
    """A graph that is captured before any step has only empty rows."""
    around = torch.full((5, 8), float("nan"), device=device)
    hidden = around[1:]
    hidden.copy_(torch.randn(4, 8))
    pooled = pool(hidden, ragged([0, 4], device), method, max_length=4)
    assert pooled.isfinite().all()
    assert torch.equal(pooled[1], hidden[0 if method == "cls" else 3])


def test_sums_of_half_precision_are_fp32(device: torch.device) -> None:
    hidden = torch.full((1000, 8), 1.01, device=device).bfloat16()
    out = pool(hidden, ragged([1000], device), "mean", max_length=1000)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out[0], hidden[0].float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("width", [1, 8, 37, 300])
def test_truncated_vectors_are_normalised(width: int, device: torch.device) -> None:
    wide = torch.randn(5, 400, device=device).bfloat16()
    cut = wide[:, :width]
    torch.testing.assert_close(normalize_rows(cut), normalize_rows_reference(cut), atol=1e-6, rtol=1e-5)
    assert (normalize_rows(torch.zeros(2, 8, device=device)) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [None, [4, 0, 0, 3], []])
def test_chosen_rows_are_normalised_in_another_dtype(
    rows: list[int] | None, dtype: torch.dtype, device: torch.device
) -> None:
    vectors = torch.randn(5, 96, device=device).bfloat16()
    chosen = None if rows is None else torch.tensor(rows, dtype=torch.int32, device=device)
    got, expected = normalize_rows(vectors, chosen, dtype), normalize_rows_reference(vectors, chosen, dtype)
    assert got.dtype == dtype and got.shape == (5 if rows is None else len(rows), 96)
    torch.testing.assert_close(got, expected, atol=1e-6 if dtype == torch.float32 else 1e-3, rtol=1e-3)


@pytest.mark.parametrize("width", [1, 96, 128, 300])
@pytest.mark.parametrize(("source", "target"), [([0, 2, 2, 4], [7, 0, 8, 3]), ([], [])])
def test_rows_are_copied_to_their_targets(
    width: int, source: list[int], target: list[int], device: torch.device
) -> None:
    vectors = torch.randn(5, width, device=device).half()
    numbers = [torch.tensor(x, dtype=torch.int32, device=device) for x in (source, target)]
    stores = [torch.full((9, width), 7.0, device=device).half() for _ in range(2)]
    copy_rows(vectors, numbers[0], stores[0], numbers[1])
    copy_rows_reference(vectors, numbers[0], stores[1], numbers[1])
    assert torch.equal(*stores) and (stores[0][[1, 2, 4, 5, 6]] == 7).all()
