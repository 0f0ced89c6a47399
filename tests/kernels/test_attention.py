from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.kernels.attention import (
    CachedKeyValues,
    FlashTiling,
    attention_reference,
    flash_attention,
    short_attention,
    write_kv_cache,
)
from penstock.kernels.cached_kv import LayerCache
from penstock.kernels.quantize import FP8
from penstock.kvcache.store import KVStore
from penstock.layers import attention as layers
from penstock.layers.distance_bias import DistanceBias, alibi_slopes
from tests.layers.inputs import ordered_batch

SMALL = FlashTiling(32, 16, 4, 2)


def ragged(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def projected(
    tokens: int, heads: int, kv_heads: int, dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of one fused buffer, as layers pass them."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter multiplies no bf16
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device).to(dtype)
    return fused.split([heads, kv_heads, kv_heads], dim=1)  # type: ignore[return-value]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    loose = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[got.dtype]
    torch.testing.assert_close(got, expected, atol=loose, rtol=loose)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 32), (2, 2, 64), (4, 2, 96), (2, 1, 128), (3, 3, 20)]
)
@pytest.mark.parametrize("lengths", [[1, 2, 9], [5, 17, 17], [33, 64]])
@pytest.mark.parametrize("causal", [False, True])
def test_short_rows_equal_the_reference(
    heads: int, kv_heads: int, dim: int, lengths: list[int], causal: bool, device: torch.device
) -> None:
    query, key, value = projected(sum(lengths), heads, kv_heads, dim, device)
    cu = ragged(lengths, device)
    expected = attention_reference(query, key, value, cu, scale=0.2, causal=causal)
    got = short_attention(query, key, value, cu, max_length=lengths[-1], scale=0.2, causal=causal)
    close(got, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_sees_no_more_keys_than_its_limit(causal: bool, device: torch.device) -> None:
    lengths = [4, 9, 30]
    query, key, value = projected(sum(lengths), 2, 2, 32, device)
    cu, limits = ragged(lengths, device), torch.tensor([4, 5, 11], dtype=torch.int32, device=device)
    options = {"scale": 0.3, "causal": causal, "limits": limits}
    expected = attention_reference(query, key, value, cu, **options)
    close(short_attention(query, key, value, cu, max_length=30, **options), expected)
    close(flash_attention(query, key, value, cu, max_length=30, tiles=SMALL, **options), expected)


@pytest.mark.parametrize("reach", [0, 3, 40])
def test_a_bias_by_distance_is_added_to_the_scores(reach: int, device: torch.device) -> None:
    lengths = [4, 9, 30, 75]
    query, key, value = projected(sum(lengths), 3, 3, 32, device)
    values = torch.tensor(alibi_slopes(3)) if not reach else torch.randn(3, 2 * reach + 1)
    cu, bias = ragged(lengths, device), DistanceBias(values.to(device), reach)
    options = {"scale": 0.3, "bias": bias}
    expected = attention_reference(query, key, value, cu, **options)
    assert (expected - attention_reference(query, key, value, cu, scale=0.3)).abs().max() > 0.1
    got = short_attention(query, key, value, cu[:4], max_length=30, **options)
    close(got[:43], expected[:43])
    close(flash_attention(query, key, value, cu, max_length=75, tiles=SMALL, **options), expected)
    limits = torch.tensor([4, 5, 11, 70], dtype=torch.int32, device=device)
    limited = attention_reference(query, key, value, cu, limits=limits, **options)
    got = flash_attention(query, key, value, cu, max_length=75, tiles=SMALL, limits=limits, **options)
    close(got, limited)
    kind = layers.AttentionKind(scale=0.3, bias=bias)
    if device.type == "cpu":
        close(layers.attend(query, key, value, ordered_batch(lengths), kind), expected)


def test_only_the_given_rows_are_written_and_empty_rows_are_allowed(device: torch.device) -> None:
    lengths = [3, 0, 5, 8]
    query, key, value = projected(sum(lengths), 2, 2, 32, device)
    cu = ragged(lengths, device)
    expected = attention_reference(query, key, value, cu, scale=0.2)
    for kernel in (short_attention, flash_attention):
        out = torch.full((sum(lengths), 64), 7.0, device=device, dtype=query.dtype)
        kernel(query, key, value, cu[:-1], max_length=8, scale=0.2, out=out)
        close(out[:8], expected[:8])
        assert (out[8:] == 7).all()
        kernel(query, key, value, cu[3:], max_length=8, scale=0.2, out=out)
        close(out, expected)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 64), (4, 2, 96), (2, 1, 20)])
@pytest.mark.parametrize("lengths", [[1, 40], [16, 32, 100]])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 0, 7, 50])
def test_long_rows_equal_the_reference(
    heads: int,
    kv_heads: int,
    dim: int,
    lengths: list[int],
    causal: bool,
    window: int | None,
    device: torch.device,
) -> None:
    query, key, value = projected(sum(lengths), heads, kv_heads, dim, device)
    cu = ragged(lengths, device)
    options = {"scale": 0.2, "causal": causal, "window": window}
    expected = attention_reference(query, key, value, cu, **options)
    close(flash_attention(query, key, value, cu, max_length=lengths[-1], tiles=SMALL, **options), expected)


def test_wide_heads_have_tiles_of_their_own(device: torch.device) -> None:
    query, key, value = projected(50, 2, 1, 512, device)
    cu = ragged([10, 40], device)
    expected = attention_reference(query, key, value, cu, scale=0.05)
    close(flash_attention(query, key, value, cu, max_length=40, scale=0.05), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_sinks_take_their_share_of_every_softmax(
    causal: bool, window: int | None, device: torch.device
) -> None:
    lengths = [1, 20, 40]
    query, key, value = projected(sum(lengths), 4, 2, 32, device)
    cu, sinks = ragged(lengths, device), torch.tensor([-2.0, 0.5, 3.0, 9.0], device=device)
    options = {"scale": 0.2, "causal": causal, "window": window, "sinks": sinks}
    expected = attention_reference(query, key, value, cu, **options)
    close(flash_attention(query, key, value, cu, max_length=40, tiles=SMALL, **options), expected)


@pytest.mark.parametrize("window", [None, 9])
def test_keys_of_earlier_steps_come_before_the_keys_of_the_row(
    window: int | None, device: torch.device
) -> None:
    lengths, earlier = [3, 20], [37, 0]
    query, _, _ = projected(sum(lengths), 2, 2, 32, device)
    _, key, value = projected(sum(lengths) + sum(earlier), 2, 2, 32, device)
    cu = ragged(lengths, device)
    cu_keys = ragged([a + b for a, b in zip(lengths, earlier, strict=True)], device)
    options = {"scale": 0.2, "causal": True, "window": window}
    expected = attention_reference(query, key, value, cu, cu_keys, **options)
    close(flash_attention(query, key, value, cu, cu_keys, max_length=20, tiles=SMALL, **options), expected)


def test_the_library_agrees_with_the_reference() -> None:
    query, key, value = (x.float() for x in projected(24, 4, 2, 16, torch.device("cpu")))
    got = attention_reference(query, key, value, ragged([24], torch.device("cpu")), scale=0.25, causal=True)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(got, expected[0].transpose(0, 1).flatten(1))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 32), (4, 2, 16), (2, 1, 128), (3, 3, 20)])
@pytest.mark.parametrize("window", [None, 0, 5, 40])
@pytest.mark.parametrize(
    ("lengths", "before"),
    [([1, 3, 40], [0, 17, 5]), ([33], [64]), ([2, 2, 65], [16, 31, 0]), ([4, 6, 0, 0], [1, 0, 0, 0])],
)
def test_keys_of_earlier_steps_are_read_from_the_kv_cache(
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    lengths: list[int],
    before: list[int],
    device: torch.device,
) -> None:
    both = [length + old for length, old in zip(lengths, before, strict=True)]
    cu, cu_keys = ragged(lengths, device), ragged(both, device)
    query, _, _ = projected(sum(lengths), heads, kv_heads, dim, device)
    _, key, value = projected(sum(both), heads, kv_heads, dim, device)
    options = {"scale": 0.3, "causal": True, "window": window}
    rows = [i for i, length in enumerate(lengths) if length]
    expected = attention_reference(
        query, key, value, cu[: len(rows) + 1], cu_keys[: len(rows) + 1], **options
    )

    old = torch.cat([torch.arange(n) + cu_keys[i].cpu() for i, n in enumerate(before)]).to(device)
    own = torch.cat([torch.arange(n) + cu_keys[i].cpu() + before[i] for i, n in enumerate(lengths)]).to(
        device
    )
    keys = torch.full((300, kv_heads, dim), float("nan"), dtype=key.dtype, device=device)
    values = keys.clone()
    slots = torch.randperm(300)[: len(old)].to(device)
    keys[slots], values[slots] = key[old], value[old]
    remembered = CachedKeyValues(LayerCache(keys, values), slots.int())
    got = flash_attention(
        query, key[own], value[own], cu, cu_keys, max_length=max(lengths), cached=remembered, tiles=SMALL,
        **options,
    )  # fmt: skip
    close(got, expected)

    store = KVStore(1, 300, kv_heads, dim, FP8, device)  # the expected values use keys as read back from fp8
    store.write(0, slots, key[old], value[old])
    key, value = key.clone(), value.clone()
    key[old], value[old] = store.read(0, slots, key.dtype)
    expected = attention_reference(
        query, key, value, cu[: len(rows) + 1], cu_keys[: len(rows) + 1], **options
    )
    remembered = CachedKeyValues(store.layer(0), slots.int())
    got = flash_attention(
        query, key[own], value[own], cu, cu_keys, max_length=max(lengths), cached=remembered, tiles=SMALL,
        **options,
    )  # fmt: skip
    close(got, expected)


def test_the_kv_cache_in_fp8_is_written_with_a_scale_for_each_head(device: torch.device) -> None:
    _, key, value = projected(6, 2, 3, 20, device)
    key[:, 1] *= 900  # beyond the range of fp8
    value[:, 2] *= 1e-3
    slots = torch.tensor([7, -1, 0, 8, -1, -1], dtype=torch.int32, device=device)
    written, expected = (KVStore(1, 9, 3, 20, FP8, device) for _ in range(2))
    write_kv_cache(key, value, written.layer(0), slots)
    places = torch.tensor([7, 0, 8], device=device)
    expected.write(0, places, key[[0, 2, 3]], value[[0, 2, 3]])
    every = torch.arange(9, device=device)
    for mine, theirs, exact in zip(
        written.read(0, every, torch.float32),
        expected.read(0, every, torch.float32),
        (key, value),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0.07)  # a tie may be rounded either way
        assert (
            torch.nn.functional.cosine_similarity(mine[places], exact[[0, 2, 3]].float(), dim=-1).min() > 0.99
        )
        assert not mine[1:7].any()


def test_only_tokens_with_a_slot_are_written_to_the_kv_cache(device: torch.device) -> None:
    _, key, value = projected(6, 2, 3, 20, device)
    keys = torch.zeros((9, 3, 20), dtype=key.dtype, device=device)
    values = torch.zeros_like(keys)
    slots = torch.tensor([7, -1, 0, 8, -1, -1], dtype=torch.int32, device=device)
    write_kv_cache(key, value, LayerCache(keys, values), slots)
    for mine, theirs in ((keys, key), (values, value)):
        assert torch.equal(mine[[7, 0, 8]], theirs[[0, 2, 3]])
        assert not mine[1:7].any()


@pytest.mark.parametrize("lengths", [[40, 70], [3] * 20 + [70]])
def test_the_next_layer_replays_the_launch_on_its_own_values(
    lengths: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers reuse the same scratch tensors, with only long rows and with short rows before them."""
    monkeypatch.setattr(
        layers, "attend", lambda q, k, v, batch, kind, bias: layers._attend_by_kernels(q, k, v, batch, kind)
    )
    shared = replace(ordered_batch(lengths), reuses_buffers=True, cu_lengths=ragged(lengths, device))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    (qkv,) = shared.scratch_buffers((3 * 64,), torch.empty(0, device=device, dtype=dtype))
    assert qkv is not None and shared.scratch_buffers((3 * 64,), qkv)[0] is qkv
    found, alone = [], replace(shared, reuses_buffers=False)
    for _ in range(3):
        qkv.copy_(torch.randn(qkv.shape))
        found.append(layers.attend_fused(qkv, 2, shared))
        close(found[-1], layers.attend_fused(qkv.clone(), 2, alone))
    assert found[0] is found[1] is found[2]
    assert (shared.scratch.repeated is not None) is (len(lengths) == 2)
    assert alone.scratch.repeated is None and alone.scratch.qkv_views is None
    other = torch.randn_like(qkv)  # in other memory, like the output of an fp8 layer
    close(layers.attend_fused(other, 2, shared), layers.attend_fused(other, 2, alone))
