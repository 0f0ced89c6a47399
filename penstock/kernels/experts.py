"""Mixture of experts on CUDA: routing, the two matrix products of each expert, and the sum over experts.

Only indices are sorted by expert: the first product gathers rows as it reads them, and the second writes rows
in the order that the sum expects. Grid sizes depend only on the number of tokens, so all launches can be
captured in a graph. A table has the expert of each tile of rows; programs of unused tiles return at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.activation import ACTIVATION_CODES, activate
from penstock.kernels.blockwise import (
    GROUP,
    BlockQuantized,
    GroupQuantized,
    empty_groups,
    quantize_group,
    quantize_groups,
)
from penstock.kernels.language import cdiv, jit, next_power_of_2, tl, wait_for_inputs
from penstock.kernels.limits import limits_of, num_stages

MAX_EXPERTS, MAX_CHOSEN_EXPERTS = 1024, 16
_FEW_TOKENS = 4  # tokens per routing program of a small step, one for each warp
_MAX_ORDERED_SLOTS = 1 << 12  # up to this number, the program of each expert reads all slots
_CHUNK_SIZE = 1 << 13  # tokens × experts per program with more slots


class Tile(NamedTuple):
    cols: int
    depth: int  # inputs read at a time; in fp8 always a group
    warps: int
    stages: int
    # Make weights the first operand. Tensor cores need at least 64 rows of the first, 16 of the second.
    swap: bool = False


class ExpertTiling(NamedTuple):
    rows: int  # rows per tile, in both products
    up: Tile
    down: Tile
    early: bool = False  # fp8: quantise rows in a pass before the first product, not inside it


# (maximum mean number of rows per expert, tiling). With few rows, reading the weights takes most of the
# time, so the number of loads in flight matters. Tensor cores need row tiles of at least 16.
HALF_TILINGS: tuple[tuple[float, ExpertTiling], ...] = (
    (0.5, ExpertTiling(16, Tile(32, 128, 4, 5), Tile(64, 128, 4, 4, swap=True))),
    (12, ExpertTiling(16, Tile(64, 128, 4, 3, swap=True), Tile(64, 128, 4, 4, swap=True))),
    (24, ExpertTiling(32, Tile(64, 128, 4, 3, swap=True), Tile(64, 128, 4, 4, swap=True))),
    (48, ExpertTiling(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4))),
    (float("inf"), ExpertTiling(128, Tile(128, 64, 8, 3), Tile(128, 64, 8, 4))),
)
FP8_TILINGS: tuple[tuple[float, ExpertTiling], ...] = (
    (0.5, ExpertTiling(16, Tile(64, GROUP, 4, 6, swap=True), Tile(64, GROUP, 4, 5, swap=True))),
    (12, ExpertTiling(16, Tile(128, GROUP, 4, 4, swap=True), Tile(64, GROUP, 4, 4, swap=True))),
    (24, ExpertTiling(32, Tile(128, GROUP, 4, 4, swap=True), Tile(64, GROUP, 4, 4, swap=True))),
    (48, ExpertTiling(64, Tile(128, GROUP, 8, 3), Tile(128, GROUP, 4, 4), early=True)),
    (float("inf"), ExpertTiling(128, Tile(128, GROUP, 8, 3), Tile(128, GROUP, 8, 3), early=True)),
)


def expert_tiling_for(tokens: int, chosen: int, experts: int, *, fp8: bool) -> ExpertTiling:
    mean = tokens * chosen / experts
    return next(plan for most, plan in (FP8_TILINGS if fp8 else HALF_TILINGS) if mean <= most)


class Routes(NamedTuple):
    """The assignment of slots to experts. Slot token · chosen + n is the n-th choice of a token."""

    shares: Tensor  # fp32 [slots], the weight of each expert's output
    order: Tensor  # int32 [slots], slots sorted by expert, then by token
    tiles: Tensor  # int32 [tiles, 4]: expert (number of experts if unused), begin and end in `order`


def route_reference(logits: Tensor, chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Weights and indices of each token's experts, [tokens, chosen]."""
    odds = logits.softmax(dim=-1, dtype=torch.float32)
    shares, experts = odds.topk(chosen, dim=-1)
    if normalize:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares, experts


@jit()
def _write_tiles(
    tiles: tl.tensor,
    sizes: tl.tensor,  # [BLOCK], number of rows of each expert
    begins: tl.tensor,  # [BLOCK], index of the first row of each expert
    count: tl.tensor,
    first: tl.tensor,
    step: tl.tensor,
    rows: tl.tensor,  # rows per tile
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the tile table in blocks of 16 tiles: block `first`, `first` + `step` and so on."""
    number = tl.arange(0, BLOCK)
    needed = (sizes + (rows - 1)) // rows
    ends = tl.cumsum(needed, axis=0)
    for start in range(first * 16, count, step * 16):
        tile = start + tl.arange(0, 16)
        expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        expert = tl.minimum(expert, EXPERTS)
        own = number[None, :] == expert[:, None]
        nth = tile - tl.sum(tl.where(own, (ends - needed)[None, :], 0), axis=1)
        begin = tl.sum(tl.where(own, begins[None, :], 0), axis=1)
        end = begin + tl.sum(tl.where(own, sizes[None, :], 0), axis=1)
        at = tiles + tile * 4
        tl.store(at, expert, mask=tile < count)
        tl.store(at + 1, begin + nth * rows, mask=tile < count)
        tl.store(at + 2, end, mask=tile < count)


@jit()
def _write_order(
    order: tl.tensor,
    taken: tl.tensor,  # [CHUNK, BLOCK], the slot in which a token chose an expert, or -1
    begins: tl.tensor,  # [BLOCK], index in `order` for each expert's first slot of this chunk
) -> None:
    here = taken >= 0
    before = tl.cumsum(here.to(tl.int32), axis=0) - 1
    tl.store(order + begins[None, :] + before, taken, mask=here)


@jit(unspecialized=("experts", "counts", "tokens"), overlaps=True)
def _route(
    logits: tl.tensor,  # [tokens, EXPERTS]
    shares: tl.tensor,
    experts: tl.tensor,  # int32 [slots]
    counts: tl.tensor,  # int32 [chunks, BLOCK], number of tokens of each expert
    tokens: tl.tensor,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    COUNTS: tl.constexpr,  # whether to write `counts`
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
) -> None:
    """Compute the softmax of a chunk of tokens, and choose its largest values one by one.

    Of equal values, the first is chosen.
    """
    wait_for_inputs()
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    number = tl.arange(0, BLOCK)
    nth = tl.arange(0, BLOCK_CHOSEN)
    inside = token < tokens
    at = logits + token[:, None].to(tl.int64) * EXPERTS + number[None, :]
    known = inside[:, None] & (number[None, :] < EXPERTS)
    value = tl.load(at, mask=known, other=float("-inf")).to(tl.float32)
    largest = tl.where(inside, tl.max(value, axis=1), 0.0)
    power = tl.exp2((value - largest[:, None]) * 1.4426950408889634)
    total = tl.where(inside, tl.sum(power, axis=1), 1.0)
    odds = power / total[:, None]
    # A NaN token must still choose experts that exist; its shares become NaN below.
    odds = tl.where(odds == odds, odds, 0.0)
    odds = tl.where(number[None, :] < EXPERTS, odds, -2.0)
    taken = tl.zeros((CHUNK, BLOCK), tl.int32)
    chosen = tl.zeros((CHUNK, BLOCK_CHOSEN), tl.float32)
    for n in tl.static_range(CHOSEN):
        best, expert = tl.max(odds, axis=1, return_indices=True)
        hit = number[None, :] == expert[:, None]
        odds = tl.where(hit, -1.0, odds)
        if COUNTS:
            taken = tl.where(hit, 1, taken)
        chosen = tl.where(nth[None, :] == n, best[:, None], chosen)
        tl.store(experts + token * CHOSEN + n, expert, mask=inside)
    if NORMALIZE:
        chosen = chosen / tl.sum(chosen, axis=1)[:, None]
    chosen = tl.where((total == total)[:, None], chosen, float("nan"))
    kept = inside[:, None] & (nth[None, :] < CHOSEN)
    tl.store(shares + token[:, None] * CHOSEN + nth[None, :], chosen, mask=kept)
    if COUNTS:
        sizes = tl.sum(tl.where(inside[:, None], taken, 0), axis=0)
        tl.store(counts + tl.program_id(0) * BLOCK + number, sizes)


@jit(unspecialized=("experts", "order", "tiles", "slots", "count", "rows"), overlaps=True)
def _order_by_expert(
    experts: tl.tensor,  # int32 [slots]
    order: tl.tensor,
    tiles: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,  # number of tiles
    rows: tl.tensor,  # rows per tile
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """Sort the slots of one expert and write its tiles. Each program counts all slots itself, so no program
    waits for another."""
    wait_for_inputs()
    own = tl.program_id(0)
    number = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    chosen = tl.load(experts + slot, mask=slot < slots, other=-1)
    sizes = tl.histogram(tl.maximum(chosen, 0), BLOCK, mask=slot < slots)
    needed = (sizes + (rows - 1)) // rows
    begin = tl.sum(tl.where(number < own, sizes, 0), axis=0)
    end = begin + tl.sum(tl.where(number == own, sizes, 0), axis=0)
    is_own = chosen == own
    before = tl.cumsum(is_own.to(tl.int32), axis=0) - 1
    tl.store(order + begin + before, slot, mask=is_own)
    first = tl.sum(tl.where(number < own, needed, 0), axis=0)
    own_tiles = (end - begin + (rows - 1)) // rows
    for start in range(0, own_tiles, 16):
        nth = start + tl.arange(0, 16)
        at = tiles + (first + nth) * 4
        tl.store(at, own + nth * 0, mask=nth < own_tiles)
        tl.store(at + 1, begin + nth * rows, mask=nth < own_tiles)
        tl.store(at + 2, end + nth * 0, mask=nth < own_tiles)
    unused = tl.sum(needed, axis=0)
    for start in range(unused + own * 16, count, EXPERTS * 16):
        tile = start + tl.arange(0, 16)
        tl.store(tiles + tile * 4, EXPERTS + tile * 0, mask=tile < count)


@jit(
    unspecialized=("experts", "counts", "order", "tiles", "tokens", "chunks", "count", "rows"), overlaps=True
)
def _sort_by_expert(
    experts: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    tokens: tl.tensor,
    chunks: tl.tensor,
    count: tl.tensor,  # number of tiles
    rows: tl.tensor,  # rows per tile
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the slots of a chunk to each expert's range of `order`, after those of earlier chunks."""
    wait_for_inputs()
    program = tl.program_id(0)
    number = tl.arange(0, BLOCK)
    sizes = tl.zeros((BLOCK,), tl.int32)
    earlier = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, chunks, 16):
        chunk = start + tl.arange(0, 16)
        at = counts + chunk[:, None] * BLOCK + number[None, :]
        found = tl.load(at, mask=chunk[:, None] < chunks, other=0)
        sizes += tl.sum(found, axis=0)
        earlier += tl.sum(tl.where(chunk[:, None] < program, found, 0), axis=0)
    begins = tl.cumsum(sizes, axis=0) - sizes
    token = program * CHUNK + tl.arange(0, CHUNK)
    taken = tl.full((CHUNK, BLOCK), -1, tl.int32)
    for n in tl.static_range(CHOSEN):
        expert = tl.load(experts + token * CHOSEN + n, mask=token < tokens, other=-1)
        taken = tl.where(number[None, :] == expert[:, None], token[:, None] * CHOSEN + n, taken)
    _write_order(order, taken, begins + earlier)
    _write_tiles(tiles, sizes, begins, count, program, chunks, rows, EXPERTS, BLOCK)


def max_num_tiles(slots: int, experts: int, rows: int) -> int:
    """Number of tiles that any routing fits into. Each chosen expert may waste all but one row of a tile."""
    return (slots + min(slots, experts) * (rows - 1)) // rows


def route(logits: Tensor, chosen: int, normalize: bool, rows: int) -> Routes:
    """Route each token by its logits [tokens, experts], in tiles of `rows`.

    For few tokens, one program for each expert reads and sorts all slots. For many tokens, slots are counted
    and sorted by chunk.
    """
    tokens, experts = logits.shape
    assert logits.is_contiguous() and experts <= MAX_EXPERTS and chosen <= min(experts, MAX_CHOSEN_EXPERTS)
    slots, device, block = tokens * chosen, logits.device, max(16, next_power_of_2(experts))
    tiles, counted = max_num_tiles(slots, experts, rows), slots > _MAX_ORDERED_SLOTS
    chunk = max(16, _CHUNK_SIZE // block) if counted else _FEW_TOKENS
    warps = chunk if not counted else 16 if chunk * block >= _CHUNK_SIZE else 8
    chunks = cdiv(tokens, chunk)
    num_counts = chunks * block if counted else 0
    numbers = torch.empty(2 * slots + tiles * 4 + num_counts, dtype=torch.int32, device=device)
    order, table, taken, counts = numbers.split([slots, tiles * 4, slots, num_counts])
    shares = torch.empty(slots, dtype=torch.float32, device=device)
    routes = Routes(shares, order, table.view(tiles, 4))
    if not tokens:
        return routes
    sizes = {"EXPERTS": experts, "BLOCK": block}
    _route[(chunks,)](
        logits,
        shares,
        taken,
        counts if counted else taken,
        tokens,
        CHOSEN=chosen,
        CHUNK=chunk,
        NORMALIZE=normalize,
        COUNTS=counted,
        BLOCK_CHOSEN=next_power_of_2(chosen),
        **sizes,
        num_warps=warps,
    )
    if not counted:
        held = max(1024, next_power_of_2(slots))
        _order_by_expert[(experts,)](
            taken, order, table, slots, tiles, rows, SLOTS=held, **sizes, num_warps=4
        )
        return routes
    integers = taken, counts, order, table, tokens, chunks, tiles, rows
    _sort_by_expert[(chunks,)](*integers, CHOSEN=chosen, CHUNK=chunk, **sizes, num_warps=warps)
    return routes


@jit()
def _dot(
    a: tl.tensor, b: tl.tensor, total: tl.tensor, PRECISION: tl.constexpr, SWAP: tl.constexpr
) -> tl.tensor:
    """total + a bᵀ, or with SWAP its transpose."""
    if SWAP:
        total = tl.dot(b, tl.trans(a), total, input_precision=PRECISION)
    else:
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    return total


@jit()
def _scaled_dot(
    a: tl.tensor, b: tl.tensor, total: tl.tensor, scale: tl.tensor, SWAP: tl.constexpr
) -> tl.tensor:
    """`_dot` of fp8 operands, with each row of `a` multiplied by its scale."""
    if SWAP:
        total += tl.dot(b, tl.trans(a)) * scale[None, :]
    else:
        total += tl.dot(a, tl.trans(b)) * scale[:, None]
    return total


@jit(unspecialized=("order", "tiles"), overlaps=True)
def _expert_matmul(
    x: tl.tensor,  # [tokens, K] for the first product, [slots, K] in sorted order for the second
    x_scales: tl.tensor,  # fp32 [.., ⌈K / 128⌉], if FORM is 1
    weight: tl.tensor,  # [EXPERTS, N, K]; if GATED, [EXPERTS, 2 · N, K] with the gate first
    scales: tl.tensor,  # fp32 [EXPERTS, .., ⌈K / 128⌉], if FORM is 1 or 2
    out: tl.tensor,  # [slots, N]: in sorted order for the first product, by slot for the second
    out_scales: tl.tensor,  # fp32 [slots, ⌈N / 128⌉], if `out` is fp8
    shares: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,  # whether this is the first product, which applies the activation
    GATED: tl.constexpr,  # the first product is act(gate) · up
    KIND: tl.constexpr,  # activation code
    FORM: tl.constexpr,  # 0: not quantised; 1: both fp8; 2: fp8 weights, rows are quantised here
    PRECISION: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute one tile of an expert's rows. Tiles of the same rows run at the same time, so that the rows
    stay in the cache."""
    if FIRST:
        wait_for_inputs()
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    groups: tl.constexpr = (K + 127) // 128
    halves: tl.constexpr = 2 if GATED else 1
    tile = tl.program_id(0) // across
    part = tl.program_id(0) % across
    expert = tl.load(tiles + tile * 4)
    if expert >= EXPERTS:
        if not FIRST:  # otherwise the next kernel could start before the first product has ended
            wait_for_inputs()
        return
    first = tl.load(tiles + tile * 4 + 1)
    end = tl.load(tiles + tile * 4 + 2)
    place = first + tl.arange(0, BLOCK_M)
    inside = place < end
    place = tl.where(inside, place, first)  # rows past the end are computed but not stored
    slot = tl.load(order + place)
    source = (slot // CHOSEN if FIRST else place).to(tl.int64)
    col = part * BLOCK_N + tl.arange(0, BLOCK_N)
    from_col = tl.minimum(col, N - 1)
    depth = tl.arange(0, BLOCK_K)
    x_at = x + source[:, None] * K + depth[None, :]
    w_at = weight + expert.to(tl.int64) * (halves * N * K) + from_col[:, None] * K + depth[None, :]
    # A tile of outputs is within one block of the weight, so it has one scale.
    share: tl.constexpr = (N + 127) // 128
    s_at = scales + (expert * (halves * share) + part * BLOCK_N // 128) * groups
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        other = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        other = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FORM != 0:
        scale = tl.load(s_at)
        other_scale = tl.load(s_at + share * groups) if GATED else scale
    if not FIRST:  # not needed above: routes were complete before the first product
        wait_for_inputs()
    if FORM == 1:
        by_row = tl.load(x_scales + source * groups)
    for start in range(0, K, BLOCK_K):
        if FORM != 0:  # load scales one group ahead, so that no product waits for them
            ahead = tl.minimum(start // 128 + 1, groups - 1)
            next_scale = tl.load(s_at + ahead)
            next_other = tl.load(s_at + share * groups + ahead) if GATED else next_scale
        if FORM == 1:
            next_by_row = tl.load(x_scales + source * groups + ahead)
        if K % BLOCK_K == 0:
            a = tl.load(x_at + start)
            b = tl.load(w_at + start)
            if GATED:
                c = tl.load(w_at + N * K + start)
        else:
            left = depth[None, :] < K - start
            a = tl.load(x_at + start, mask=left, other=0.0)
            b = tl.load(w_at + start, mask=left, other=0.0)
            if GATED:
                c = tl.load(w_at + N * K + start, mask=left, other=0.0)
        if FORM == 0:
            total = _dot(a, b, total, PRECISION, SWAP)
            if GATED:
                other = _dot(a, c, other, PRECISION, SWAP)
        else:
            if FORM == 1:
                small, factor = a, by_row
                by_row = next_by_row
            else:
                small, factor = quantize_group(a.to(tl.float32), weight)
            total = _scaled_dot(small, b, total, factor * scale, SWAP)
            if GATED:
                other = _scaled_dot(small, c, other, factor * other_scale, SWAP)
            scale = next_scale
            other_scale = next_other
    if SWAP:
        total = tl.trans(total)
        other = tl.trans(other)
    kept = inside[:, None] & (col[None, :] < N)
    if FIRST:
        value = activate(total, KIND)
        if GATED:
            value *= other
        at = place[:, None].to(tl.int64) * N + col[None, :]
        if out.dtype.element_ty.primitive_bitwidth == 8:
            small, scale = quantize_group(tl.where(kept, value, 0.0), out)
            tl.store(out + at, small, mask=kept)
            tl.store(out_scales + place.to(tl.int64) * share + part, scale, mask=inside)
        else:
            tl.store(out + at, value.to(out.dtype.element_ty), mask=kept)
    else:
        value = total * tl.load(shares + slot)[:, None]
        at = slot[:, None].to(tl.int64) * N + col[None, :]
        tl.store(out + at, value.to(out.dtype.element_ty), mask=kept)


@jit(overlaps=True)
def _sum_experts(
    expert_outputs: tl.tensor,  # [tokens · CHOSEN, WIDTH]
    residual: tl.tensor,
    bias: tl.tensor,  # [WIDTH]
    out: tl.tensor,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    wait_for_inputs()
    parts: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // parts).to(tl.int64)
    cols = (tl.program_id(0) % parts) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for n in tl.static_range(CHOSEN):
        total += tl.load(expert_outputs + (token * CHOSEN + n) * WIDTH + cols, mask=inside, other=0.0).to(
            tl.float32
        )
    if RESIDUAL:
        total += tl.load(residual + token * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + cols, total.to(out.dtype.element_ty), mask=inside)


def run_experts(
    x: Tensor,  # [tokens, hidden]
    logits: Tensor,  # [tokens, experts], output of the router
    up: Tensor | BlockQuantized,  # [experts, (2 ·) intermediate, hidden]; each half has its own scales
    down: Tensor | BlockQuantized,  # [experts, hidden, intermediate]
    *,
    chosen: int,
    normalize: bool,
    act: str,
    gated: bool = True,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    plan: ExpertTiling | None = None,
    first_expert: int | None = None,
) -> Tensor:
    """Sum share · down(act(gate(x)) · up(x)) over each token's experts, + residual + bias. [tokens, hidden]

    Experts that are not `gated` compute down(act(up(x))). The order of summation is fixed, so the same rows
    give the same bits. With `first_expert`, the weights are those of consecutive experts from this one on,
    and all other experts count as zero.
    """
    (tokens, hidden), fp8 = x.shape, isinstance(up, BlockQuantized)
    values = up.values if isinstance(up, BlockQuantized) else up
    experts, inner = len(values), values.shape[1] // (2 if gated else 1)
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    out = torch.empty_like(x)
    if not tokens:
        return out
    plan = plan or expert_tiling_for(tokens, chosen, logits.shape[1], fp8=fp8)
    routes = route(logits, chosen, normalize, plan.rows)
    if first_expert is not None:
        routes = _held_routes(routes, first_expert, experts)
    slots = tokens * chosen
    middle: Tensor | GroupQuantized
    if fp8 and plan.up.cols == GROUP:  # a tile holds whole groups, so the product can quantise its output
        middle = empty_groups(slots, inner, x.device)
    else:
        middle = torch.empty((slots, inner), dtype=x.dtype, device=x.device)
    rows = quantize_groups(x) if fp8 and plan.early else x
    expert_outputs = torch.empty((slots, hidden), dtype=x.dtype, device=x.device)
    if first_expert is not None:
        expert_outputs.zero_()
    expert_matmul(rows, up, middle, routes, plan.rows, plan.up, chosen, ACTIVATION_CODES[act], gated)
    expert_matmul(middle, down, expert_outputs, routes, plan.rows, plan.down, chosen, None)
    sum_expert_outputs(expert_outputs, residual, out, chosen, bias)
    return out


def _held_routes(routes: Routes, first: int, count: int) -> Routes:
    """Keep only routes to `count` experts from `first` on, numbered from 0. Other tiles become unused."""
    tiles = routes.tiles.clone()
    number = tiles[:, 0] - first
    tiles[:, 0] = torch.where((number >= 0) & (number < count), number, count)
    return routes._replace(tiles=tiles)


def sum_expert_outputs(
    expert_outputs: Tensor,
    residual: Tensor | None,
    out: Tensor,
    chosen: int,
    bias: Tensor | None = None,  # [width]
) -> None:
    """Write the sum of each token's slots [tokens · chosen, width] + residual + bias to `out`
    [tokens, width]."""
    tokens, width = out.shape
    block = min(next_power_of_2(width), 1024)
    _sum_experts[(tokens * cdiv(width, block),)](
        expert_outputs,
        expert_outputs if residual is None else residual,
        expert_outputs if bias is None else bias,
        out,
        CHOSEN=chosen,
        WIDTH=width,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        BLOCK=block,
        num_warps=4,
    )


def expert_matmul(
    x: Tensor | GroupQuantized,
    weight: Tensor | BlockQuantized,
    out: Tensor | GroupQuantized,
    routes: Routes,
    rows: int,
    tile: Tile,
    chosen: int,
    kind: int | None,  # activation code; None: the second product
    gated: bool = True,  # whether the first product has a gate
) -> None:
    values, scales = weight if isinstance(weight, BlockQuantized) else (weight, routes.shares)
    given, given_scales = x if isinstance(x, GroupQuantized) else (x, routes.shares)
    into, into_scales = out if isinstance(out, GroupQuantized) else (out, routes.shares)
    experts, outputs, inputs = values.shape
    assert values.is_contiguous() and scales.is_contiguous() and (GROUP % tile.cols == 0)
    gated = gated and kind is not None
    outputs //= 2 if gated else 1
    form = 0 if not isinstance(weight, BlockQuantized) else 1 if isinstance(x, GroupQuantized) else 2
    depth = tile.depth if form == 0 else GROUP
    tile_bytes = depth * (rows * given.itemsize + (2 if gated else 1) * tile.cols * values.itemsize)
    quantized_bytes = rows * depth if form == 2 else 0  # for rows that the product quantises
    stages = num_stages(tile.stages, tile_bytes, limits_of(values.device), quantized_bytes)
    _expert_matmul[(len(routes.tiles) * cdiv(outputs, tile.cols),)](
        given,
        given_scales,
        values,
        scales,
        into,
        into_scales,
        *routes,
        EXPERTS=experts,
        CHOSEN=chosen,
        N=outputs,
        K=inputs,
        FIRST=kind is not None,
        GATED=gated,
        KIND=kind or 0,
        FORM=form,
        PRECISION="ieee" if given.dtype == torch.float32 else "tf32",
        SWAP=tile.swap,
        BLOCK_M=rows,
        BLOCK_N=tile.cols,
        BLOCK_K=depth,
        num_warps=tile.warps,
        num_stages=stages,
    )
