"""Products of few fp8 rows and an fp8 weight, both with a scale per row.

For few rows, reading the weight takes most of the time. The library's product has one program for each tile
of outputs, too few to read from memory at full speed. Here tiles are smaller, and if there are few, several
programs share the inputs of a tile; a second launch sums their parts.

In bfloat16 such a kernel was 5 % faster than the library for 16 rows and 4 % slower for 64, so there is none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.language import cdiv, jit, tl, use_kernel, wait_for_inputs
from penstock.kernels.limits import limits_of, num_stages
from penstock.kernels.quantize import Quantized, scaled_matmul_reference


@jit(unspecialized=("rows",), overlaps=True)
def _few_rows(
    x: tl.tensor,  # fp8 [rows, K]
    x_scales: tl.tensor,  # fp32 [rows]
    weight: tl.tensor,  # fp8 [N, K]
    scales: tl.tensor,  # fp32 [N]
    bias: tl.tensor,
    out: tl.tensor,  # [rows, N]; if PARTS > 1, fp32 [PARTS, rows, N], neither scaled nor with the bias
    rows: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,  # programs that share the inputs of a tile
) -> None:
    """Compute one tile over a part of the inputs. Weights are the first operand, of which tensor cores need
    64 rows; 16 suffice for the second."""
    spans: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    share: tl.constexpr = (spans + PARTS - 1) // PARTS
    part = tl.program_id(0) % PARTS
    col = (tl.program_id(0) // PARTS) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    from_col = tl.minimum(col, N - 1)  # columns and rows past the end are computed but not stored
    from_row = tl.minimum(row, rows - 1)
    depth = tl.arange(0, BLOCK_K)
    x_at = x + from_row[:, None] * K + depth[None, :]
    w_at = weight + from_col[:, None].to(tl.int64) * K + depth[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    wait_for_inputs()
    begin = part * share
    for span in range(begin, tl.minimum(begin + share, spans)):
        start = span * BLOCK_K
        if K % BLOCK_K == 0:
            a = tl.load(x_at + start)
            b = tl.load(w_at + start)
        else:
            left = depth[None, :] < K - start
            a = tl.load(x_at + start, mask=left, other=0.0)
            b = tl.load(w_at + start, mask=left, other=0.0)
        total = tl.dot(b, tl.trans(a), total)
    total = tl.trans(total)
    if PARTS == 1:
        total *= tl.load(x_scales + from_row)[:, None] * tl.load(scales + from_col)[None, :]
        if BIAS:
            total += tl.load(bias + from_col).to(tl.float32)[None, :]
    to = out + (part * rows + row)[:, None].to(tl.int64) * N + col[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (col[None, :] < N))


@jit(unspecialized=("rows",), overlaps=True)
def _sum_few_rows(
    parts: tl.tensor,  # fp32 [PARTS, rows, N]
    x_scales: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,  # [rows, N]
    rows: tl.tensor,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum the parts of a block of one row's outputs, always in the same order, and scale them."""
    blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    here = col < N
    wait_for_inputs()
    at = row.to(tl.int64) * N + col
    total = tl.load(parts + at, mask=here, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + (part * rows).to(tl.int64) * N + at, mask=here, other=0.0)
    total *= tl.load(scales + col, mask=here, other=0.0) * tl.load(x_scales + row)
    if BIAS:
        total += tl.load(bias + col, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=here)


class FewRowsTile(NamedTuple):
    rows: int
    cols: int
    inputs: int  # per iteration
    stages: int


# (maximum number of rows, tile, programs that read the weight). Chosen by `benchmarks/gpu_few_rows.py --tune`
# for the products of Qwen3-8B on an H200.
FEW_ROWS_TILES: tuple[tuple[int, FewRowsTile, int], ...] = (
    (16, FewRowsTile(16, 64, 128, 6), 264),
    (64, FewRowsTile(64, 64, 128, 6), 132),
    (128, FewRowsTile(128, 64, 128, 6), 132),
)
_MIN_WEIGHT = 1 << 23  # parameters of a weight: a smaller one stays in the cache
_MANY_OUTPUTS = 16896  # beyond, the library is faster for more than 64 rows
_SUMMED = 1024  # outputs per program of `_sum_few_rows`


def few_rows_tile_for(rows: int) -> FewRowsTile:
    """The tile for up to 128 rows."""
    return next(tile for most, tile, _ in FEW_ROWS_TILES if rows <= most)


def num_parts_for(tile: FewRowsTile, outputs: int) -> int:
    """The number of programs that share the inputs of one tile. It does not depend on the number of rows, so
    the result of a row does not depend on the other rows of its tile."""
    programs = next(programs for most, _, programs in FEW_ROWS_TILES if tile.rows <= most)
    return max(1, round(programs / cdiv(outputs, tile.cols)))


def max_few_rows(weight: Quantized) -> int:
    """Up to how many rows `few_rows_matmul` is faster than the library; 0: never."""
    outputs, inputs = weight.values.shape
    if outputs * inputs < _MIN_WEIGHT or not _is_measured(weight.values):
        return 0
    return FEW_ROWS_TILES[2 if outputs <= _MANY_OUTPUTS else 1][0]


def _is_measured(weight: Tensor) -> bool:
    """Whether the weight is on a GPU of a kind on which the kernel was compared with the library."""
    if not weight.is_cuda or not use_kernel(weight):
        return False
    return torch.cuda.get_device_capability(weight.device)[0] == 9


def few_rows_matmul(
    x: Quantized,
    weight: Quantized,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: FewRowsTile | None = None,
    parts: int | None = None,
) -> Tensor:
    """Compute `scaled_matmul_reference` for up to 128 rows."""
    if not use_kernel(x.values):
        return scaled_matmul_reference(x, weight, bias, dtype)
    (rows, inputs), outputs = x.values.shape, len(weight.values)
    tile = tile or few_rows_tile_for(rows)
    spans = cdiv(inputs, tile.inputs)
    parts = min(parts or num_parts_for(tile, outputs), spans)
    parts = cdiv(spans, cdiv(spans, parts))  # no part is empty
    assert rows <= tile.rows and x.values.is_contiguous() and weight.values.is_contiguous()
    out = torch.empty((rows, outputs), dtype=dtype, device=x.values.device)
    if not rows:
        return out
    sums = out
    if parts > 1:
        sums = torch.empty((parts, rows, outputs), dtype=torch.float32, device=out.device)
    any_bias = weight.scales if bias is None else bias
    _few_rows[(cdiv(outputs, tile.cols) * parts,)](
        *x,
        *weight,
        any_bias,
        sums,
        rows,
        N=outputs,
        K=inputs,
        BIAS=bias is not None and parts == 1,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.cols,
        BLOCK_K=tile.inputs,
        PARTS=parts,
        num_warps=4,
        num_stages=num_stages(tile.stages, tile.inputs * (tile.rows + tile.cols), limits_of(out.device)),
    )
    if parts > 1:
        _sum_few_rows[(rows * cdiv(outputs, _SUMMED),)](
            sums,
            x.scales,
            weight.scales,
            any_bias,
            out,
            rows,
            N=outputs,
            BIAS=bias is not None,
            PARTS=parts,
            BLOCK=_SUMMED,
            num_warps=4,
        )
    return out
