"""The KV cache of a model: the number of blocks that fit into its memory budget, and its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.config import Resolved
from penstock.errors import ConfigError
from penstock.kernels.quantize import FP8
from penstock.kvcache.store import KVCache, KVStore
from penstock.models.registry import CausalModel
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.device_memory import device_bytes


def make_cache(
    model: CausalModel,
    settings: Resolved,
    dtype: torch.dtype,
    device: torch.device,
    others: Sequence[CausalModel] = (),
) -> tuple[KVCache, int]:
    """The KV cache and its number of blocks. `others`: models whose caches have the same number of blocks and
    share the memory."""
    blocks = count_blocks(model, settings, dtype, device, others)
    return allocate_cache(model, settings, dtype, device, blocks), blocks


def count_blocks(
    model: CausalModel,
    settings: Resolved,
    dtype: torch.dtype,
    device: torch.device,
    others: Sequence[CausalModel] = (),
) -> int:
    """The number of KV cache blocks: as many as the budget allows and rows can use, at least one row's."""
    cached = _cache_dtype(settings, dtype, device)
    slot_bytes = [KVStore.bytes_per_slot(*each.kv_shape, cached) for each in (model, *others)]
    block_bytes = BLOCK_SIZE * sum(slot_bytes)
    needed = -(-settings.max_model_len // BLOCK_SIZE)
    enough = needed * settings.max_num_seqs
    granted = settings.kv_cache_bytes or int(settings.kv_share * torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        granted //= settings.tensor_parallel_size  # the ranks share the memory
    blocks = max(needed, min(enough, granted // block_bytes))
    if blocks * block_bytes > (total := device_bytes(device)):
        raise ConfigError(
            f"the KV cache of one row of max_model_len = {settings.max_model_len} tokens needs "
            f"{needed * block_bytes / 2**30:,.1f} GiB, but the device has {total / 2**30:,.1f} GiB; "
            "set a smaller --max-model-len"
            if needed == blocks
            else f"kv_cache_gb asks for {granted / 2**30:,.1f} GiB, but the device has "
            f"{total / 2**30:,.1f} GiB; set a smaller --kv-cache-gb",
            param="max_model_len" if needed == blocks else "kv_cache_gb",
        )
    return blocks


def allocate_cache(
    model: CausalModel, settings: Resolved, dtype: torch.dtype, device: torch.device, blocks: int
) -> KVCache:
    layers, kv_heads, dim = model.kv_shape
    cached = _cache_dtype(settings, dtype, device)
    store = KVStore(layers, blocks * BLOCK_SIZE, kv_heads, dim, cached, device)
    sums = torch.zeros(
        (blocks if settings.chunked else 0, model.hidden_size), dtype=torch.float32, device=device
    )
    return KVCache(store, sums)


def _cache_dtype(settings: Resolved, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The number format of the KV cache of a model in `dtype`."""
    if not settings.kv_cache_is_fp8:
        return dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            "kv_cache_dtype = 'fp8' needs a GPU that converts fp8 (Ada, Hopper or later); use 'auto'",
            param="kv_cache_dtype",
        )
    return FP8
