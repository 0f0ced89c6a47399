"""The end of a generation step: logits of the rows that sample, their tokens, and the tokens fed to the next
step. Sampled ids stay on the device; the CPU reads a copy later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.layers.adapter_state import StepAdapters
from penstock.layers.batch import Batch
from penstock.layers.head import TaskHead
from penstock.sampling.logprobs import LogprobTensors
from penstock.sampling.sampler import Sampler, VerifyTensors
from penstock.types import Ints, PromptPlan, SamplePlan, VerifyPlan

TOKENS_AT_ONCE = 256  # prompt tokens whose logits exist at the same time


class PromptTensors(NamedTuple):
    """A `PromptPlan` on the device."""

    tokens: Tensor  # int32 [scored]
    next_tokens: Tensor  # int32 [scored]
    max_logprobs: int


class SampleTensors(NamedTuple):
    """A `SamplePlan` on the device."""

    sampled_tokens: Tensor  # int32 [sampled]
    sampled_slots: Tensor  # int32 [sampled]
    fed_tokens: Tensor  # int32 [fed]
    fed_slots: Tensor  # int32 [fed]
    prompts: PromptTensors | None
    verify: VerifyTensors | None = None

    @staticmethod
    def arrays(sample: SamplePlan) -> list[Ints]:
        arrays = [sample.sampled_tokens, sample.sampled_slots, sample.fed_tokens, sample.fed_slots]
        if sample.prompts is not None:
            arrays += (sample.prompts.tokens, sample.prompts.next_tokens)
        if sample.verify is not None:
            arrays += verify_arrays(sample.verify)
        return arrays

    @classmethod
    def take(cls, sample: SamplePlan, sent: Iterator[Tensor]) -> SampleTensors:
        """Take the tensors of `arrays`, in the same order."""
        sampled_tokens, sampled_slots, fed_tokens, fed_slots = next(sent), next(sent), next(sent), next(sent)
        prompts = None if sample.prompts is None else _prompt_tensors(sample.prompts, sent)
        verify = None if sample.verify is None else VerifyTensors(next(sent), next(sent), next(sent))
        return cls(sampled_tokens, sampled_slots, fed_tokens, fed_slots, prompts, verify)


def verify_arrays(verify: VerifyPlan) -> list[Ints]:
    """The arrays of `VerifyTensors`, in the same order."""
    return [verify.proposed, verify.offsets, verify.firsts]


def _prompt_tensors(prompts: PromptPlan, sent: Iterator[Tensor]) -> PromptTensors:
    return PromptTensors(next(sent), next(sent), prompts.max_logprobs)


class GeneratedTensors(NamedTuple):
    """The results of a generation step, on the device."""

    token_ids: Tensor  # int32 [sampled]
    logprobs: LogprobTensors | None = None  # of the sampled rows that request them
    prompt_logprobs: LogprobTensors | None = None  # of the scored prompt tokens

    def tensors(self) -> list[Tensor]:
        return [self.token_ids, *(self.logprobs or ()), *(self.prompt_logprobs or ())]


def feed_tokens(batch: Batch, sample: SampleTensors, last: Tensor) -> Batch:
    """Fill in the newest tokens of slots. `last` [slots] holds them."""
    if not len(sample.fed_tokens):
        return batch
    ids = last.index_select(0, sample.fed_slots)
    return replace(batch, token_ids=batch.token_ids.index_copy(0, sample.fed_tokens.long(), ids))


class Generator:
    def __init__(self, head: TaskHead, slots: int, device: torch.device, seed: int | None = None) -> None:
        self.head = head
        self.sampler = Sampler(head.outputs, slots, device, seed)
        self.padding_slot = slots
        self.max_rows = slots  # rows that sample in one step; speculation raises it
        self.last = self.sampler.last  # the newest token of each slot

    def update_slots(self, sample: SamplePlan) -> None:
        """Remove and add sequences. The changes stay even if the step fails."""
        held = self.sampler.plan.held
        for slot in sample.leaves:
            if slot in held:  # a sequence may leave before it has joined the sampler
                self.sampler.leave(slot)
        for join in sample.joins:
            self.sampler.join(join.slot, join.params, join.prompt_ids, join.output_ids, join.stream)
        for slot, mask in sample.masks:
            self.sampler.mask(slot, mask)
        if sample.rewind is not None:
            self.sampler.rewind(*sample.rewind)

    def feed(self, batch: Batch, sample: SampleTensors) -> Batch:
        """Fill in the tokens that earlier steps have sampled."""
        return feed_tokens(batch, sample, self.last)

    def __call__(
        self,
        hidden: Tensor,
        sample: SamplePlan,
        tensors: SampleTensors,
        adapters: StepAdapters | None = None,
    ) -> GeneratedTensors:
        """Sample from the hidden states [tokens, hidden]."""
        if not len(sample.sampled_tokens):
            sampled = GeneratedTensors(self.last[:0])
        else:
            if adapters is not None:
                adapters.use("rows")
            logits = self.head.project(hidden.index_select(0, tensors.sampled_tokens))
            sampled = self.choose(logits, sample, tensors.sampled_slots, tensors.verify)
        if (prompts := tensors.prompts) is None:
            return sampled
        states = hidden.index_select(0, prompts.tokens)
        slots = None
        if adapters is not None and adapters.row_slots is not None and sample.prompts is not None:
            slots = np.repeat(adapters.row_slots[sample.prompts.rows], sample.prompts.counts)
        logprobs = self._prompt_logprobs(states, prompts, adapters, slots)
        return sampled._replace(prompt_logprobs=logprobs)

    def choose(
        self, logits: Tensor, sample: SamplePlan, slots: Tensor, verify: VerifyTensors | None = None
    ) -> GeneratedTensors:
        """Sample from logits [sampled, vocabulary]; slots int32 [sampled]."""
        sampled = self.sampler(logits, sample.sampled_slots, slots, verify)
        return GeneratedTensors(sampled.token_ids, sampled.logprobs)

    def _prompt_logprobs(
        self, states: Tensor, prompts: PromptTensors, adapters: StepAdapters | None, slots: Ints | None
    ) -> LogprobTensors:
        """Log probabilities of known tokens, a few at a time: the logits of a whole prompt may not fit."""
        parts, max_logprobs = [], prompts.max_logprobs
        next_tokens = prompts.next_tokens.long()
        for first in range(0, len(states), TOKENS_AT_ONCE):
            some, following = (each[first : first + TOKENS_AT_ONCE] for each in (states, next_tokens))
            if adapters is not None and slots is not None:
                some_slots = slots[first : first + TOKENS_AT_ONCE]
                adapters.use_runs(some_slots, np.ones_like(some_slots))
            values = self.head.project(some).float().log_softmax(dim=-1)
            own = values.gather(1, following[:, None])
            top, ids = values.topk(max_logprobs, dim=-1)
            ranks = (values > own).sum(dim=-1, dtype=torch.int32) + 1
            parts.append((torch.cat([following[:, None], ids], 1).int(), torch.cat([own, top], 1), ranks))
        return LogprobTensors(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
