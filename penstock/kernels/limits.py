"""Hardware limits of kernels on each kind of GPU, and the number of pipeline stages that fit them.

Tiles and stages in this package are chosen for an H200. A GPU with less shared memory uses the same tiles
with fewer stages, which does not change results. `make gpu-targets` compiles every kernel for each kind of
GPU and checks that it fits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Limits(NamedTuple):
    shared_bytes: int  # shared memory of one program
    has_async_products: bool  # tensor cores read operands from shared memory asynchronously


# By compute capability, from CUDA's programming guide. Other devices are queried.
SHARED_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10}
SHARED_BYTES |= {(10, 0): 227 << 10, (10, 3): 227 << 10, (12, 0): 99 << 10}
_ASYNC_PRODUCTS = (9, 10)  # major versions: Hopper and data-centre Blackwell
_off_gpu = (9, 0)  # the capability assumed for tensors that are not on a GPU


def limits_for(capability: tuple[int, int]) -> Limits:
    """The limits of a compute capability listed in `SHARED_BYTES`."""
    return Limits(SHARED_BYTES[capability], capability[0] in _ASYNC_PRODUCTS)


H200 = limits_for((9, 0))


def limits_of(device: torch.device) -> Limits:
    if device.type != "cuda":
        return limits_for(_off_gpu)
    return _limits_of_gpu(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _limits_of_gpu(index: int) -> Limits:
    capability = torch.cuda.get_device_capability(index)
    if capability in SHARED_BYTES:
        return limits_for(capability)
    properties = torch.cuda.get_device_properties(index)
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Limits(shared, capability[0] in _ASYNC_PRODUCTS)


def treat_others_as(capability: tuple[int, int]) -> None:
    """Treat tensors that are not on a GPU as if they were on one of this capability. For compilation only."""
    global _off_gpu
    _off_gpu = capability


def num_stages(wanted: int, tile_bytes: int, limits: Limits, other_bytes: int = 0) -> int:
    """The number of stages, at most `wanted`, that fit into shared memory.

    Each stage loads `tile_bytes`. Asynchronous products still read the tiles of the current product, so one
    stage fewer can be loaded ahead. `other_bytes` is the shared memory that the kernel uses for other data.
    """
    buffers = max(0, limits.shared_bytes - other_bytes) // tile_bytes
    return max(1, min(wanted, buffers if limits.has_async_products else buffers + 1))
