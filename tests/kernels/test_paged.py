from __future__ import annotations

import pytest
import torch

from penstock.kernels.attention import attention_reference
from penstock.kernels.cached_kv import LayerCache, read_slots
from penstock.kernels.paged import (
    num_splits_for,
    paged_attention,
    paged_attention_reference,
    paged_attention_runs,
)
from penstock.kernels.quantize import FP8
from penstock.kvcache.store import KVStore

PAGE = 16


def memory(
    counts: list[int], heads: int, kv_heads: int, dim: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Rows in random KV cache blocks. Slots beyond a row's end hold NaN."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    width = -(-max(counts) // PAGE)
    blocks = torch.randperm(len(counts) * width + 3)[: len(counts) * width].view(len(counts), width)
    query = torch.randn(len(counts), heads + 2, dim).to(device, dtype)[:, :heads]
    keys, values = (
        torch.randn((len(counts) * width + 3) * PAGE, kv_heads, dim).to(device, dtype) for _ in range(2)
    )
    tables = blocks.to(device, torch.int32)
    return query, keys, values, tables, torch.tensor(counts, dtype=torch.int32, device=device)


def quantized(keys: torch.Tensor, values: torch.Tensor) -> LayerCache:
    """The same cache in fp8."""
    slots, heads, dim = keys.shape
    store = KVStore(1, slots, heads, dim, FP8, keys.device)
    store.write(0, torch.arange(slots, device=keys.device), keys, values)
    return store.layer(0)


def dequantized(cache: LayerCache, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.arange(len(cache.keys), device=cache.keys.device)
    keys = read_slots(cache.keys, cache.key_scales, slots, dtype)
    return keys, read_slots(cache.values, cache.value_scales, slots, dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    loose = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[got.dtype]
    torch.testing.assert_close(got, expected, atol=loose, rtol=loose)


@pytest.mark.parametrize("window", [None, 0, 20, 100])
def test_the_reference_is_causal_attention_over_the_rows(window: int | None, device: torch.device) -> None:
    counts = [1, 16, 17, 50, 90]
    query, keys, values, tables, lengths = memory(counts, 4, 2, 32, device)
    slots = torch.cat(
        [
            (tables[i].long()[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()[:n]
            for i, n in enumerate(counts)
        ]
    )
    one = torch.arange(len(counts) + 1, dtype=torch.int32, device=device)
    cu_keys = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
    expected = attention_reference(
        query, keys[slots], values[slots], one, cu_keys, scale=0.2, causal=True, window=window
    )
    got = paged_attention_reference(
        query, LayerCache(keys, values), tables, lengths, block_size=PAGE, scale=0.2, window=window
    )
    close(got, expected)


@pytest.mark.parametrize("window", [None, 0, 20])
def test_rows_of_one_sequence_read_their_keys_together(window: int | None) -> None:
    lengths = [40, 41, 42, 7, 16, 17]  # sequences of three rows, one row and two rows
    query, keys, values, tables, counts = memory(lengths, 4, 2, 32, torch.device("cpu"))
    query, keys, values = (x.float() for x in (query, keys, values))
    tables[1:3], tables[5] = tables[0], tables[4]
    rows = torch.tensor([[0, 1, 2], [3, 3, 3], [4, 5, 5]])
    places = torch.tensor([0, 1, 2, 3, 6, 7])
    options = {"block_size": PAGE, "scale": 0.2, "window": window}
    got = paged_attention_runs(query, LayerCache(keys, values), tables, counts, rows, places, **options)
    expected = paged_attention_reference(query, LayerCache(keys, values), tables, counts, **options)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (2, 2, 32), (8, 1, 20), (6, 2, 96)])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 0, 20, 100])
def test_the_kernel_equals_the_reference(
    heads: int, kv_heads: int, dim: int, splits: int, window: int | None, device: torch.device
) -> None:
    query, keys, values, tables, counts = memory([1, 16, 63, 64, 65, 200], heads, kv_heads, dim, device)
    options = {"block_size": PAGE, "scale": 0.2, "window": window}
    expected = paged_attention_reference(query, LayerCache(keys, values), tables, counts, **options)
    room = torch.full((len(query) + 1, heads * dim + 5), 7.0, device=device, dtype=query.dtype)
    out = room[:-1, : heads * dim]
    paged_attention(query, LayerCache(keys, values), tables, counts, splits=splits, out=out, **options)
    close(out, expected)
    assert (room[-1] == 7).all() and (room[:, heads * dim :] == 7).all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (8, 1, 20)])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_a_cache_in_fp8_is_read_by_its_scales(
    heads: int, kv_heads: int, dim: int, splits: int, window: int | None, device: torch.device
) -> None:
    """Heads have very different magnitudes: without their own scales, some would overflow or vanish."""
    query, keys, values, tables, counts = memory([1, 16, 63, 65, 200], heads, kv_heads, dim, device)
    sizes = 10.0 ** torch.randint(-3, 4, keys.shape[:2]).to(device)[..., None]
    cache = quantized(keys * 0.1, (values.float() * sizes).to(values.dtype))
    plain = LayerCache(*(dequantized(cache, query.dtype)))
    options = {"block_size": PAGE, "scale": 0.2, "window": window}
    expected = paged_attention_reference(query, plain, tables, counts, **options)
    close(paged_attention_reference(query, cache, tables, counts, **options), expected)
    out = torch.empty_like(expected)
    paged_attention(query, cache, tables, counts, splits=splits, out=out, **options)
    largest = expected.float().abs().amax()
    close((out.float() / largest).to(out.dtype), (expected.float() / largest).to(out.dtype))


@pytest.mark.parametrize("part", ["key_scales", "value_scales", "values"])
def test_a_poisoned_fp8_value_reaches_the_rows_that_read_it(part: str, device: torch.device) -> None:
    query, keys, values, tables, counts = memory([40, 70, 130], 4, 2, 64, device)
    cache = quantized(keys, values)
    slot = int(tables[1, 2]) * PAGE
    poisoned = getattr(cache, part)
    poisoned[slot] = torch.full_like(poisoned[slot].float(), torch.nan).to(poisoned.dtype)
    out = torch.zeros(3, 4 * 64, dtype=query.dtype, device=device)
    paged_attention(query, cache, tables, counts, splits=1, out=out, block_size=PAGE, scale=0.2)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("splits", [1, 4])
def test_nothing_is_written_for_rows_without_keys(splits: int, device: torch.device) -> None:
    query, keys, values, tables, counts = memory([1, 40, 300, 7], 4, 2, 32, device)
    expected = paged_attention_reference(
        query, LayerCache(keys, values), tables, counts, block_size=PAGE, scale=0.2
    )
    counts[[0, 3]] = 0
    out = torch.full_like(expected, 7.0)
    paged_attention(
        query, LayerCache(keys, values), tables, counts, block_size=PAGE, scale=0.2, splits=splits, out=out
    )
    close(out[1:3], expected[1:3])
    assert (out[0] == 7).all() and (out[3] == 7).all()


@pytest.mark.parametrize("splits", [1, 2])
def test_soft_capped_scores_equal_the_reference(splits: int, device: torch.device) -> None:
    query, keys, values, tables, counts = memory([3, 40, 130], 4, 2, 32, device)
    options = {"block_size": PAGE, "scale": 0.5, "softcap": 3.0}
    expected = paged_attention_reference(query, LayerCache(keys, values), tables, counts, **options)
    out = torch.empty_like(expected)
    paged_attention(query, LayerCache(keys, values), tables, counts, splits=splits, out=out, **options)
    close(out, expected)
    plain = paged_attention_reference(
        query, LayerCache(keys, values), tables, counts, block_size=PAGE, scale=0.5
    )
    assert (plain - expected).abs().max() > 0.01


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_count_once_however_keys_are_split(
    splits: int, window: int | None, device: torch.device
) -> None:
    query, keys, values, tables, counts = memory([1, 40, 300], 4, 2, 32, device)
    sinks = torch.tensor([-2.0, 0.5, 3.0, 9.0], device=device)
    options = {"block_size": PAGE, "scale": 0.2, "window": window, "sinks": sinks}
    expected = paged_attention_reference(query, LayerCache(keys, values), tables, counts, **options)
    out = torch.empty_like(expected)
    paged_attention(query, LayerCache(keys, values), tables, counts, splits=splits, out=out, **options)
    close(out, expected)


def test_few_long_rows_are_split_and_many_short_ones_are_not() -> None:
    assert num_splits_for(1, 8, 100) == 1
    assert num_splits_for(1, 8, 32_000) == 16
    assert num_splits_for(128, 8, 32_000) == 1
    assert num_splits_for(16, 8, 2_000) == 4
