from __future__ import annotations

import pytest
import torch

from penstock.kernels.cached_kv import LayerCache
from penstock.kernels.quantize import FP8
from penstock.kernels.rotary import HeadNorms, KVCacheWrite, rotate_qkv_, rotate_qkv_reference
from penstock.kvcache.store import KVStore

LIMIT = 50


def tables(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(LIMIT, size // 2, device=device) * 6
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("queries", "keys", "dim", "size"),
    [(4, 4, 32, 32), (6, 2, 64, 64), (3, 1, 48, 24), (12, 12, 64, 64), (32, 8, 128, 128), (1, 1, 6, 6)],
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_the_fused_rotation_equals_the_reference(
    queries: int, keys: int, dim: int, size: int, interleaved: bool, normed: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    tokens = 5
    qkv = torch.randn(tokens, queries + 2 * keys, dim, device=device)
    positions = torch.randint(0, LIMIT, (tokens,), dtype=torch.int32, device=device)
    cos, sin = tables(size, device)
    norms = None
    if normed:
        norms = HeadNorms(torch.rand(dim, device=device) + 0.5, torch.rand(dim, device=device) + 0.5, 1e-6)
        if size != dim:
            with pytest.raises(ValueError, match=f"{size} of {dim}"):
                rotate_qkv_(qkv, (queries, keys), positions, cos, sin, size=size, norms=norms)
            return
    gathered = [table.index_select(0, positions)[:, None] for table in (cos, sin)]
    options = {"size": size, "interleaved": interleaved, "norms": norms}
    expected = rotate_qkv_reference(qkv.clone(), (queries, keys), *gathered, **options)
    got = rotate_qkv_(qkv, (queries, keys), positions, cos, sin, **options)
    for name, mine, theirs in zip(("query", "key", "value"), got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert got[0].data_ptr() == qkv.data_ptr()  # rotated in place, without a copy


@pytest.mark.parametrize(("queries", "keys", "dim"), [(4, 4, 32), (6, 2, 64), (32, 8, 128), (3, 1, 6)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_keys_and_values_are_written_to_their_slots_in_the_same_pass(
    queries: int, keys: int, dim: int, interleaved: bool, normed: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, queries + 2 * keys, dim, device=device)
    positions = torch.randint(0, LIMIT, (5,), dtype=torch.int32, device=device)
    cos, sin = tables(dim, device)
    norms = (
        HeadNorms(torch.rand(dim, device=device), torch.rand(dim, device=device), 1e-6) if normed else None
    )
    slots = torch.tensor([7, -1, 0, 3, -1], dtype=torch.int32, device=device)
    cache = LayerCache(*(torch.full((9, keys, dim), 5.0, device=device) for _ in range(2)))
    memory = KVCacheWrite(cache, slots)
    options = {"size": dim, "interleaved": interleaved, "norms": norms}
    plain = rotate_qkv_(qkv.clone(), (queries, keys), positions, cos, sin, **options)
    got = rotate_qkv_(qkv, (queries, keys), positions, cos, sin, keep=memory, **options)
    for mine, theirs in zip(got, plain, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    for kept, made in zip(cache[:2], got[1:], strict=True):
        expected = torch.full_like(kept, 5.0)
        expected[[7, 0, 3]] = made[[0, 2, 3]]
        assert torch.equal(kept, expected)


@pytest.mark.parametrize(("queries", "keys", "dim"), [(6, 2, 64), (3, 1, 6)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_and_values_are_written_in_fp8_with_a_scale_for_each_head(
    queries: int, keys: int, dim: int, interleaved: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, queries + 2 * keys, dim, device=device) * 10
    qkv[2, queries + keys :] *= 1e3
    positions = torch.randint(0, LIMIT, (5,), dtype=torch.int32, device=device)
    cos, sin = tables(dim, device)
    slots = torch.tensor([7, -1, 0, 3, -1], dtype=torch.int32, device=device)
    written, expected = (KVStore(1, 9, keys, dim, FP8, device) for _ in range(2))
    options = {"size": dim, "interleaved": interleaved, "keep": KVCacheWrite(written.layer(0), slots)}
    _, key, value = rotate_qkv_(qkv, (queries, keys), positions, cos, sin, **options)
    places = torch.tensor([7, 0, 3], device=device)
    expected.write(0, places, key[[0, 2, 3]], value[[0, 2, 3]])
    every = torch.arange(9, device=device)
    for mine, theirs in zip(
        written.read(0, every, torch.float32), expected.read(0, every, torch.float32), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0.07)  # a tie may be rounded either way
        assert mine[places].any() and not mine[1:3].any()


def test_a_partial_rotation_refuses_kv_cache_writes(device: torch.device) -> None:
    cache = LayerCache(torch.zeros(4, 1, 8), torch.zeros(4, 1, 8))
    memory = KVCacheWrite(cache, torch.zeros(2, dtype=torch.int32))
    cos, sin = tables(4, device)
    with pytest.raises(ValueError, match="4 of 8"):
        rotate_qkv_(torch.zeros(2, 3, 8), (1, 1), memory.slots, cos, sin, size=4, keep=memory)
