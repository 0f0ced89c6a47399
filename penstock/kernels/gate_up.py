"""Gate and up projections with the activation in one kernel, which never writes the two halves to memory.

A Gluon kernel for Hopper. In each program one warp copies tiles of both operands to shared memory with the
copy engine (TMA), a few tiles ahead. Two groups of four warps multiply 64 rows each. A tile holds 128 columns
of the gate and the same 128 of up, so a group has both halves of its results in registers. In a large step
this saves a pass over memory. It also saves power, which limits the speed of large steps.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from penstock.kernels.activation import ACTIVATION_CODES, gated_activation_reference
from penstock.kernels.hopper import act_of, corner, descriptor, num_programs, tile_rows_together
from penstock.kernels.language import HAS_GLUON, cdiv, gluon_jit, is_precompiling, use_kernel
from penstock.kernels.quantize import Activations

if HAS_GLUON:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
else:
    gl = None

_ROWS = 128  # rows of a tile; each of the two multiplying groups of warps takes half
_COLS = 128  # gate columns of a tile, which has as many up columns
_INNER = 64  # values of each row in one copy; the maximum of the shared-memory layout
_STAGES = 4  # tiles being copied or used; they fill the shared memory
# The multiprocessors take tiles in rounds. With fewer rounds, or too many idle multiprocessors in the last
# one, the smaller tiles of the matrix library are faster.
_MIN_ROUNDS, _MIN_OCCUPANCY = 3, 0.86
_DTYPES = (torch.bfloat16, torch.float16)


def gate_up_reference(x: Tensor, weight: Tensor, act: str, gate_first: bool) -> Tensor:
    """x [tokens, inner], weight [2 · width, inner] → act(gate) · up [tokens, width]."""
    return gated_activation_reference(x @ weight.t(), act, gate_first)


@gluon_jit()
def _copy(
    sources: gl.tuple,
    shared: gl.tuple,
    grid: gl.tuple,
    width: gl.tensor,
    inner: gl.tensor,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    x, weight = sources
    xs, weights, full, free = shared
    step = 0
    for tile in range(gl.program_id(0), grid[0] * grid[1], gl.num_programs(0)):
        row, col = corner(tile, grid, ROWS, COLS)
        for k in range(0, inner, INNER):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (ROWS + 2 * COLS) * INNER * 2)  # bytes
            tma.async_copy_global_to_shared(x, [row, k], ready, xs.index(stage))
            both = weights.index(stage)
            tma.async_copy_global_to_shared(weight, [col, k], ready, both.slice(0, COLS))
            tma.async_copy_global_to_shared(weight, [width + col, k], ready, both.slice(COLS, COLS))
            step += 1


@gluon_jit()
def _multiply(
    out: gl.tensor,
    place: gl.tensor,
    shared: gl.tuple,
    grid: gl.tuple,
    inner: gl.tensor,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    KIND: gl.constexpr,
    GATE_FIRST: gl.constexpr,
    HALF: gl.constexpr,
) -> None:
    xs, weights, full, free = shared
    OWN: gl.constexpr = ROWS // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLS, 16])
    step = 0
    for tile in range(gl.program_id(0), grid[0] * grid[1], gl.num_programs(0)):
        row, col = corner(tile, grid, ROWS, COLS)
        both = gl.zeros((OWN, 2 * COLS), gl.float32, LAYOUT)
        for k in range(0, inner, INNER):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            rows = xs.index(stage).slice(HALF * OWN, OWN)
            transposed = weights.index(stage).permute((1, 0))
            both = warpgroup_mma(rows, transposed, both, use_acc=k > 0, is_async=True)
            both = warpgroup_mma_wait(1, (both,))  # the previous product no longer needs its tiles
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        both = warpgroup_mma_wait(0, (both,))
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
        first, second = gl.split(gl.permute(gl.reshape(both, (OWN, 2, COLS)), (0, 2, 1)))
        value = act_of(first, KIND) * second if GATE_FIRST else act_of(second, KIND) * first
        tma.store_wait(0)  # wait until the previous tile is written
        place.store(value.to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [row + HALF * OWN, col], place)
    tma.store_wait(0)


@gluon_jit(unspecialized=("tokens", "width", "inner", "group"))
def _gate_up(
    x: gl.tensor,
    weight: gl.tensor,
    out: gl.tensor,
    tokens: gl.tensor,
    width: gl.tensor,
    inner: gl.tensor,
    group: gl.tensor,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    KIND: gl.constexpr,
    GATE_FIRST: gl.constexpr,
) -> None:
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, INNER], x.layout)
    weights = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * COLS, INNER], weight.layout)
    staging = gl.allocate_shared_memory(x.dtype, [2, ROWS // 2, COLS], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    shared = (xs, weights, full, free)
    grid = (gl.cdiv(tokens, ROWS), gl.cdiv(width, COLS), group)
    upper, lower = staging.index(0), staging.index(1)
    gl.warp_specialize(
        [
            (_multiply, (out, upper, shared, grid, inner, ROWS, COLS, INNER, STAGES, KIND, GATE_FIRST, 0)),
            (_multiply, (out, lower, shared, grid, inner, ROWS, COLS, INNER, STAGES, KIND, GATE_FIRST, 1)),
            (_copy, ((x, weight), shared, grid, width, inner, ROWS, COLS, INNER, STAGES)),
        ],
        [4, 1],  # warps of the second and third partition
        [240, 24],  # registers per thread of these two; the first partition gets the rest
    )


class GateUp:
    """Compute `gate_up_reference` for one weight, which must not move. For large products only."""

    def __init__(self, weight: Tensor, act: str, gate_first: bool) -> None:
        both, self.inner = weight.shape
        self.width = both // 2
        self.dtype = weight.dtype
        self.programs = num_programs(weight.device.index or 0)
        self.weight = descriptor(weight, _COLS, _INNER)
        self.constants = {
            "ROWS": _ROWS,
            "COLS": _COLS,
            "INNER": _INNER,
            "STAGES": _STAGES,
            "KIND": ACTIVATION_CODES[act],
            "GATE_FIRST": gate_first,
            "num_warps": 4,  # warps of the first partition; those of the others are added
            "maxnreg": 168,  # average over all warps: the copying warp leaves registers to the others
        }

    @classmethod
    def of(cls, weight: Tensor, act: str, gate_first: bool) -> GateUp | None:
        """Return the kernel, or None if it does not support this weight or this device."""
        if not HAS_GLUON or not weight.is_cuda or weight.dtype not in _DTYPES or act not in ACTIVATION_CODES:
            return None
        both, inner = weight.shape
        aligned = both % 16 == 0 and inner % 8 == 0 and weight.data_ptr() % 16 == 0
        if not aligned or not weight.is_contiguous() or not num_programs(weight.device.index or 0):
            return None
        return cls(weight, act, gate_first)

    def serves(self, x: Activations) -> TypeGuard[Tensor]:
        """Whether the kernel supports these rows and is faster than the matrix library."""
        if not isinstance(x, Tensor) or x.dtype is not self.dtype or not use_kernel(x):
            return False
        tiles = cdiv(len(x), _ROWS) * cdiv(self.width, _COLS)
        rounds = cdiv(tiles, self.programs)
        is_worthwhile = rounds >= _MIN_ROUNDS and tiles >= _MIN_OCCUPANCY * rounds * self.programs
        return (is_worthwhile or is_precompiling()) and x.is_contiguous() and x.data_ptr() % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        tokens = len(x)
        out = x.new_empty((tokens, self.width))
        if not tokens:
            return out
        down, across = cdiv(tokens, _ROWS), cdiv(self.width, _COLS)
        group = tile_rows_together(down)
        given = descriptor(x, _ROWS, _INNER), self.weight, descriptor(out, _ROWS // 2, _COLS)
        numbers = tokens, self.width, self.inner, group
        _gate_up[(min(down * across, self.programs),)](*given, *numbers, **self.constants)
        return out
