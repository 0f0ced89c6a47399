"""Parts shared by Penstock's matrix products on Hopper GPUs: tile order, activations, TMA descriptors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.language import HAS_GLUON, cdiv, gluon_jit

if HAS_GLUON:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
else:
    gl = None

_TILE_ROWS_PER_GROUP = 17  # rows of tiles computed together, so that their inputs stay in the L2 cache


@gluon_jit()
def act_of(x: gl.tensor, KIND: gl.constexpr) -> gl.tensor:
    if KIND == 0:
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    if KIND == 1:  # 0.5 · (1 + tanh(u)) is sigmoid(2u)
        return x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    if KIND == 2:
        return x / (1.0 + gl.exp(-x))
    if KIND == 4:
        return x / (1.0 + gl.exp(-1.702 * x))
    return gl.maximum(x, 0.0)


@gluon_jit()
def corner(tile: gl.tensor, grid: gl.tuple, ROWS: gl.constexpr, COLS: gl.constexpr) -> gl.tuple:
    """First row and column of a tile. Tiles are numbered down `group` rows of tiles, then across."""
    down, across, group = grid
    first = tile // (group * across) * group
    rows = min(down - first, group)
    within = tile % (group * across)
    return (first + within % rows) * ROWS, within // rows * COLS


def tile_rows_together(down: int) -> int:
    """The `group` of `corner` for `down` rows of tiles, so that all groups have nearly equal height."""
    return cdiv(down, cdiv(down, _TILE_ROWS_PER_GROUP))


def descriptor(x: Tensor, rows: int, cols: int) -> Any:
    """A TMA descriptor of a matrix, which is read or written in blocks of this many rows and columns."""
    block = [rows, cols]
    return TensorDescriptor(x, [*x.shape], [*x.stride()], block, _layout(rows, cols, x.dtype))


def can_describe(x: Tensor) -> bool:
    """Whether TMA can read or write this matrix of 16-bit values."""
    return x.dim() == 2 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


@lru_cache(maxsize=32)
def _layout(rows: int, cols: int, dtype: torch.dtype) -> Any:
    kind = gl.bfloat16 if dtype is torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, cols], kind)


@lru_cache(maxsize=8)
def num_programs(device: int) -> int:
    """Number of programs, one per multiprocessor; 0 if the kernels do not run on this device."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
