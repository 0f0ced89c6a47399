"""The sampler: logits of a step's rows in, a token for each out, all on the device.

A slot's settings are sent when its request joins and lie in a table from then on; how many tokens a slot
has sampled is counted on the device. So a step that nobody joins sends nothing, and one whose rows ask
for nothing reads the logits once and writes nothing but tokens. Such steps can be captured in a graph
(`plain`): what they read is never moved.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.language import use_kernel
from penstock.kernels.logit_thresholds import logit_thresholds
from penstock.kernels.sampling import argmax_tokens, sample_tokens, sample_tokens_reference
from penstock.sampling.edits import Edits
from penstock.sampling.filters import floats, least_kept
from penstock.sampling.logprobs import LogprobTensors, token_logprobs
from penstock.sampling.plan import EDITS, WIDTH, Column, Need, SlotPlan
from penstock.types import Ints, SamplerParams

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Sampled tokens of a step's rows, on the device, and log probabilities of the rows that asked."""

    token_ids: Tensor  # int32 [n], negative where none can be chosen (`kernels.sampling.UNSOUND`, `NOTHING`)
    logprobs: LogprobTensors | None = None  # [rows that asked, 1 + the most that one of them asked for]
    logprob_rows: Ints | None = None  # [rows that asked], their rows in the step; on the host


class Sampler:
    """Slots 0 … max_slots − 1 are requests'; slot `max_slots` asks for nothing, for rows that fill a graph.

    `join`, `leave` and `mask` work on the host and are sent with the next step. A slot's tokens come in the
    order of the steps that have it; one that was interrupted joins again with its `output_ids`.
    """

    def __init__(
        self, vocab_size: int, max_slots: int, device: torch.device, seed: int | None = None
    ) -> None:
        self.plan = SlotPlan(vocab_size, max_slots, secrets.randbits(64) if seed is None else seed)
        self.device = torch.device(device)
        self.uploads = 0  # copies from host to device so far
        self.table = self._send(self.plan.table).clone()  # int32 [slots, WIDTH]
        self.positions = torch.zeros(max_slots + 1, dtype=torch.int32, device=self.device)
        self.last = torch.zeros_like(
            self.positions
        )  # int32 [slots], the newest token, always of the vocabulary
        self._edits = Edits(self.plan, self.device)
        self._joined: dict[int, int] = {}  # slot → tokens sampled before
        self._changed: set[int] = set()  # slots whose row is to be sent, and nothing else
        self._chosen: dict[Need, tuple[Ints, Tensor]] = {}  # rows of the batch that is `_batch`
        self._batch: tuple[int, bytes] = (-1, b"")

    def join(
        self, slot: int, params: SamplerParams, prompt_ids: Ints, output_ids: Ints | None = None
    ) -> None:
        output_ids = _NOTHING if output_ids is None else output_ids
        need = self.plan.join(slot, params, len(output_ids))
        self._edits.join(slot, need, params, prompt_ids, output_ids)
        self._joined[slot] = len(output_ids)

    def leave(self, slot: int) -> None:
        self._edits.leave(slot, self.plan.leave(slot))
        self._joined.pop(slot, None)
        self._changed.discard(slot)

    def mask(self, slot: int, bitmask: Ints | None) -> None:
        """The tokens that the slot's next ones may be, 32 to a word and the lowest first; None: any."""
        if slot not in self.plan.held:
            raise ValueError(f"slot {slot} is held by no row")
        if self._edits.mask(slot, bitmask):
            self._changed.add(slot)

    def __call__(self, logits: Tensor, slots: Ints, slots_device: Tensor) -> Sampled:
        if logits.shape != (len(slots), self.plan.vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}, not {(len(slots), self.plan.vocab_size)}")
        self.flush()
        need = self.plan.step(slots)
        self._select(slots)
        if not use_kernel(logits):
            tokens = self._by_torch(logits, slots, slots_device, need)
        elif need & EDITS:
            tokens = self._by_kernels(logits, slots_device, need)
        else:
            tokens = self.plain(logits, slots_device, bool(need & Need.FILTER))
        if not need & Need.LOGPROBS:
            return Sampled(tokens)
        rows, at = self._rows(Need.LOGPROBS, slots)
        top = int(self.plan.logprobs[slots].max())
        all_asked = len(rows) == len(slots)
        chosen = (tokens if all_asked else tokens.index_select(0, at)).clamp_min(0)
        return Sampled(tokens, token_logprobs(logits, chosen, top, None if all_asked else at), rows)

    def plain(self, logits: Tensor, slots_device: Tensor, filtered: bool = False) -> Tensor:
        """Tokens of rows that ask for a temperature, and where `filtered` for top-k, top-p or min-p, but for
        nothing else. Neither plans nor sends: fit for a graph. Its owner asks `plan.need` whether it serves,
        and then calls `flush` before the replay and `plan.step` beside it."""
        bounds = logit_thresholds(logits, slots_device, self.table) if filtered else None
        return sample_tokens(
            logits, slots_device, self.table, self.positions, thresholds=bounds, last=self.last
        )

    def flush(self) -> None:
        """Sends what joined or changed; nothing if nobody did."""
        self._edits.flush(self._send)
        if self._joined or self._changed:
            slots = np.array([*self._joined, *self._changed.difference(self._joined)], np.int32)
            positions = np.array([self._joined.get(slot, -1) for slot in slots.tolist()], np.int32)
            sent = self._send(np.column_stack((slots, positions, self.plan.table[slots])))
            at = sent[:, 0].long()
            self.table.index_copy_(0, at, sent[:, 2 : 2 + WIDTH])
            new = torch.where(sent[:, 1] < 0, self.positions[at], sent[:, 1])
            self.positions.index_copy_(0, at, new)
            self._joined.clear()
            self._changed.clear()
        self._edits.flush_tails(self.positions, self._send)

    def _by_kernels(self, logits: Tensor, slots: Tensor, need: Need) -> Tensor:
        edits = self._edits
        edits.by_kernel(logits, slots, self.table, self.positions, need)
        work = edits.work
        bounds = logit_thresholds(logits, slots, self.table, work=work) if need & Need.FILTER else None
        return sample_tokens(
            logits,
            slots,
            self.table,
            self.positions,
            work=work,
            thresholds=bounds,
            counts=edits.counts.table if need & Need.COUNTS else None,
            tails=edits.tails if need & Need.TAIL else None,
            last=self.last,
        )

    def _by_torch(self, logits: Tensor, slots: Ints, slots_device: Tensor, need: Need) -> Tensor:
        at = slots_device.long()
        positions = self.positions[at]
        tokens = self._tokens(logits, slots, at, positions, need)
        noted = tokens.clamp_min(0)
        self._edits.note(self.table, at, positions, noted, need)
        self.last.index_copy_(0, at, noted)
        self.positions.index_add_(0, at, torch.ones_like(positions))
        return tokens

    def _tokens(self, logits: Tensor, slots: Ints, at: Tensor, positions: Tensor, need: Need) -> Tensor:
        if not need & (Need.NOISE | EDITS):
            return argmax_tokens(logits)
        rows, picked = self._rows(Need.NOISE | EDITS, slots)
        settings = self.table[at[picked]]
        x = logits[picked].float()
        for place, row in enumerate(rows.tolist()):
            slot = int(slots[row])
            if self.plan.table[slot, Column.WORK_ROW] >= 0:
                self._edits.by_torch_(x[place], slot, int(self.plan.generated[slot]) - 1)
        bounds = None
        if need & Need.FILTER:
            filtered = self._within(rows, slots)
            bounds = x.new_full((len(x),), float("-inf"))
            bounds[filtered] = least_kept(x[filtered], settings[filtered])
        chosen = sample_tokens_reference(
            x,
            floats(settings)[:, Column.TEMPERATURE],
            settings[:, Column.KEY : Column.KEY + 4],
            positions[picked],
            bounds,
        )
        if len(rows) == len(slots):
            return chosen
        return argmax_tokens(logits).index_copy_(0, picked, chosen)

    def _select(self, slots: Ints) -> None:
        """Forgets the chosen rows if this batch is another than the last."""
        batch = (self.plan.version, slots.tobytes())
        if batch != self._batch:
            self._chosen.clear()
            self._batch = batch

    def _rows(self, need: Need, slots: Ints) -> tuple[Ints, Tensor]:
        """The places of rows with one of the flags, here and on the device; sent once for a batch."""
        if need not in self._chosen:
            rows = self.plan.rows(slots, need)
            self._chosen[need] = rows, self._send(rows).long()
        return self._chosen[need]

    def _within(self, rows: Ints, slots: Ints) -> Tensor:
        """Of `rows`, the places of those that have a filter."""
        if Need.FILTER not in self._chosen:
            places = self.plan.rows(slots[rows], Need.FILTER)
            self._chosen[Need.FILTER] = places, self._send(places).long()
        return self._chosen[Need.FILTER][1]

    def _send(self, array: NDArray[Any]) -> Tensor:
        """The only way from host to device."""
        self.uploads += 1
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
