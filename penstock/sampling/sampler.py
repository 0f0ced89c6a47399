"""The sampler: from the logits of a step's rows to one token for each row, on the device.

A slot's settings are sent when its sequence joins, and stay in a table on the device. The device also counts
the tokens that each slot has sampled. So a step without new sequences sends nothing. A step whose rows need
no logits processor reads the logits once and writes only tokens. Such a step can be captured in a graph
(`plain`), because the tensors that it reads are never reallocated.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.language import use_kernel
from penstock.kernels.logit_thresholds import logit_thresholds
from penstock.kernels.sampling import (
    accept_proposals,
    accept_proposals_reference,
    argmax_tokens,
    sample_tokens,
    sample_tokens_reference,
)
from penstock.sampling.filters import floats, min_kept_logits
from penstock.sampling.logprobs import LogprobTensors, token_logprobs
from penstock.sampling.plan import EDITS, WIDTH, Column, Need, SlotPlan
from penstock.sampling.processors import LogitsProcessors
from penstock.types import Ints, SamplerParams

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Sampled tokens of a step's rows, on the device, and log probabilities of rows that requested them."""

    token_ids: Tensor  # int32 [n], negative if none can be sampled (see `kernels.sampling`)
    logprobs: LogprobTensors | None = None  # [rows with log probabilities, 1 + their largest `logprobs`]
    logprob_rows: Ints | None = None  # [rows with log probabilities], rows of the step; on the host


class VerifyTensors(NamedTuple):
    """A `VerifyPlan` on the device."""

    proposed: Tensor  # int32 [n]
    offsets: Tensor  # int32 [n]
    firsts: Tensor  # int32 [sequences]


class Sampler:
    """Samples for the sequences in slots 0 … max_slots − 1; slot `max_slots` is for padding rows of a graph.

    `join`, `leave` and `mask` change state on the host; the next step sends the changes. The steps of a slot
    sample in order. A preempted sequence joins again with its `output_ids`.
    """

    def __init__(
        self, vocab_size: int, max_slots: int, device: torch.device, seed: int | None = None
    ) -> None:
        self.plan = SlotPlan(vocab_size, max_slots, secrets.randbits(64) if seed is None else seed)
        self.device = torch.device(device)
        self.uploads = 0  # copies from host to device so far
        self.table = self._send(self.plan.table).clone()  # int32 [slots, WIDTH]
        self.positions = torch.zeros(max_slots + 1, dtype=torch.int32, device=self.device)
        self.last = torch.zeros_like(self.positions)  # int32 [slots], last sampled token, never negative
        self._processors = LogitsProcessors(self.plan, self.device)
        self._joined: dict[int, int] = {}  # slot → number of tokens sampled before
        self._changed: set[int] = set()  # slots whose settings, but not positions, have to be sent
        self._rows_by_need: dict[Need, tuple[Ints, Tensor]] = {}  # rows by need, for the batch `_batch`
        self._batch: tuple[int, bytes] = (-1, b"")

    def join(
        self,
        slot: int,
        params: SamplerParams,
        prompt_ids: Ints,
        output_ids: Ints | None = None,
        stream: int | None = None,
    ) -> None:
        """Assign a slot to a sequence. `stream` is the noise stream if it has no seed; None: a new stream."""
        output_ids = _NOTHING if output_ids is None else output_ids
        need = self.plan.join(slot, params, len(output_ids), stream)
        self._processors.join(slot, need, params, prompt_ids, output_ids)
        self._joined[slot] = len(output_ids)

    def leave(self, slot: int) -> None:
        self._processors.leave(slot, self.plan.leave(slot))
        self._joined.pop(slot, None)
        self._changed.discard(slot)

    def rewind(self, slots: Ints, num_sampled: Ints) -> None:
        """Continue these slots at position `num_sampled`, with the noise of that position."""
        if not self.plan.rewind(slots, num_sampled) & Need.NOISE:
            return  # only noise depends on the position
        self.flush()
        at, positions = self._send(np.stack((slots, num_sampled)))
        self.positions.index_copy_(0, at.long(), positions)

    def mask(self, slot: int, bitmask: Ints | None) -> None:
        """Set the tokens that the slot may sample, 32 per word, lowest bit first; None: all tokens."""
        if slot not in self.plan.held:
            raise ValueError(f"slot {slot} is free; a sequence must join before its mask is set")
        if self._processors.mask(slot, bitmask):
            self._changed.add(slot)

    def __call__(
        self, logits: Tensor, slots: Ints, slots_device: Tensor, verify: VerifyTensors | None = None
    ) -> Sampled:
        """Sample one token for each row.

        With `verify`, a slot without logits processors may have several rows. Each row uses the noise of its
        own position. The slot continues after the last row whose preceding proposals were all accepted.
        """
        if logits.shape != (len(slots), self.plan.vocab_size):
            raise ValueError(
                f"logits have shape {tuple(logits.shape)}, not {(len(slots), self.plan.vocab_size)}"
            )
        self.flush()
        need = self.plan.step(slots)
        self._reset_rows(slots)
        offsets = None if verify is None else verify.offsets
        if not use_kernel(logits):
            tokens = self._by_torch(logits, slots, slots_device, need, verify)
        elif need & EDITS:
            tokens = self._by_kernels(logits, slots_device, need, offsets)
        else:
            tokens = self.plain(logits, slots_device, bool(need & Need.FILTER), offsets)
        if verify is not None and use_kernel(logits):
            proposed, _, firsts = verify
            accept_proposals(tokens, proposed, firsts, slots_device, self.positions, self.last)
        if not need & Need.LOGPROBS:
            return Sampled(tokens)
        rows, at = self._rows(Need.LOGPROBS, slots)
        top = int(self.plan.logprobs[slots].max())
        all_asked = len(rows) == len(slots)
        chosen = (tokens if all_asked else tokens.index_select(0, at)).clamp_min(0)
        return Sampled(tokens, token_logprobs(logits, chosen, top, None if all_asked else at), rows)

    def plain(
        self, logits: Tensor, slots_device: Tensor, filtered: bool = False, offsets: Tensor | None = None
    ) -> Tensor:
        """Sample rows that need only a temperature and, with `filtered`, top-k, top-p or min-p.

        It neither plans nor sends, so it can be captured in a graph. The owner of the graph checks
        `plan.need` first, calls `flush` before the replay, and calls `plan.step` once for each replay.
        """
        bounds = logit_thresholds(logits, slots_device, self.table) if filtered else None
        return sample_tokens(
            logits,
            slots_device,
            self.table,
            self.positions,
            thresholds=bounds,
            last=self.last,
            offsets=offsets,
        )

    def flush(self) -> None:
        """Send new and changed slots, if there are any."""
        self._processors.flush(self._send)
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
        self._processors.flush_tails(self.positions, self._send)

    def _by_kernels(self, logits: Tensor, slots: Tensor, need: Need, offsets: Tensor | None) -> Tensor:
        processors = self._processors
        processors.apply_by_kernel(logits, slots, self.table, self.positions, need)
        work = processors.work
        bounds = logit_thresholds(logits, slots, self.table, work=work) if need & Need.FILTER else None
        return sample_tokens(
            logits,
            slots,
            self.table,
            self.positions,
            work=work,
            thresholds=bounds,
            counts=processors.counts.table if need & Need.COUNTS else None,
            tails=processors.tails if need & Need.TAIL else None,
            last=self.last,
            offsets=offsets,
        )

    def _by_torch(
        self, logits: Tensor, slots: Ints, slots_device: Tensor, need: Need, verify: VerifyTensors | None
    ) -> Tensor:
        at = slots_device.long()
        positions = self.positions[at]
        if verify is not None:
            positions = positions + verify.offsets
        tokens = self._tokens(logits, slots, at, positions, need)
        noted = tokens.clamp_min(0)
        self._processors.record(self.table, at, positions, noted, need)
        if verify is not None:
            accept_proposals_reference(tokens, *verify, at, self.positions, self.last)
            return tokens
        self.last.index_copy_(0, at, noted)
        self.positions.index_add_(0, at, torch.ones_like(positions))
        return tokens

    def _tokens(self, logits: Tensor, slots: Ints, at: Tensor, positions: Tensor, need: Need) -> Tensor:
        if not need & (Need.NOISE | EDITS):
            return argmax_tokens(logits)
        rows, selected = self._rows(Need.NOISE | EDITS, slots)
        settings = self.table[at[selected]]
        x = logits[selected].float()
        for index, row in enumerate(rows.tolist()):
            slot = int(slots[row])
            if self.plan.table[slot, Column.WORK_ROW] >= 0:
                position = int(self.plan.generated[slot]) - 1
                self._processors.apply_by_torch_(x[index], slot, position, self._send)
        bounds = None
        if need & Need.FILTER:
            filtered = self._filtered(rows, slots)
            bounds = x.new_full((len(x),), float("-inf"))
            bounds[filtered] = min_kept_logits(x[filtered], settings[filtered])
        chosen = sample_tokens_reference(
            x,
            floats(settings)[:, Column.TEMPERATURE],
            settings[:, Column.KEY : Column.KEY + 4],
            positions[selected],
            bounds,
        )
        if len(rows) == len(slots):
            return chosen
        return argmax_tokens(logits).index_copy_(0, selected, chosen)

    def _reset_rows(self, slots: Ints) -> None:
        """Drop the cached rows if this batch differs from the previous one."""
        batch = (self.plan.version, slots.tobytes())
        if batch != self._batch:
            self._rows_by_need.clear()
            self._batch = batch

    def _rows(self, need: Need, slots: Ints) -> tuple[Ints, Tensor]:
        """The rows that have any of these flags, on the host and on the device; sent once per batch."""
        if need not in self._rows_by_need:
            rows = self.plan.rows(slots, need)
            self._rows_by_need[need] = rows, self._send(rows).long()
        return self._rows_by_need[need]

    def _filtered(self, rows: Ints, slots: Ints) -> Tensor:
        """The indices into `rows` of rows that have a filter."""
        if Need.FILTER not in self._rows_by_need:
            index = self.plan.rows(slots[rows], Need.FILTER)
            self._rows_by_need[Need.FILTER] = index, self._send(index).long()
        return self._rows_by_need[Need.FILTER][1]

    def _send(self, array: NDArray[Any]) -> Tensor:
        """Copy an array to the device. All copies of the sampler go through this method."""
        self.uploads += 1
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
