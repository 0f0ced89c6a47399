"""The end of a step that generates: logits of the rows that sample, their tokens, and what the next step is
fed with. Sampled ids stay on the device; the CPU reads a copy when it comes to it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.core import Ints, SamplePlan
from penstock.layers.batch import Batch
from penstock.layers.head import TaskHead
from penstock.sampling.sampler import Sampler


class Generator:
    def __init__(self, head: TaskHead, slots: int, device: torch.device, seed: int | None = None) -> None:
        self.head = head
        self.sampler = Sampler(head.outputs, slots, device, seed)
        self.last = torch.zeros(slots, dtype=torch.int32, device=device)  # the newest token of each slot

    def settle(self, sample: SamplePlan) -> None:
        """Let rows leave and join, whatever becomes of the step."""
        held = self.sampler.plan.held
        for slot in sample.leaves:
            if slot in held:  # a row may be gone before the sampler has heard of it
                self.sampler.leave(slot)
        for join in sample.joins:
            self.sampler.join(join.slot, join.params, join.prompt_ids, join.output_ids)
        for slot, bits in sample.masks:
            self.sampler.mask(slot, bits)

    @staticmethod
    def arrays(sample: SamplePlan) -> dict[str, Ints]:
        """What of the plan goes to the device."""
        return {
            "sample_tokens": sample.tokens,
            "sample_slots": sample.sampled_slots,
            "fed_tokens": sample.fed_tokens,
            "fed_slots": sample.fed_slots,
        }

    def feed(self, batch: Batch, sent: dict[str, Tensor]) -> Batch:
        """Put in the tokens that earlier steps have sampled."""
        if not len(sent["fed_tokens"]):
            return batch
        ids = self.last.index_select(0, sent["fed_slots"])
        return replace(batch, token_ids=batch.token_ids.index_copy(0, sent["fed_tokens"].long(), ids))

    def __call__(self, hidden: Tensor, sample: SamplePlan, sent: dict[str, Tensor]) -> list[Tensor]:
        """Sampled ids [sampled], then what was asked about them; hidden [tokens, hidden]."""
        if not len(sample.tokens):
            return [self.last[:0]]
        logits = self.head.project(hidden.index_select(0, sent["sample_tokens"]))
        sampled = self.sampler(logits, sample.sampled_slots, sent["sample_slots"])
        ids = sampled.token_ids
        self.last.index_copy_(0, sent["sample_slots"].long(), ids)
        more = (sampled.logprob_ids, sampled.logprobs, sampled.ranks)
        return [ids, *(tensor for tensor in more if tensor is not None)]
