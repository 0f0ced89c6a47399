"""Top-k, top-p and min-p as a threshold on each row's logits, without sorting or copying the row.

The k-th largest of the maxima of all 256-token segments is a lower bound of the k-th largest logit. Only
logits that reach it are candidates, and the threshold is searched among them. If the top-p set has too many
candidates, the whole row is searched, two bits per pass. Weights are summed as integers, so results do not
depend on the order of programs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.language import cdiv, jit, next_power_of_2, tl
from penstock.kernels.sampling import SLOT_TABLE_WIDTH, TOKENS_PER_PROGRAM, load_float, load_logits

_SEGMENT = 256  # tokens per segment
_MAX_CANDIDATES = 4096  # candidates of a row; with more, the whole row is searched
_TOP_P_REACH = 12.0  # top-p candidates are at most this far below the maximum, in units of temperature


def logit_thresholds_reference(
    logits: Tensor,  # [rows, vocab]
    temperatures: Tensor,  # [rows]
    top_k: Tensor,  # [rows], 0: no limit
    top_p: Tensor,  # [rows]
    min_p: Tensor,  # [rows]
) -> Tensor:
    """Find the smallest logit to keep in each row, by sorting; equal logits are kept together. fp32 [rows]"""
    x = logits.float().sort(dim=1, descending=True).values
    most = x[:, :1]
    least = (most[:, 0] + temperatures * min_p.log()).masked_fill(min_p <= 0, float("-inf"))
    at = top_k.long().clamp(1, x.shape[1])[:, None] - 1
    least = torch.maximum(least, x.gather(1, at)[:, 0].masked_fill(top_k <= 0, float("-inf")))
    weights = ((x - most) / temperatures[:, None]).double().exp().masked_fill(x < least[:, None], 0.0)
    mass = weights.cumsum(dim=1)
    # A token is kept if the probability before it is less than top_p; the last one is the threshold.
    kept = (mass - weights < top_p[:, None] * mass[:, -1:]) & (x >= least[:, None])
    last = (kept.sum(dim=1, keepdim=True) - 1).clamp_min(0)
    nucleus = x.gather(1, last)[:, 0].masked_fill(top_p >= 1, float("-inf"))
    return torch.maximum(least, nucleus)


@jit()
def _ordered_key(x: tl.tensor) -> tl.tensor:
    """int32 keys in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def _from_ordered_key(key: tl.tensor) -> tl.tensor:
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def _weight(x, most, temperature):  # type: ignore[no-untyped-def]
    """exp((x − most) / temperature) in units of 2^-40. Sums of integers do not depend on their order."""
    e = tl.exp((x - most) / temperature)
    return (tl.where(x > float("-inf"), e, 0.0) * 1099511627776.0).to(tl.int64)


@jit(unspecialized=("slots", "stride", "parts"))
def _segment_maxima(
    logits: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    table: tl.tensor,
    work: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    parts: tl.tensor,
    VOCAB: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    EDITED: tl.constexpr,
) -> None:
    """Compute the maximum of each segment, and the part's sum of exponentials relative to its maximum."""
    program = tl.program_id(0)
    row = program // parts
    line = table + tl.load(slots + row) * WIDTH
    temperature = load_float(line)
    if (tl.load(line + 10) > 0) | (load_float(line + 1) < 1.0) | (load_float(line + 2) > 0.0):
        segment = tl.arange(0, SEGMENTS)
        cols = (program % parts) * SEGMENTS * SEGMENT + segment[:, None] * SEGMENT
        cols = cols + tl.arange(0, SEGMENT)[None, :]
        x = load_logits(logits, stride, row, work, tl.load(line + 13), cols, cols < VOCAB, VOCAB, EDITED)
        peak = tl.max(x, axis=1)
        most = tl.max(peak, axis=0)
        e = tl.where(x > float("-inf"), tl.exp((x - most) / temperature), 0.0)
        tl.store(peaks + program * SEGMENTS + segment, peak)
        tl.store(sums + program, tl.sum(tl.sum(e, axis=1), axis=0))


@jit(unspecialized=("slots", "segments"))
def _candidate_bounds(
    slots: tl.tensor,
    table: tl.tensor,
    peaks: tl.tensor,
    tops: tl.tensor,
    cuts: tl.tensor,
    found: tl.tensor,
    segments: tl.tensor,
    reach: tl.tensor,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Compute the smallest logit that is a candidate: at least k logits reach the k-th largest segment
    maximum."""
    row = tl.program_id(0)
    line = table + tl.load(slots + row) * WIDTH
    top_k = tl.load(line + 10)
    top_p = load_float(line + 1)
    min_p = load_float(line + 2)
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        cols = tl.arange(0, BLOCK)
        peak = tl.load(peaks + row * segments + cols, mask=cols < segments, other=float("-inf"))
        most = tl.max(peak, axis=0)
        temperature = load_float(line)
        cut = float("-inf")
        if min_p > 0.0:
            cut = most + temperature * tl.log(min_p)
        if top_k > 0:
            if top_k <= segments:
                keys = tl.where(cols < segments, _ordered_key(peak), -2147483648)
                low = tl.full([], -2139095041, tl.int64)  # the key of −inf
                high = _ordered_key(most).to(tl.int64)
                while low < high:
                    middle = low + (high - low + 1) // 2
                    enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= top_k
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle - 1)
                cut = tl.maximum(cut, _from_ordered_key(low.to(tl.int32)))
        elif top_p < 1.0:
            if min_p <= 0.0:
                cut = most - reach * temperature
        else:
            cut = float("inf")  # min-p alone needs no candidates
        tl.store(tops + row, most)
        tl.store(cuts + row, cut)
        tl.store(found + row, 0)


@jit(unspecialized=("slots", "stride", "parts"))
def _collect_candidates(
    logits: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    table: tl.tensor,
    work: tl.tensor,
    peaks: tl.tensor,
    cuts: tl.tensor,
    found: tl.tensor,
    candidates: tl.tensor,
    parts: tl.tensor,
    VOCAB: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    KEPT: tl.constexpr,
    WIDTH: tl.constexpr,
    EDITED: tl.constexpr,
) -> None:
    """Collect the logits that reach the bound, in any order."""
    program = tl.program_id(0)
    row = program // parts
    line = table + tl.load(slots + row) * WIDTH
    if (tl.load(line + 10) > 0) | (load_float(line + 1) < 1.0):
        cut = tl.load(cuts + row)
        peak = tl.load(peaks + program * SEGMENTS + tl.arange(0, SEGMENTS))
        if (tl.max(peak, axis=0) >= cut) & (tl.load(found + row) <= KEPT):
            cols = (program % parts) * SEGMENTS * SEGMENT + tl.arange(0, SEGMENTS * SEGMENT)
            inside = cols < VOCAB
            x = load_logits(logits, stride, row, work, tl.load(line + 13), cols, inside, VOCAB, EDITED)
            taken = (inside & (x >= cut)).to(tl.int32)
            first = tl.atomic_add(found + row, tl.sum(taken, axis=0))
            at = first + tl.cumsum(taken, axis=0) - 1
            tl.store(candidates + row * KEPT + at, x, mask=(taken != 0) & (at < KEPT))


@jit()
def _load_candidates(  # type: ignore[no-untyped-def]
    logits,
    stride,
    row,
    work,
    work_row,
    candidates,
    whole,
    cols,
    size,
    VOCAB: tl.constexpr,
    KEPT: tl.constexpr,
    EDITED: tl.constexpr,
):
    inside = cols < size
    if whole:
        x = load_logits(logits, stride, row, work, work_row, cols, inside, VOCAB, EDITED)
    else:
        x = tl.load(candidates + row * KEPT + cols, mask=inside, other=float("-inf"))
    return x


@jit(unspecialized=("slots", "stride", "parts"))
def _find_thresholds(
    logits: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    table: tl.tensor,
    work: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    tops: tl.tensor,
    cuts: tl.tensor,
    found: tl.tensor,
    candidates: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    KEPT: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    EDITED: tl.constexpr,
) -> None:
    """Search the threshold among the candidates, or in the whole row if they are too many or too improbable.

    Each pass fixes two bits of an ordered integer key. Bits that 16-bit logits never use are skipped.
    """
    row = tl.program_id(0)
    line = table + tl.load(slots + row) * WIDTH
    top_k = tl.load(line + 10)
    top_p = load_float(line + 1)
    min_p = load_float(line + 2)
    base = float("-inf")
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        temperature = load_float(line)
        most = tl.load(tops + row)
        work_row = tl.load(line + 13)
        shift = SHIFT
        if EDITED:
            shift = tl.where(work_row >= 0, 0, SHIFT)
        if min_p > 0.0:
            base = most + temperature * tl.log(min_p)
        if (top_k > 0) | (top_p < 1.0):
            count = tl.load(found + row)
            whole = count > KEPT
            size = tl.where(whole, VOCAB, count)
            lanes = tl.arange(0, KEPT)
            highest = (_ordered_key(most) >> shift).to(tl.int64)
            if top_k > 0:
                start = tl.where(whole, base, tl.load(cuts + row))
                low = (_ordered_key(start) >> shift).to(tl.int64)
                high = highest
                while low < high:
                    step = (high - low + 3) // 4
                    m1 = low + step
                    m2 = tl.minimum(m1 + step, high)
                    m3 = tl.minimum(m2 + step, high)
                    f1 = tl.zeros([KEPT], tl.int32)
                    f2 = tl.zeros([KEPT], tl.int32)
                    f3 = tl.zeros([KEPT], tl.int32)
                    for first in range(0, size, KEPT):
                        cols = first + lanes
                        x = _load_candidates(
                            logits,
                            stride,
                            row,
                            work,
                            work_row,
                            candidates,
                            whole,
                            cols,
                            size,
                            VOCAB,
                            KEPT,
                            EDITED,
                        )
                        key = tl.where(cols < size, (_ordered_key(x) >> shift).to(tl.int64), low)
                        f1 += (key >= m1).to(tl.int32)
                        f2 += (key >= m2).to(tl.int32)
                        f3 += (key >= m3).to(tl.int32)
                    enough1 = tl.sum(f1, axis=0) >= top_k
                    enough2 = tl.sum(f2, axis=0) >= top_k
                    enough3 = tl.sum(f3, axis=0) >= top_k
                    high = tl.where(
                        enough3, high, tl.where(enough2, m3 - 1, tl.where(enough1, m2 - 1, m1 - 1))
                    )
                    low = tl.where(enough3, m3, tl.where(enough2, m2, tl.where(enough1, m1, low)))
                base = tl.maximum(base, _from_ordered_key((low << shift).to(tl.int32)))
            if top_p < 1.0:
                total = tl.zeros([KEPT], tl.int64)
                for first in range(0, size, KEPT):
                    cols = first + lanes
                    x = _load_candidates(
                        logits,
                        stride,
                        row,
                        work,
                        work_row,
                        candidates,
                        whole,
                        cols,
                        size,
                        VOCAB,
                        KEPT,
                        EDITED,
                    )
                    total += tl.where((cols < size) & (x >= base), _weight(x, most, temperature), 0)
                mass = tl.sum(total, axis=0)
                if (top_k == 0) & (min_p <= 0.0):
                    # Logits below the candidates count too. The parts are added in a fixed order.
                    part = tl.arange(0, PARTS)
                    own = part < parts
                    peak = tl.full([PARTS], float("-inf"), tl.float32)
                    for segment in tl.static_range(SEGMENTS):
                        at = peaks + (row * parts + part) * SEGMENTS + segment
                        peak = tl.maximum(peak, tl.load(at, mask=own, other=float("-inf")))
                    summed = tl.load(sums + row * parts + part, mask=own, other=0.0)
                    scaled = summed * tl.where(peak > float("-inf"), tl.exp((peak - most) / temperature), 0.0)
                    everything = (tl.sum(scaled, axis=0) * 1099511627776.0).to(tl.int64)
                    needed = (top_p * everything.to(tl.float32)).to(tl.int64)
                    whole = whole | (mass < needed)
                    size = tl.where(whole, VOCAB, count)
                    mass = everything
                needed = tl.maximum((top_p * mass.to(tl.float32)).to(tl.int64), 1)
                start = tl.where(whole, base, tl.maximum(base, tl.load(cuts + row)))
                low = (_ordered_key(start) >> shift).to(tl.int64)
                high = highest
                while low < high:
                    step = (high - low + 3) // 4
                    m1 = low + step
                    m2 = tl.minimum(m1 + step, high)
                    m3 = tl.minimum(m2 + step, high)
                    g1 = tl.zeros([KEPT], tl.int64)
                    g2 = tl.zeros([KEPT], tl.int64)
                    g3 = tl.zeros([KEPT], tl.int64)
                    for first in range(0, size, KEPT):
                        cols = first + lanes
                        x = _load_candidates(
                            logits,
                            stride,
                            row,
                            work,
                            work_row,
                            candidates,
                            whole,
                            cols,
                            size,
                            VOCAB,
                            KEPT,
                            EDITED,
                        )
                        weight = tl.where(cols < size, _weight(x, most, temperature), 0)
                        key = (_ordered_key(x) >> shift).to(tl.int64)
                        g1 += tl.where(key >= m1, weight, 0)
                        g2 += tl.where(key >= m2, weight, 0)
                        g3 += tl.where(key >= m3, weight, 0)
                    enough1 = tl.sum(g1, axis=0) >= needed
                    enough2 = tl.sum(g2, axis=0) >= needed
                    enough3 = tl.sum(g3, axis=0) >= needed
                    high = tl.where(
                        enough3, high, tl.where(enough2, m3 - 1, tl.where(enough1, m2 - 1, m1 - 1))
                    )
                    low = tl.where(enough3, m3, tl.where(enough2, m2, tl.where(enough1, m1, low)))
                base = tl.maximum(base, _from_ordered_key((low << shift).to(tl.int32)))
    tl.store(out + row, base)


# Number of low fp32 bits that are always 0 in logits of this dtype.
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13}


def logit_thresholds(logits: Tensor, slots: Tensor, table: Tensor, *, work: Tensor | None = None) -> Tensor:
    """Compute `logit_thresholds_reference` for rows whose slots have a filter; −inf for others."""
    rows, vocab = logits.shape
    device = logits.device
    parts, inner = cdiv(vocab, TOKENS_PER_PROGRAM), TOKENS_PER_PROGRAM // _SEGMENT
    peaks = torch.empty((rows, parts * inner), dtype=torch.float32, device=device)
    sums = torch.empty((rows, parts), dtype=torch.float32, device=device)
    tops, cuts, out = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3))
    found = torch.empty(rows, dtype=torch.int32, device=device)
    candidates = torch.empty((rows, _MAX_CANDIDATES), dtype=torch.float32, device=device)
    if not rows:
        return out
    edited = peaks if work is None else work
    shape = {"VOCAB": vocab, "WIDTH": SLOT_TABLE_WIDTH, "EDITED": work is not None, "SEGMENTS": inner}
    read = (logits, logits.stride(0), slots, table, edited)
    _segment_maxima[(rows * parts,)](*read, peaks, sums, parts, SEGMENT=_SEGMENT, num_warps=8, **shape)
    _candidate_bounds[(rows,)](
        slots,
        table,
        peaks,
        tops,
        cuts,
        found,
        parts * inner,
        _TOP_P_REACH,
        BLOCK=next_power_of_2(parts * inner),
        WIDTH=SLOT_TABLE_WIDTH,
        num_warps=4,
    )
    _collect_candidates[(rows * parts,)](
        *read,
        peaks,
        cuts,
        found,
        candidates,
        parts,
        SEGMENT=_SEGMENT,
        KEPT=_MAX_CANDIDATES,
        num_warps=8,
        **shape,
    )
    _find_thresholds[(rows,)](
        *read,
        peaks,
        sums,
        tops,
        cuts,
        found,
        candidates,
        out,
        parts,
        PARTS=next_power_of_2(parts),
        KEPT=_MAX_CANDIDATES,
        SHIFT=_UNUSED_BITS.get(logits.dtype, 0),
        num_warps=16,
        **shape,
    )
    return out
