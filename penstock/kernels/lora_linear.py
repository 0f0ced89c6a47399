"""A linear layer and the adapters of its lines in one launch: act(x Wᵀ + bias + B (A x)).

A Gluon kernel for Hopper, built like `gate_up`: one warp copies tiles by TMA, and two groups of four warps
multiply 64 lines each. Tiles of x in shared memory are multiplied by W, and by A for the first slots of the
128 lines. Every tile of columns computes A x again. This costs less than another launch, because the kernel
is limited by copies, not by the tensor cores. After the products each group adds B (A x) slot by slot, with
zeros for the lines of other slots. If a tile has more slots than fit, x is read again for the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.activation import ACTIVATION_CODES, act_reference, gated_activation_reference
from penstock.kernels.hopper import (
    act_of,
    can_describe,
    corner,
    descriptor,
    num_programs,
    tile_rows_together,
)
from penstock.kernels.language import HAS_GLUON, cdiv, gluon_jit
from penstock.kernels.lora import LowRank

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

TILE_LINES = _ROWS = 128
_OWN = 64  # lines per multiplying group of warps
_INNER = 64  # values of each line in one copy; the maximum of the shared-memory layout
_LOW = 64  # columns of A x that are computed together, for several slots
_DTYPES = (torch.bfloat16, torch.float16)


def lora_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapters: LowRank,
    slots: Tensor,
    act: str | None = None,
    gate_first: bool | None = None,
) -> Tensor:
    """Compute the layer with the adapter of each line, by `slots` [lines]; -1: no adapter.

    `gate_first` says whether a gate precedes its values; None: no gate.
    """
    y = F.linear(x, weight, bias)
    max_rank = adapters.up.shape[-1]
    for slot in range(len(adapters.ranks)):
        lines, first = (slots == slot).nonzero().squeeze(1), 0
        for part, end in enumerate(adapters.ends):
            rank = int(adapters.ranks[slot, part])
            down = adapters.down[slot, part * max_rank : part * max_rank + rank]
            y[lines, first:end] += x[lines] @ down.t() @ adapters.up[slot, first:end, :rank].t()
            first = end
    if gate_first is not None and act is not None:
        return gated_activation_reference(y, act, gate_first)
    return y if act is None else act_reference(y, act)


@gluon_jit()
def _next_slot(slots: gl.tensor, after: gl.tensor) -> gl.tensor:
    """The smallest slot above `after`, or 2³¹ - 1 if there is none."""
    return gl.min(gl.where(slots > after, slots, 2147483647), 0)


@gluon_jit()
def _next_slots(slots: gl.tensor, after: gl.tensor) -> gl.tuple:
    first = _next_slot(slots, after)
    second = _next_slot(slots, first)
    third = _next_slot(slots, second)
    return first, second, third, _next_slot(slots, third)


@gluon_jit()
def _load_slots(
    slots: gl.tensor, first: gl.tensor, tokens: gl.tensor, COUNT: gl.constexpr, LAYOUT: gl.constexpr
) -> gl.tensor:
    line = first + gl.arange(0, COUNT, LAYOUT)
    return gl.load(slots + line, mask=line < tokens, other=-1)


@gluon_jit()
def _copy(
    given: gl.tuple,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    STEP: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    CHUNKS: gl.constexpr,
    RANK: gl.constexpr,
    LOW: gl.constexpr,
    PAIRS: gl.constexpr,
    PARTS: gl.constexpr,
) -> None:
    sources, shared, grid, sizes = given
    x, weight, down, up, slots = sources
    xs, weights, downs, full, free, chunks, chunk_full, chunk_free = shared
    tokens, inner, second, outputs, end0, end1, max_rank, num_slots = sizes
    HALF: gl.constexpr = COLS // 2
    SLOTS: gl.constexpr = LOW // (PAIRS * RANK)  # slots computed together
    LAYOUT: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [1], [0])
    step = 0
    turn = 0
    row, col = corner(gl.program_id(0), grid, ROWS, STEP)
    own = _load_slots(slots, row, tokens, ROWS, LAYOUT)
    for tile in range(gl.program_id(0), grid[0] * grid[1], gl.num_programs(0)):
        row, col = corner(tile, grid, ROWS, STEP)
        following = min(tile + gl.num_programs(0), grid[0] * grid[1] - 1)
        next_row, _ = corner(following, grid, ROWS, STEP)
        upcoming = _load_slots(slots, next_row, tokens, ROWS, LAYOUT)  # loaded long before use
        part = (col >= end0).to(gl.int32) + (col >= end1).to(gl.int32) if PAIRS == 1 else 0
        first_col = col
        last = gl.to_tensor(-1)
        while last < 2147483647:
            # TMA reads rows past the end as zeros at no cost. Missing slots, and W after the first pass, are
            # read there.
            chosen = _next_slots(own, last)
            for k in range(0, inner, INNER):
                stage = step % STAGES
                mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
                ready = full.index(stage)
                mbarrier.expect(ready, (ROWS + COLS + LOW) * INNER * 2)  # bytes
                tma.async_copy_global_to_shared(x, [row, k], ready, xs.index(stage))
                both = weights.index(stage)
                other_col = gl.where(first_col < outputs, first_col + second, outputs)
                tma.async_copy_global_to_shared(weight, [first_col, k], ready, both.slice(0, HALF))
                tma.async_copy_global_to_shared(weight, [other_col, k], ready, both.slice(HALF, HALF))
                for i in gl.static_range(SLOTS):
                    for j in gl.static_range(PAIRS):
                        at = (gl.minimum(chosen[i], num_slots) * PARTS + part + j) * max_rank
                        place = downs.index(stage).slice((i * PAIRS + j) * RANK, RANK)
                        tma.async_copy_global_to_shared(down, [at, k], ready, place)
                step += 1
            for i in gl.static_range(SLOTS):
                if chosen[i] < 2147483647:
                    for j in gl.static_range(PAIRS):
                        stage = turn % CHUNKS
                        mbarrier.wait(chunk_free.index(stage), (turn // CHUNKS & 1) ^ 1)
                        ready = chunk_full.index(stage)
                        mbarrier.expect(ready, COLS * RANK * 2)
                        both = chunks.index(stage)
                        at = chosen[i] * outputs + col
                        upper = at if j == 0 else num_slots * outputs
                        lower = at + second if j == PAIRS - 1 else num_slots * outputs
                        tma.async_copy_global_to_shared(up, [upper, 0], ready, both.slice(0, HALF))
                        tma.async_copy_global_to_shared(up, [lower, 0], ready, both.slice(HALF, HALF))
                        turn += 1
            last = gl.where(_next_slot(own, chosen[SLOTS - 1]) < 2147483647, chosen[SLOTS - 1], 2147483647)
            first_col = outputs
        own = upcoming


@gluon_jit()
def _split(low: gl.tensor, ROWS: gl.constexpr, RANK: gl.constexpr, COUNT: gl.constexpr) -> gl.tuple:
    """Split [ROWS, COUNT · RANK] into pieces of RANK columns. Each value stays in its thread."""
    if COUNT == 1:
        pieces = (low,)
    elif COUNT == 2:
        pieces = gl.split(gl.permute(gl.reshape(low, (ROWS, 2, RANK)), (0, 2, 1)))
    else:
        halves = gl.reshape(gl.permute(gl.reshape(low, (ROWS, 4, RANK)), (0, 2, 1)), (ROWS, RANK, 2, 2))
        even, odd = gl.split(halves)
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        pieces = (first, second, third, fourth)  # type: ignore[assignment]
    return pieces


@gluon_jit()
def _add_low_rank(
    both: gl.tensor,
    low: gl.tensor,
    turn: gl.tensor,
    last: gl.tensor,
    of_line: gl.tensor,
    all_slots: gl.tensor,
    shared: gl.tuple,
    dtype: gl.constexpr,
    CHUNKS: gl.constexpr,
    RANK: gl.constexpr,
    LOW: gl.constexpr,
    PAIRS: gl.constexpr,
) -> gl.tuple:
    """Add B (A x) of the next slots after `last`. Also return the last slot that was added."""
    _, _, _, _, _, chunks, chunk_full, chunk_free = shared
    OWN: gl.constexpr = low.shape[0]
    SLOTS: gl.constexpr = LOW // (PAIRS * RANK)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, both.type.layout, 2)
    number = gl.arange(0, LOW, gl.SliceLayout(0, low.type.layout)) // (PAIRS * RANK)
    chosen = _next_slots(all_slots, last)
    of_column = number * 0 + 2147483647
    for i in gl.static_range(SLOTS):
        of_column = gl.where(number == i, chosen[i], of_column)
    pieces = _split(
        gl.where(of_line[:, None] == of_column[None, :], low, 0.0).to(dtype), OWN, RANK, SLOTS * PAIRS
    )
    for i in gl.static_range(SLOTS):
        if chosen[i] < 2147483647:
            for j in gl.static_range(PAIRS):
                stage = turn % CHUNKS
                mbarrier.wait(chunk_full.index(stage), turn // CHUNKS & 1)
                piece = gl.convert_layout(pieces[i * PAIRS + j], OPERAND)
                transposed = chunks.index(stage).permute((1, 0))
                both = warpgroup_mma(piece, transposed, both, is_async=True)
                both = warpgroup_mma_wait(0, (both,))
                mbarrier.arrive(chunk_free.index(stage), count=1)
                turn += 1
    return both, turn, chosen[SLOTS - 1]


@gluon_jit()
def _fast_act(x: gl.tensor, KIND: gl.constexpr) -> gl.tensor:
    """Apply an activation with the hardware's tanh, whose error is below half precision."""
    if KIND == 1 or KIND == 2:
        inner = x * (0.7978845608028654 + 0.035677408136300125 * x * x) if KIND == 1 else 0.5 * x
        tanh = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [inner], gl.float32, True, 1)
        value = 0.5 * x * (1.0 + tanh)
    else:
        value = act_of(x, KIND)
    return value


@gluon_jit()
def _multiply(
    given: gl.tuple,
    place: gl.tensor,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    STEP: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    CHUNKS: gl.constexpr,
    RANK: gl.constexpr,
    LOW: gl.constexpr,
    PAIRS: gl.constexpr,
    KIND: gl.constexpr,
    GATE_FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WHICH: gl.constexpr,
) -> None:
    out, bias, slots, shared, grid, sizes = given
    xs, weights, downs, full, free, _, _, _ = shared
    tokens, inner, second, outputs, _, _, _, _ = sizes
    OWN: gl.constexpr = ROWS // 2
    HALF: gl.constexpr = COLS // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    LOW_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LOW, 16])
    SPREAD: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [4], [0])
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), grid[0] * grid[1], gl.num_programs(0)):
        row, col = corner(tile, grid, ROWS, STEP)
        all_slots = _load_slots(slots, row, tokens, ROWS, SPREAD)  # loaded long before use
        line = row + WHICH * OWN + gl.arange(0, OWN, gl.SliceLayout(1, LOW_LAYOUT))
        of_line = gl.load(slots + line, mask=line < tokens, other=-1)
        both = gl.zeros((OWN, COLS), gl.float32, LAYOUT)
        low = gl.zeros((OWN, LOW), gl.float32, LOW_LAYOUT)
        for k in range(0, inner, INNER):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            rows = xs.index(stage).slice(WHICH * OWN, OWN)
            transposed = weights.index(stage).permute((1, 0))
            low = warpgroup_mma(rows, downs.index(stage).permute((1, 0)), low, use_acc=k > 0, is_async=True)
            both = warpgroup_mma(rows, transposed, both, use_acc=k > 0, is_async=True)
            both, low = warpgroup_mma_wait(1, (both, low))  # the previous product no longer needs its tiles
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        both, low = warpgroup_mma_wait(0, (both, low))
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
        both, turn, last = _add_low_rank(
            both, low, turn, -1, of_line, all_slots, shared, out.dtype, CHUNKS, RANK, LOW, PAIRS
        )
        while _next_slot(all_slots, last) < 2147483647:
            for k in range(0, inner, INNER):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                rows = xs.index(stage).slice(WHICH * OWN, OWN)
                transposed = downs.index(stage).permute((1, 0))
                low = warpgroup_mma(rows, transposed, low, use_acc=k > 0, is_async=True)
                low = warpgroup_mma_wait(0, (low,))
                mbarrier.arrive(free.index(stage), count=1)
                step += 1
            both, turn, last = _add_low_rank(
                both, low, turn, last, of_line, all_slots, shared, out.dtype, CHUNKS, RANK, LOW, PAIRS
            )
        if HAS_BIAS:
            within = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
            at = col + gl.where(within < HALF, within, within - HALF + second)
            both += gl.load(bias + at, mask=at < outputs, other=0.0).to(gl.float32)[None, :]
        tma.store_wait(0)  # wait until the previous tile is written
        if STEP < COLS:  # half of the tile is the gate
            upper, lower = gl.split(gl.permute(gl.reshape(both, (OWN, 2, HALF)), (0, 2, 1)))
            value = _fast_act(upper, KIND) * lower if GATE_FIRST else _fast_act(lower, KIND) * upper
            place.store(value.to(out.dtype))
        elif COLS == 256:
            upper, lower = gl.split(gl.permute(gl.reshape(both, (OWN, 2, HALF)), (0, 2, 1)))
            place.store((_fast_act(upper, KIND) if KIND >= 0 else upper).to(out.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [row + WHICH * OWN, col], place)
            value = (_fast_act(lower, KIND) if KIND >= 0 else lower).to(out.dtype)
            col += HALF
            tma.store_wait(0)
            place.store(value)
        else:
            place.store((_fast_act(both, KIND) if KIND >= 0 else both).to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [row + WHICH * OWN, col], place)
    tma.store_wait(0)


_UNSPECIALIZED = ("slots", "tokens", "inner", "second", "outputs", "end0", "end1", "max_rank", "num_slots")


@gluon_jit(unspecialized=(*_UNSPECIALIZED, "down_tiles", "across", "group"))
def _lora_linear(
    x: gl.tensor,
    weight: gl.tensor,
    out: gl.tensor,
    down: gl.tensor,  # [slots · PARTS · max_rank, inner]
    up: gl.tensor,  # [slots · outputs, max_rank]
    bias: gl.tensor,
    slots: gl.tensor,  # int32 [tokens]
    tokens: gl.tensor,
    inner: gl.tensor,
    second: gl.tensor,  # offset from the first half of a tile's columns to the second
    outputs: gl.tensor,
    end0: gl.tensor,
    end1: gl.tensor,
    max_rank: gl.tensor,
    num_slots: gl.tensor,
    down_tiles: gl.tensor,
    across: gl.tensor,
    group: gl.tensor,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    STEP: gl.constexpr,  # columns that a tile writes: COLS, or half of them if half is the gate
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    CHUNKS: gl.constexpr,  # tiles of B in shared memory
    RANK: gl.constexpr,
    LOW: gl.constexpr,
    PAIRS: gl.constexpr,  # pairs of A and B per slot: 2 if the halves of a tile belong to different parts
    PARTS: gl.constexpr,
    KIND: gl.constexpr,
    GATE_FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, INNER], x.layout)
    weights = gl.allocate_shared_memory(x.dtype, [STAGES, COLS, INNER], weight.layout)
    downs = gl.allocate_shared_memory(x.dtype, [STAGES, LOW, INNER], down.layout)
    chunks = gl.allocate_shared_memory(x.dtype, [CHUNKS, COLS, RANK], up.layout)
    staging = gl.allocate_shared_memory(x.dtype, [2, ROWS // 2, STEP if STEP < 128 else 128], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    chunk_full = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    chunk_free = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    for stage in gl.static_range(CHUNKS):
        mbarrier.init(chunk_full.index(stage), count=1)
        mbarrier.init(chunk_free.index(stage), count=2)
    fence_async_shared()
    shared = (xs, weights, downs, full, free, chunks, chunk_full, chunk_free)
    grid = (down_tiles, across, group)
    sizes = (tokens, inner, second, outputs, end0, end1, max_rank, num_slots)
    upper, lower = staging.index(0), staging.index(1)
    product = (out, bias, slots, shared, grid, sizes)
    copying = ((x, weight, down, up, slots), shared, grid, sizes)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    product,
                    upper,
                    ROWS,
                    COLS,
                    STEP,
                    INNER,
                    STAGES,
                    CHUNKS,
                    RANK,
                    LOW,
                    PAIRS,
                    KIND,
                    GATE_FIRST,
                    HAS_BIAS,
                    0,
                ),
            ),
            (
                _multiply,
                (
                    product,
                    lower,
                    ROWS,
                    COLS,
                    STEP,
                    INNER,
                    STAGES,
                    CHUNKS,
                    RANK,
                    LOW,
                    PAIRS,
                    KIND,
                    GATE_FIRST,
                    HAS_BIAS,
                    1,
                ),
            ),
            (_copy, (copying, ROWS, COLS, STEP, INNER, STAGES, CHUNKS, RANK, LOW, PAIRS, PARTS)),
        ],
        [4, 1],  # warps of the second and third partition
        [224, 56],  # registers per thread of these two; the first partition gets the rest
    )


class _Adapters(NamedTuple):
    """TMA descriptors of one layer's adapters, for a rank bucket."""

    of: LowRank
    down: Any
    up: Any


class LoraLinear:
    """Compute `lora_linear_reference` for one weight, which must not move."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        ends: tuple[int, ...],
        act: str | None = None,
        gate_first: bool | None = None,
    ) -> None:
        self.outputs, self.inner = weight.shape
        self.weight, self.bias, self.ends = weight, bias, ends
        self.is_gated = gate_first is not None
        self.width = self.outputs // 2 if self.is_gated else self.outputs
        self.pairs = 2 if self.is_gated and len(ends) == 2 else 1
        self.programs = num_programs(weight.device.index or 0)
        self.weights = {half: descriptor(weight, half, _INNER) for half in (64, 128)}
        self.constants = {
            # Like `Linear`, use the tanh form of GELU in half precision. It differs by less than rounding.
            "KIND": -1 if act is None else ACTIVATION_CODES["gelu_new" if act == "gelu" else act],
            "GATE_FIRST": bool(gate_first),
            "HAS_BIAS": bias is not None,
        }
        self._adapters: dict[tuple[int, int], _Adapters] = {}

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        ends: tuple[int, ...],
        act: str | None = None,
        gate_first: bool | None = None,
    ) -> LoraLinear | None:
        """Return the kernel, or None if it does not support this layer or this device."""
        if not HAS_GLUON or not weight.is_cuda or weight.dtype not in _DTYPES:
            return None
        if not num_programs(weight.device.index or 0) or not can_describe(weight):
            return None
        outputs, inner = weight.shape
        fits = outputs % 16 == 0 and inner % 8 == 0 and (act is None or act in ACTIVATION_CODES)
        if gate_first is None:
            fits = fits and all(end % 128 == 0 for end in ends[:-1])
        else:
            fits = fits and act is not None and (len(ends) == 1 or 2 * ends[0] == ends[1] == outputs)
        return cls(weight, bias, ends, act, gate_first) if fits else None

    def slots_per_pass(self, rank: int) -> int:
        """The number of slots of a tile that one pass over x can apply; 0 if the rank is too large."""
        return _LOW // (self.pairs * rank)

    def serves(self, x: Tensor, adapters: LowRank, slots: Tensor, rank: int) -> bool:
        """Whether the kernel supports these lines."""
        fits = self.slots_per_pass(rank) > 0 and adapters.gain is None and len(slots) == len(x)
        fits = fits and x.dtype is self.weight.dtype and can_describe(x)
        return fits and len(x) > 0

    def column_choices(self, rank: int) -> tuple[int, ...]:
        """The tile widths with which a tile has columns of only one part and B fits into shared memory."""
        splits_tiles = not self.is_gated and any(end % 256 for end in self.ends[:-1])
        return (128,) if rank > 32 or splits_tiles else (128, 256)

    def columns(self, lines: int, rank: int) -> int:
        """The fastest tile width. A tile of 128 columns takes a little more than half the time of one of
        256."""
        if self.column_choices(rank) == (128,):
            return 128
        down = cdiv(lines, _ROWS)
        step = 128 if self.is_gated else 256
        wide = cdiv(down * cdiv(self.width, step), self.programs)
        narrow = cdiv(down * cdiv(self.width, step // 2), self.programs)
        return 128 if 0.56 * narrow < wide else 256

    def __call__(
        self,
        x: Tensor,
        adapters: LowRank,
        slots: Tensor,
        rank: int,
        out: Tensor | None = None,
        cols: int | None = None,
    ) -> Tensor:
        """Run the layer. No slot's rank exceeds the bucket `rank`; A and B must be zero beyond a slot's rank.

        `cols`, 128 or 256, is set in measurements only.
        """
        lines, cols = len(x), cols or self.columns(len(x), rank)
        if out is None or len(out) != lines or out.shape[1] != self.width or not can_describe(out):
            out = x.new_empty((lines, self.width))
        parts, max_rank = len(self.ends), adapters.up.shape[-1]
        rank = min(rank, max_rank)
        half, step = cols // 2, cols // 2 if self.is_gated else cols
        down, across = cdiv(lines, _ROWS), cdiv(self.width, step)
        pairs = self._described(adapters, rank, half)
        ends = self.ends[0], self.ends[min(1, parts - 1)]
        _lora_linear[(min(down * across, self.programs),)](
            descriptor(x, _ROWS, _INNER),
            self.weights[half],
            descriptor(out, _OWN, min(step, 128)),
            pairs.down,
            pairs.up,
            adapters.ranks if self.bias is None else self.bias,
            slots,
            *(lines, self.inner, self.width if self.is_gated else half, self.outputs, *ends),
            *(max_rank, len(adapters.ranks), down, across, tile_rows_together(down)),
            **_tiling(cols, rank),
            STEP=step,
            PAIRS=self.pairs,
            PARTS=parts,
            **self.constants,
        )
        return out

    def _described(self, adapters: LowRank, rank: int, half: int) -> _Adapters:
        found = self._adapters.get((rank, half))
        if found is None or found.of is not adapters:
            down = adapters.down.view(-1, self.inner)
            up = adapters.up.view(-1, adapters.up.shape[-1])
            found = _Adapters(adapters, descriptor(down, rank, _INNER), descriptor(up, half, rank))
            self._adapters[rank, half] = found
        return found


def _tiling(cols: int, rank: int) -> dict[str, Any]:
    """The kernel's constants for a tile size. The stages fill the shared memory."""
    return {
        "ROWS": _ROWS,
        "COLS": cols,
        "INNER": _INNER,
        "STAGES": 3 if cols == 256 else 4,
        "CHUNKS": 4 if cols * rank <= 2048 else 1 if cols * rank > 8191 else 2,
        "RANK": rank,
        "LOW": _LOW,
        "num_warps": 4,  # warps of the first partition; those of the others are added
        "maxnreg": 168,  # average over all warps: the copying warp leaves registers to the others
    }
