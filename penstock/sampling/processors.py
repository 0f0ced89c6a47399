"""Logits processors: masks, bias, bad words, min tokens, penalties.

They are applied in vLLM's order: allowed tokens, bad words, stop tokens before `min_tokens`, bias, penalties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.language import cdiv
from penstock.kernels.sampling import apply_penalties_reference, edit_logits
from penstock.sampling.penalties import TokenCounts, with_rows
from penstock.sampling.plan import Column, Need, SlotPlan, packed_bits
from penstock.types import Ints, SamplerParams

Send = Callable[[NDArray[np.int64] | NDArray[np.float32] | Ints], Tensor]
_MINUS_INFINITY = float("-inf")


class LogitsProcessors:
    """The device tables of the logits processors. A table is empty until a sequence needs it."""

    def __init__(self, plan: SlotPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.counts = TokenCounts(plan.vocab_size, device)
        self.masks = torch.zeros((0, cdiv(plan.vocab_size, 32)), dtype=torch.int32, device=device)
        self.work = torch.zeros((0, plan.vocab_size), device=device)
        self.tails = torch.zeros((plan.max_slots + 1, 1), dtype=torch.int32, device=device)
        self.entries: Tensor | None = None
        self._num_entries = 0
        self._entries_are_stale = False  # whether the plan's entries have changed since `entries` was sent
        # Slot → packed bits of its allowed ids. A grammar's mask is intersected with them.
        self._allowed: dict[int, Ints] = {}
        self._edits: dict[int, _Edits] = {}  # by slot, made on first use without a kernel
        self._pending_masks: dict[int, Ints] = {}  # mask row → packed bits to send
        self._pending_tails: dict[int, Ints] = {}  # slot → tokens sampled before it joined

    def join(self, slot: int, need: Need, params: SamplerParams, prompt_ids: Ints, output_ids: Ints) -> None:
        row = self.plan.table[slot]
        if need & Need.COUNTS:
            self.counts.put(int(row[Column.COUNT_ROW]), prompt_ids, output_ids)
        if params.allowed_token_ids is not None:
            bits = self._allowed[slot] = packed_bits(params.allowed_token_ids, self.plan.vocab_size)
            self._pending_masks[int(row[Column.MASK_ROW])] = bits
        if need & Need.TAIL:
            self._pending_tails[slot] = output_ids
        self._entries_are_stale |= bool(need & Need.ENTRIES)

    def leave(self, slot: int, had_entries: bool) -> None:
        self._entries_are_stale |= had_entries  # the next sequence of the slot may have none
        self._allowed.pop(slot, None)
        self._edits.pop(slot, None)
        self._pending_tails.pop(slot, None)

    def mask(self, slot: int, bits: Ints | None) -> bool:
        """Set the slot's mask. Return whether it had none before, which changes its settings."""
        words = self.masks.shape[1]
        if bits is not None and bits.shape != (words,):
            raise ValueError(f"the mask has {bits.shape} words; this vocabulary needs ({words},)")
        bits_to_send = np.full(words, -1, np.int32) if bits is None else bits.view(np.int32)
        if slot in self._allowed:
            bits_to_send = bits_to_send & self._allowed[slot]
        is_first = bool(self.plan.table[slot, Column.MASK_ROW] < 0)
        self._pending_masks[self.plan.add_mask(slot)] = bits_to_send
        return is_first

    def flush(self, send: Send) -> None:
        """Send changes since the last step, if there are any."""
        self.counts.flush(self.plan.counts.size, send)
        self.work = _at_least(self.work, self.plan.works.size)
        if self._pending_masks:
            self.masks = with_rows(self.masks, self.plan.masks.size)
            rows = np.fromiter(self._pending_masks, np.int32)
            sent = send(np.column_stack((rows, np.stack(list(self._pending_masks.values())))))
            self.masks.index_copy_(0, sent[:, 0].long(), sent[:, 1:])
            self._pending_masks.clear()
        if self._entries_are_stale:
            entries = self.plan.entries()
            self.entries, self._num_entries = send(entries.data), entries.num_entries
            self._entries_are_stale = False

    def flush_tails(self, positions: Tensor, send: Send) -> None:
        """Send the last tokens of new sequences, after the positions, which index the ring."""
        longest = self.plan.longest_word
        if longest > self.tails.shape[1]:
            self.tails = _wider(self.tails, positions, 1 << (longest - 1).bit_length())
        if self._pending_tails:
            ring = self.tails.shape[1]
            rows = np.zeros((len(self._pending_tails), 1 + ring), np.int32)
            for row, (slot, tokens) in zip(rows, self._pending_tails.items(), strict=True):
                row[0] = slot
                last = tokens[-ring:]
                row[1 + np.arange(len(tokens) - len(last), len(tokens)) % ring] = last
            sent = send(rows)
            self.tails.index_copy_(0, sent[:, 0].long(), sent[:, 1:])
            self._pending_tails.clear()

    def apply_by_kernel(
        self, logits: Tensor, slots: Tensor, table: Tensor, positions: Tensor, need: Need
    ) -> None:
        """Write edited logits to `work`."""
        edit_logits(
            logits,
            slots,
            table,
            positions,
            self.work,
            masks=self.masks if need & Need.MASK else None,
            counts=self.counts.table if need & Need.COUNTS else None,
            entries=self.entries if need & Need.ENTRIES else None,
            num_entries=self._num_entries,
            tails=self.tails if need & Need.TAIL else None,
        )

    def apply_by_torch_(self, x: Tensor, slot: int, position: int, send: Send) -> None:
        """Edit one row [vocab], fp32, in place; `position` is the number of tokens sampled before."""
        row, params = self.plan.table[slot], self.plan.held[slot]
        if row[Column.MASK_ROW] >= 0:
            x.masked_fill_(~_unpacked(self.masks[int(row[Column.MASK_ROW])])[: len(x)], _MINUS_INFINITY)
        if slot in self.plan.entries_of:
            if (edits := self._edits.get(slot)) is None:
                edits = self._edits[slot] = _edits(params, self.plan.vocab_size, send)
            self._forbid_words_(x, slot, position, edits)
            if position < params.min_tokens:
                x.index_fill_(0, edits.stops, _MINUS_INFINITY)
            x.index_add_(0, edits.biased, edits.bias)
        if row[Column.COUNT_ROW] >= 0:
            penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            counts = self.counts.table[int(row[Column.COUNT_ROW])]
            x.copy_(
                apply_penalties_reference(x[None], counts[None], *(x.new_full((1,), p) for p in penalties))[0]
            )

    def record(self, table: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor, need: Need) -> None:
        """Count and record sampled tokens by torch; `positions` [rows] are those before the step."""
        if need & Need.COUNTS:
            self.counts.add(table[slots, Column.COUNT_ROW], tokens)
        if need & Need.TAIL:
            self.tails[slots, positions.long() % self.tails.shape[1]] = tokens

    def _forbid_words_(self, x: Tensor, slot: int, position: int, edits: _Edits) -> None:
        """Forbid the last token of each bad word whose other tokens were just sampled."""
        if not len(edits.last_tokens):
            return
        width, ring = edits.prefixes.shape[1], self.tails.shape[1]
        back = (position - 1 - torch.arange(width, device=self.device)) % ring
        tail = self.tails[slot, back]  # the newest token first
        follows = ((edits.prefixes == tail) | (edits.prefixes < 0)).all(dim=1) & (edits.lengths <= position)
        zero = torch.zeros((), device=self.device)
        x.index_add_(0, edits.last_tokens, torch.where(follows, _MINUS_INFINITY, zero))


@dataclass(frozen=True, slots=True, eq=False)
class _Edits:
    """The single-token edits of one slot, for `apply_by_torch_`."""

    biased: Tensor  # [biased]
    bias: Tensor  # fp32 [biased]
    stops: Tensor  # [stop tokens]
    last_tokens: Tensor  # [bad words]
    prefixes: Tensor  # [bad words, longest], the other tokens in reverse order; -1: none
    lengths: Tensor  # [bad words], number of the other tokens


def _edits(params: SamplerParams, vocab_size: int, send: Send) -> _Edits:
    words = [word for word in params.bad_token_ids if word]
    longest = max((len(word) - 1 for word in words), default=0)
    prefixes = np.full((len(words), longest), -1, np.int32)
    for row, word in zip(prefixes, words, strict=True):
        row[: len(word) - 1] = word[-2::-1]
    stops = {token for token in (*params.stop_token_ids, *params.eos_token_ids) if token < vocab_size}

    def indices(values: Iterable[int]) -> Tensor:
        return send(np.fromiter(values, np.int64))

    return _Edits(
        biased=indices(params.logit_bias),
        bias=send(np.fromiter(params.logit_bias.values(), np.float32)),
        stops=indices(stops),
        last_tokens=indices(word[-1] for word in words),
        prefixes=send(prefixes),
        lengths=indices(len(word) - 1 for word in words),
    )


def _unpacked(words: Tensor) -> Tensor:
    """int32 [words] → bool [32 · words]"""
    return ((words[:, None] >> torch.arange(32, device=words.device)) & 1).bool().view(-1)


def _at_least(work: Tensor, rows: int) -> Tensor:
    """A buffer of at least `rows` rows. Contents are used within one step only, so nothing is copied."""
    if rows <= len(work):
        return work
    return torch.empty((1 << (rows - 1).bit_length(), work.shape[1]), device=work.device)


def _wider(tails: Tensor, positions: Tensor, ring: int) -> Tensor:
    """Copy the rings of last tokens to longer rings, with each token at its new index."""
    old = tails.shape[1]
    back = positions[:, None].long() - 1 - torch.arange(old, device=tails.device)  # [slots, old]
    out = tails.new_zeros((len(tails), ring))
    return out.scatter_(1, back % ring, tails.gather(1, back % old))
