"""Sampling kernels: noise, choice of a token, edits of logits, log probabilities.

Logits are read in place, in the model's dtype. The settings of a slot are a row of an int32 table on the
device (`penstock.sampling.plan.Column`), so a launch needs no number that changes from step to step. Only
edited rows have an fp32 copy, `work`.

Noise is Philox of (seed, stream, position, token), so it does not depend on the other rows of the batch.

If no token can be sampled from a row, it gets a negative id, `NON_FINITE_LOGITS` or `ALL_TOKENS_MASKED`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.language import cdiv, jit, next_power_of_2, tl, wait_for_inputs

LANES = 1024  # distance of the four tokens whose noise comes from one Philox counter
TOKENS_PER_PROGRAM = 4 * LANES
PHILOX_ROUNDS = 7  # enough to pass BigCrush
IN_PROMPT = 1 << 30  # bit of a token count: the token is in the prompt; lower bits: how often it was sampled
NON_FINITE_LOGITS = -1  # instead of a token: a logit is NaN or +inf
ALL_TOKENS_MASKED = -2  # instead of a token: every logit is −inf
MAX_SEQUENCE_ROWS = 32  # maximum rows of one sequence in a step with proposals
SLOT_TABLE_WIDTH = 15  # columns of the slot table, which kernels address by number:
# 0 temperature, 1 top-p, 2 min-p, 3 repetition, 4 presence, 5 frequency, 6–9 seed and stream, 10 top-k,
# 11 row of `counts`, 12 row of `masks`, 13 row of `work`, 14 min tokens.


def philox_reference(keys: Tensor, positions: Tensor, width: int) -> Tensor:
    """Random 32-bit words as int64 [rows, width]. `keys` int32 [rows, 4]: seed and stream, two words each."""
    low = 0xFFFFFFFF
    tiles = cdiv(width, TOKENS_PER_PROGRAM)
    words = keys.long() & low
    k0, k1, c2, c3 = (words[:, i, None] for i in range(4))
    lanes = min(LANES, width)  # a small vocabulary needs fewer
    c0 = torch.arange(tiles * lanes, device=keys.device)[None, :].expand(len(keys), -1)
    c1 = positions.long()[:, None]
    for _ in range(PHILOX_ROUNDS):
        high0, high2 = _high_product(0xD2511F53, c0), _high_product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, c2 * 0xCD9E8D57 & low, high0 ^ c3 ^ k1, c0 * 0xD2511F53 & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    parts = [word.reshape(-1, tiles, lanes) for word in (c0, c1, c2, c3)]
    return torch.stack(parts, dim=2).flatten(1)[:, :width]


def _high_product(a: int, b: Tensor) -> Tensor:
    """The upper 32 bits of a product of two 32-bit words, in signed 64-bit arithmetic."""
    return b * (a >> 16) + (b * (a & 0xFFFF) >> 16) >> 16


def gumbel_reference(keys: Tensor, positions: Tensor, width: int) -> Tensor:
    """Gumbel noise −log E, where E is exponential, fp32 [rows, width]."""
    uniform = philox_reference(keys, positions, width).float() * 2.0**-32
    uniform = uniform.clamp(2.0**-33, 1 - 2.0**-24)
    series = uniform * (1 + uniform * (0.5 + uniform * (1 / 3 + uniform * 0.25)))
    # The sampled token has a small u, where 1 − u loses all bits; the series keeps them.
    return -torch.where(uniform < 0.02, series, -torch.log(1 - uniform)).log()


@jit()
def _philox(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    for _ in tl.static_range(ROUNDS):
        a, b = c0, c2
        c0 = tl.umulhi(b, tl.full(b.shape, 0xCD9E8D57, tl.uint32)) ^ c1 ^ k0
        c2 = tl.umulhi(a, tl.full(a.shape, 0xD2511F53, tl.uint32)) ^ c3 ^ k1
        c1 = b * tl.full(b.shape, 0xCD9E8D57, tl.uint32)
        c3 = a * tl.full(a.shape, 0xD2511F53, tl.uint32)
        k0 += tl.full(k0.shape, 0x9E3779B9, tl.uint32)
        k1 += tl.full(k1.shape, 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@jit()
def _gumbel(word: tl.tensor) -> tl.tensor:
    u = word.to(tl.float32) * 2.3283064365386963e-10  # 2^-32
    u = tl.minimum(tl.maximum(u, 1.1641532182693481e-10), 0.99999994)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return -tl.log(tl.where(u < 0.02, series, -tl.log(1.0 - u)))


@jit()
def load_float(pointer: tl.tensor) -> tl.tensor:
    return tl.load(pointer).to(tl.float32, bitcast=True)


@jit()
def load_logits(logits, stride, row, work, work_row, cols, inside, VOCAB: tl.constexpr, EDITED: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 logits of a row: the edited copy if there is one, otherwise the model's."""
    at = row.to(tl.int64) * stride
    if EDITED:
        if work_row >= 0:
            x = tl.load(work + work_row.to(tl.int64) * VOCAB + cols, mask=inside, other=float("-inf"))
        else:
            x = tl.load(logits + at + cols, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(logits + at + cols, mask=inside, other=float("-inf")).to(tl.float32)
    return x


def sample_tokens_reference(
    logits: Tensor,  # [rows, vocab]
    temperatures: Tensor,  # [rows], 0: greedy
    keys: Tensor,  # int32 [rows, 4]
    positions: Tensor,  # [rows], number of tokens sampled before
    thresholds: Tensor | None = None,  # [rows], smallest logit that may be sampled; ignored for greedy rows
) -> Tensor:
    """argmax of logit / temperature + noise, or a negative code if there is none, int32 [rows]."""
    x = logits.float()
    noisy = x / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    if thresholds is not None:
        noisy = noisy.masked_fill(x < thresholds[:, None], float("-inf"))
    noisy = noisy + gumbel_reference(keys, positions, logits.shape[1])
    return argmax_tokens(torch.where((temperatures > 0)[:, None], noisy, x))


def argmax_tokens(values: Tensor) -> Tensor:
    """Index of the largest of `values` [rows, vocab], int32 [rows]; NaN counts as the largest."""
    most, at = values.max(dim=1)
    at = at.int().masked_fill_(most.isneginf(), ALL_TOKENS_MASKED)
    return at.masked_fill_(~(most < float("inf")), NON_FINITE_LOGITS)


@jit(unspecialized=("slots", "stride", "parts"), overlaps=True)
def _sample_parts(
    logits: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    work: tl.tensor,
    thresholds: tl.tensor,
    offsets: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    parts: tl.tensor,
    VOCAB: tl.constexpr,
    LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
    WIDTH: tl.constexpr,
    EDITED: tl.constexpr,
    FILTERED: tl.constexpr,
    OFFSETS: tl.constexpr,
) -> None:
    wait_for_inputs()
    program = tl.program_id(0)
    row = program // parts
    part = program % parts
    slot = tl.load(slots + row)
    line = table + slot * WIDTH
    temperature = load_float(line)
    work_row = tl.load(line + 13)
    bound = float("-inf")
    if FILTERED:
        bound = tl.load(thresholds + row)
    lanes = tl.arange(0, LANES)
    best = float("-inf")
    token = part * LANES * 4
    if temperature > 0:
        zeros = tl.zeros([LANES], tl.uint32)
        c0 = (part * LANES + lanes).to(tl.uint32)
        position = tl.load(positions + slot)
        if OFFSETS:
            position += tl.load(offsets + row)
        c1 = zeros + position.to(tl.uint32, bitcast=True)
        k0 = zeros + tl.load(line + 6).to(tl.uint32, bitcast=True)
        k1 = zeros + tl.load(line + 7).to(tl.uint32, bitcast=True)
        c2 = zeros + tl.load(line + 8).to(tl.uint32, bitcast=True)
        c3 = zeros + tl.load(line + 9).to(tl.uint32, bitcast=True)
        w0, w1, w2, w3 = _philox(c0, c1, c2, c3, k0, k1, ROUNDS)
        for j in tl.static_range(4):
            cols = part * LANES * 4 + j * LANES + lanes
            x = load_logits(logits, stride, row, work, work_row, cols, cols < VOCAB, VOCAB, EDITED)
            x = tl.where(x == x, x, float("inf"))  # `_sample_rows` reports it as non-finite
            if FILTERED:
                x = tl.where(x < bound, float("-inf"), x)  # the threshold of a non-finite row may be NaN
            word = w0 if j == 0 else (w1 if j == 1 else (w2 if j == 2 else w3))
            x = x / temperature + _gumbel(word)
            most, at = tl.max(x, axis=0, return_indices=True)
            better = most > best
            token = tl.where(better, part * LANES * 4 + j * LANES + at, token)
            best = tl.where(better, most, best)
    else:
        for j in tl.static_range(4):
            cols = part * LANES * 4 + j * LANES + lanes
            x = load_logits(logits, stride, row, work, work_row, cols, cols < VOCAB, VOCAB, EDITED)
            x = tl.where(x == x, x, float("inf"))
            most, at = tl.max(x, axis=0, return_indices=True)
            better = most > best
            token = tl.where(better, part * LANES * 4 + j * LANES + at, token)
            best = tl.where(better, most, best)
    tl.store(values + program, best)
    tl.store(ids + program, token)


@jit(unspecialized=("slots", "parts", "ring"), overlaps=True)
def _sample_rows(
    slots: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    parts: tl.tensor,
    counts: tl.tensor,
    tails: tl.tensor,
    ring: tl.tensor,
    last: tl.tensor,
    out: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNTS: tl.constexpr,
    TAIL: tl.constexpr,
    LAST: tl.constexpr,
    ADVANCES: tl.constexpr,
    NON_FINITE: tl.constexpr,
    ALL_MASKED: tl.constexpr,
) -> None:
    wait_for_inputs()
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    value = tl.load(values + row * parts + cols, mask=cols < parts, other=float("-inf"))
    token = tl.load(ids + row * parts + cols, mask=cols < parts, other=VOCAB)
    most = tl.max(value, axis=0)
    token = tl.min(tl.where(value == most, token, VOCAB - 1), axis=0)
    slot = tl.load(slots + row)
    position = tl.load(positions + slot)
    reported = tl.where(most == float("inf"), NON_FINITE, tl.where(most == float("-inf"), ALL_MASKED, token))
    tl.store(out + row, reported)
    if ADVANCES:
        tl.store(positions + slot, position + 1)
    if LAST:
        tl.store(last + slot, token)
    if COUNTS:
        count_row = tl.load(table + slot * WIDTH + 11)
        if count_row >= 0:
            at = counts + count_row.to(tl.int64) * VOCAB + token
            tl.store(at, tl.load(at) + 1)
    if TAIL:
        tl.store(tails + slot * ring + position % ring, token)


def sample_tokens(
    logits: Tensor,
    slots: Tensor,  # [rows]
    table: Tensor,  # int32 [slots, WIDTH]
    positions: Tensor,  # int32 [slots]
    *,
    work: Tensor | None = None,  # fp32 [edited rows, vocab]
    thresholds: Tensor | None = None,
    counts: Tensor | None = None,  # int32 [counted rows, vocab]
    tails: Tensor | None = None,  # int32 [slots, ring]
    last: Tensor | None = None,  # int32 [slots]
    offsets: Tensor | None = None,  # int32 [rows], earlier rows of the same slot
) -> Tensor:
    """Compute `sample_tokens_reference` with the settings of the slots, and record the tokens in the slots.

    Recording advances the slot's position and the token's count, and writes the ring of recent tokens and the
    last token. The recorded token is always in the vocabulary, even if the row has no valid token. Rows may
    be strided, logits may not.

    With `offsets`, a slot may have several rows, each at its own position. In that case `accept_proposals`,
    not this kernel, records positions and last tokens. Slots with counts or a ring have one row.
    """
    rows, vocab = logits.shape
    parts = cdiv(vocab, TOKENS_PER_PROGRAM)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return out
    _sample_parts[(rows * parts,)](
        logits,
        logits.stride(0),
        slots,
        table,
        positions,
        values if work is None else work,
        values if thresholds is None else thresholds,
        ids if offsets is None else offsets,
        values,
        ids,
        parts,
        VOCAB=vocab,
        LANES=LANES,
        ROUNDS=PHILOX_ROUNDS,
        WIDTH=SLOT_TABLE_WIDTH,
        EDITED=work is not None,
        FILTERED=thresholds is not None,
        OFFSETS=offsets is not None,
        num_warps=4,
    )
    _sample_rows[(rows,)](
        slots,
        table,
        positions,
        values,
        ids,
        parts,
        ids if counts is None else counts,
        ids if tails is None else tails,
        1 if tails is None else tails.shape[1],
        ids if last is None else last,
        out,
        VOCAB=vocab,
        BLOCK=next_power_of_2(parts),
        WIDTH=SLOT_TABLE_WIDTH,
        COUNTS=counts is not None,
        TAIL=tails is not None,
        LAST=last is not None and offsets is None,
        ADVANCES=offsets is None,
        NON_FINITE=NON_FINITE_LOGITS,
        ALL_MASKED=ALL_TOKENS_MASKED,
        num_warps=1,
    )
    return out


def num_accepted_reference(
    tokens: Tensor,  # int32 [rows], sampled
    proposed: Tensor,  # int32 [rows], -1: the last row of its sequence
    offsets: Tensor,  # int32 [rows], number of earlier rows of the same sequence
    firsts: Tensor,  # int32 [sequences], the first row of each
) -> Tensor:
    """Number of accepted proposals of each sequence, int32 [sequences]: those before the first rejected
    one."""
    differs = torch.where((tokens == proposed) & (proposed >= 0), MAX_SEQUENCE_ROWS, offsets)
    sequence = (offsets == 0).cumsum(0) - 1
    most = torch.full_like(firsts, MAX_SEQUENCE_ROWS)
    return most.scatter_reduce_(0, sequence, differs.to(most.dtype), "amin")


def accept_proposals_reference(
    tokens: Tensor,
    proposed: Tensor,
    offsets: Tensor,
    firsts: Tensor,
    slots: Tensor,  # [rows]
    positions: Tensor,  # int32 [slots]
    last: Tensor,  # int32 [slots]
) -> None:
    """Advance the position of each sequence's slot past its last accepted row, and record that row's sample
    as the slot's last token."""
    accepted = num_accepted_reference(tokens, proposed, offsets, firsts)
    rows, at = (firsts + accepted).long(), slots.long()[firsts.long()]
    positions.index_add_(0, at, accepted + 1)
    last.index_copy_(0, at, tokens[rows].clamp_min(0))


@jit(unspecialized=("slots", "sequences", "rows"))
def _accept_proposals(
    tokens: tl.tensor,
    proposed: tl.tensor,
    firsts: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    last: tl.tensor,
    sequences: tl.tensor,
    rows: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    first = tl.load(firsts + sequence)
    end = tl.load(firsts + sequence + 1, mask=sequence + 1 < sequences, other=rows)
    index = tl.arange(0, BLOCK)
    inside = first + index < end
    token = tl.load(tokens + first + index, mask=inside, other=-1)
    wanted = tl.load(proposed + first + index, mask=inside, other=-1)
    accepted = tl.min(tl.where((token == wanted) & (wanted >= 0), BLOCK, index), axis=0)
    newest = tl.max(tl.where(index == accepted, token, 0), axis=0)
    slot = tl.load(slots + first)
    tl.store(positions + slot, tl.load(positions + slot) + accepted + 1)
    tl.store(last + slot, newest)


def accept_proposals(
    tokens: Tensor, proposed: Tensor, firsts: Tensor, slots: Tensor, positions: Tensor, last: Tensor
) -> None:
    """Compute `accept_proposals_reference` in one launch; a sequence has at most `MAX_SEQUENCE_ROWS` rows."""
    _accept_proposals[(len(firsts),)](
        tokens,
        proposed,
        firsts,
        slots,
        positions,
        last,
        len(firsts),
        len(tokens),
        BLOCK=MAX_SEQUENCE_ROWS,
        num_warps=1,
    )


def apply_penalties_reference(
    logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Penalised logits, fp32 [rows, vocab]; penalties [rows]. Repetition also counts tokens of the prompt."""
    x = logits.float()
    sampled = counts & (IN_PROMPT - 1)
    repetition = repetition[:, None]
    x = torch.where(counts != 0, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency[:, None] * sampled - presence[:, None] * (sampled > 0)


@jit()
def _apply_penalties(x, count, line, IN_PROMPT: tl.constexpr):  # type: ignore[no-untyped-def]
    repetition = load_float(line + 3)
    sampled = count & (IN_PROMPT - 1)
    x = tl.where(count != 0, tl.where(x > 0, x / repetition, x * repetition), x)
    return (
        x - load_float(line + 5) * sampled.to(tl.float32) - tl.where(sampled > 0, load_float(line + 4), 0.0)
    )


@jit(unspecialized=("slots", "stride", "parts"))
def _edit_rows(
    logits: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    table: tl.tensor,
    masks: tl.tensor,
    counts: tl.tensor,
    work: tl.tensor,
    parts: tl.tensor,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    MASKS: tl.constexpr,
    COUNTS: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = program // parts
    line = table + tl.load(slots + row) * WIDTH
    work_row = tl.load(line + 13)
    if work_row >= 0:
        cols = (program % parts) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < VOCAB
        x = tl.load(logits + row.to(tl.int64) * stride + cols, mask=inside, other=0.0).to(tl.float32)
        if MASKS:
            mask_row = tl.load(line + 12)
            if mask_row >= 0:
                word = tl.load(masks + mask_row.to(tl.int64) * WORDS + cols // 32, mask=inside, other=0)
                x = tl.where((word >> (cols % 32)) & 1 != 0, x, float("-inf"))
        if COUNTS:
            count_row = tl.load(line + 11)
            if count_row >= 0:
                at = counts + count_row.to(tl.int64) * VOCAB + cols
                x = _apply_penalties(x, tl.load(at, mask=inside, other=0), line, IN_PROMPT)
        tl.store(work + work_row.to(tl.int64) * VOCAB + cols, x, mask=inside)


@jit(unspecialized=("slots", "stride", "ring", "first_entry", "first_prefix", "entries"))
def _edit_tokens(
    logits: tl.tensor,
    stride: tl.tensor,
    slots: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    masks: tl.tensor,
    counts: tl.tensor,
    tails: tl.tensor,
    ring: tl.tensor,
    entries: tl.tensor,
    first_entry: tl.tensor,
    first_prefix: tl.tensor,
    work: tl.tensor,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    MASKS: tl.constexpr,
    COUNTS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    line = table + slot * WIDTH
    begin = tl.load(entries + slot * 2)
    end = tl.load(entries + slot * 2 + 1)
    target = work + tl.load(line + 13).to(tl.int64) * VOCAB
    for start in range(begin, end, BLOCK):  # biases come before penalties, so start from the model's logit
        entry = start + tl.arange(0, BLOCK)
        kind = tl.load(entries + first_entry + entry * 4, mask=entry < end, other=-1)
        added = kind == 0
        token = tl.load(entries + first_entry + entry * 4 + 1, mask=added, other=0)
        bias = tl.load(entries + first_entry + entry * 4 + 2, mask=added, other=0)
        x = tl.load(logits + row.to(tl.int64) * stride + token, mask=added, other=0.0).to(tl.float32)
        x += bias.to(tl.float32, bitcast=True)
        if MASKS:
            mask_row = tl.load(line + 12)
            if mask_row >= 0:
                word = tl.load(masks + mask_row.to(tl.int64) * WORDS + token // 32, mask=added, other=0)
                x = tl.where((word >> (token % 32)) & 1 != 0, x, float("-inf"))
        if COUNTS:
            count_row = tl.load(line + 11)
            if count_row >= 0:
                count = tl.load(counts + count_row.to(tl.int64) * VOCAB + token, mask=added, other=0)
                x = _apply_penalties(x, count, line, IN_PROMPT)
        tl.store(target + token, x, mask=added)
    tl.debug_barrier()  # a token may have a bias and also be forbidden
    position = tl.load(positions + slot)
    early = position < tl.load(line + 14)
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        kind = tl.load(entries + first_entry + entry * 4, mask=entry < end, other=-1)
        token = tl.load(entries + first_entry + entry * 4 + 1, mask=entry < end, other=0)
        prefix = first_prefix + tl.load(entries + first_entry + entry * 4 + 2, mask=kind == 2, other=0)
        length = tl.load(entries + first_entry + entry * 4 + 3, mask=kind == 2, other=0)
        matched = (kind == 2) & (length <= position)
        for back in range(tl.max(length, axis=0)):
            asked = matched & (back < length)
            wanted = tl.load(entries + prefix + length - 1 - back, mask=asked, other=-1)
            found = tl.load(
                tails + slot * ring + (position - 1 - back) % ring, mask=back < position, other=-2
            )
            matched = matched & ((back >= length) | (wanted == found))
        forbidden = matched | ((kind == 1) & early)
        tl.store(target + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=forbidden)


def edit_logits(
    logits: Tensor,
    slots: Tensor,
    table: Tensor,
    positions: Tensor,
    work: Tensor,  # fp32 [edited rows, vocab], overwritten
    *,
    masks: Tensor | None = None,  # int32 [masked rows, ⌈vocab / 32⌉], one bit per allowed token
    counts: Tensor | None = None,  # int32 [counted rows, vocab]
    entries: Tensor | None = None,  # int32, in the layout of `SlotPlan.entries`
    num_entries: int = 0,
    tails: Tensor | None = None,  # int32 [slots, ring]
) -> None:
    """Write the fp32 copies of edited rows: masks, biases and forbidden tokens, penalties."""
    rows, vocab = logits.shape
    parts, words = cdiv(vocab, TOKENS_PER_PROGRAM), cdiv(vocab, 32)
    if not rows:
        return
    _edit_rows[(rows * parts,)](
        logits,
        logits.stride(0),
        slots,
        table,
        table if masks is None else masks,
        table if counts is None else counts,
        work,
        parts,
        VOCAB=vocab,
        WORDS=words,
        BLOCK=TOKENS_PER_PROGRAM,
        WIDTH=SLOT_TABLE_WIDTH,
        IN_PROMPT=IN_PROMPT,
        MASKS=masks is not None,
        COUNTS=counts is not None,
        num_warps=8,
    )
    if entries is None:
        return
    _edit_tokens[(rows,)](
        logits,
        logits.stride(0),
        slots,
        table,
        positions,
        table if masks is None else masks,
        table if counts is None else counts,
        table if tails is None else tails,
        1 if tails is None else tails.shape[1],
        entries,
        2 * len(table),
        2 * len(table) + 4 * num_entries,
        work,
        VOCAB=vocab,
        WORDS=words,
        BLOCK=128,
        WIDTH=SLOT_TABLE_WIDTH,
        IN_PROMPT=IN_PROMPT,
        MASKS=masks is not None,
        COUNTS=counts is not None,
        num_warps=4,
    )


def logsumexp_and_ranks_reference(logits: Tensor, rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """For `rows` [n] of the logits: fp32 logsumexp, and int32 rank of the `chosen` [n] token.

    Ranks start at 1; tokens with an equal logit rank before the chosen one.
    """
    taken = logits[rows.long()].float()
    value = taken.gather(1, chosen.long()[:, None])
    return taken.logsumexp(dim=1), (taken >= value).sum(dim=1, dtype=torch.int32)


@jit(unspecialized=("rows", "chosen", "stride", "parts"))
def _logsumexp_and_ranks(
    logits: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    chosen: tl.tensor,
    sums: tl.tensor,
    ranks: tl.tensor,
    parts: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    place = program // parts
    line = logits + tl.load(rows + place).to(tl.int64) * stride
    value = tl.load(line + tl.load(chosen + place)).to(tl.float32)
    cols = (program % parts) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < VOCAB
    x = tl.load(line + cols, mask=inside, other=float("-inf")).to(tl.float32)
    most = tl.max(x, axis=0)
    total = tl.sum(tl.where(x > float("-inf"), tl.exp(x - most), 0.0), axis=0)
    tl.store(sums + program, tl.where(most > float("-inf"), most + tl.log(total), float("-inf")))
    tl.store(ranks + program, tl.sum((inside & (x >= value)).to(tl.int32), axis=0))


def logsumexp_and_ranks(logits: Tensor, rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `logsumexp_and_ranks_reference` in one pass over the rows, without copying them."""
    count, vocab = len(rows), logits.shape[1]
    parts = cdiv(vocab, TOKENS_PER_PROGRAM)
    sums = torch.empty((count, parts), dtype=torch.float32, device=logits.device)
    ranks = torch.empty((count, parts), dtype=torch.int32, device=logits.device)
    if count:
        _logsumexp_and_ranks[(count * parts,)](
            logits,
            logits.stride(0),
            rows,
            chosen,
            sums,
            ranks,
            parts,
            VOCAB=vocab,
            BLOCK=TOKENS_PER_PROGRAM,
            num_warps=8,
        )
    return sums.logsumexp(dim=1), ranks.sum(dim=1, dtype=torch.int32)
