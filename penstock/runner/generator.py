"""The end of a step that generates: logits of the rows that sample, their tokens, and what the next step is
fed with. Sampled ids stay on the device; the CPU reads a copy when it comes to it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.layers.batch import Batch
from penstock.layers.head import TaskHead
from penstock.sampling.sampler import Sampler
from penstock.types import Ints, SamplePlan


class Generator:
    def __init__(self, head: TaskHead, slots: int, device: torch.device, seed: int | None = None) -> None:
        self.head = head
        self.sampler = Sampler(head.outputs, slots, device, seed)
        self.spare = slots  # the slot of rows without a request
        self.last = self.sampler.last  # the newest token of each slot

    def settle(self, sample: SamplePlan) -> None:
        """Let rows leave and join, whatever becomes of the step."""
        held = self.sampler.plan.held
        for slot in sample.leaves:
            if slot in held:  # a row may be gone before the sampler has heard of it
                self.sampler.leave(slot)
        for join in sample.joins:
            self.sampler.join(join.slot, join.params, join.prompt_ids, join.output_ids)
        for slot, mask in sample.masks:
            self.sampler.mask(slot, mask)

    @staticmethod
    def arrays(sample: SamplePlan) -> dict[str, Ints]:
        """What of the plan goes to the device."""
        arrays = {
            "sample_tokens": sample.tokens,
            "sample_slots": sample.sampled_slots,
            "fed_tokens": sample.fed_tokens,
            "fed_slots": sample.fed_slots,
        }
        if sample.prompts is not None:
            arrays |= {"prompt_tokens": sample.prompts.tokens, "prompt_following": sample.prompts.following}
        return arrays

    def feed(self, batch: Batch, sent: dict[str, Tensor]) -> Batch:
        """Put in the tokens that earlier steps have sampled."""
        if not len(sent["fed_tokens"]):
            return batch
        ids = self.last.index_select(0, sent["fed_slots"])
        return replace(batch, token_ids=batch.token_ids.index_copy(0, sent["fed_tokens"].long(), ids))

    def __call__(self, hidden: Tensor, sample: SamplePlan, sent: dict[str, Tensor]) -> list[Tensor]:
        """Sampled ids [sampled], then what was asked about them; hidden [tokens, hidden]."""
        out = self._sample(hidden, sample, sent)
        if sample.prompts is not None:
            states = hidden.index_select(0, sent["prompt_tokens"])
            out += self._scores(states, sent["prompt_following"].long(), sample.prompts.most)
        return out

    def _sample(self, hidden: Tensor, sample: SamplePlan, sent: dict[str, Tensor]) -> list[Tensor]:
        if not len(sample.tokens):
            return [self.last[:0]]
        logits = self.head.project(hidden.index_select(0, sent["sample_tokens"]))
        return self.choose(logits, sample, sent["sample_slots"])

    def choose(self, logits: Tensor, sample: SamplePlan, slots: Tensor) -> list[Tensor]:
        """The same of logits [sampled, vocabulary]; slots int32 [sampled]."""
        sampled = self.sampler(logits, sample.sampled_slots, slots)
        more = (sampled.logprob_ids, sampled.logprobs, sampled.ranks)
        return [sampled.token_ids, *(tensor for tensor in more if tensor is not None)]

    def _scores(self, states: Tensor, following: Tensor, most: int) -> list[Tensor]:
        """How likely known tokens were, a few at a time: logits of a whole prompt may not fit."""
        parts = []
        for some, after in zip(states.split(_AT_ONCE), following.split(_AT_ONCE), strict=True):
            values = self.head.project(some).float().log_softmax(dim=-1)
            own = values.gather(1, after[:, None])
            top, ids = values.topk(most, dim=-1)
            ranks = (values > own).sum(dim=-1, dtype=torch.int32) + 1
            parts.append((torch.cat([after[:, None], ids], 1).int(), torch.cat([own, top], 1), ranks))
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


_AT_ONCE = 256  # tokens whose logits are held together
