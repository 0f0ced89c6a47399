"""A sampler driven by requests that join, sample and leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.sampling.sampler import Sampler
from penstock.types import SamplerParams
from tests.helpers import ints

VOCAB, SLOTS = 37, 6
CPU = torch.device("cpu")
KINDS = [
    SamplerParams(temperature=0),
    SamplerParams(temperature=0.9, seed=5),
    SamplerParams(temperature=1.4, seed=5, top_k=6, top_p=0.8),
    SamplerParams(temperature=1.0, seed=8, min_p=0.1, logprobs=3),
    SamplerParams(temperature=0, repetition_penalty=1.6, presence_penalty=0.3, logprobs=0),
    SamplerParams(temperature=1.0, seed=1, frequency_penalty=0.8),
    SamplerParams(
        temperature=0, bad_token_ids=((3,), (5, 9), (9, 5, 2, 1)), logit_bias={5: 2.0, 9: 2.0, 2: 2.0}
    ),
    SamplerParams(temperature=1.0, seed=2, allowed_token_ids=(1, 2, 3, 30)),
    SamplerParams(temperature=0, min_tokens=2, eos_token_ids=(4, 999), logit_bias={4: 9.0}),
    SamplerParams(temperature=0, min_tokens=3, stop_token_ids=tuple(range(0, 37, 2))),
]


def logits_of(request: int, history: list[int]) -> torch.Tensor:
    """A model whose logits depend on the request and on all sampled tokens."""
    seed = hash((request, *history)) % 2**32
    return torch.from_numpy(np.random.default_rng(seed).normal(size=VOCAB) * 2).float()


class Driver:
    """Requests that join, sample and leave. A batch may have any subset of them, in any order."""

    def __init__(self) -> None:
        self.sampler = Sampler(VOCAB, SLOTS, CPU, seed=77)
        self.slot_of: dict[int, int] = {}
        self.history: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}

    def join(self, request: int) -> None:
        slot = min(set(range(SLOTS)) - set(self.slot_of.values()))
        before = self.history.setdefault(request, [])
        self.sampler.join(slot, KINDS[request], ints([1, 2, request]), ints(before))
        self.slot_of[request] = slot

    def leave(self, request: int) -> None:
        self.sampler.leave(self.slot_of.pop(request))
        self.sampler.plan.check_integrity()

    def step(self, requests: list[int]) -> None:
        slots = ints([self.slot_of[request] for request in requests])
        logits = torch.stack([logits_of(request, self.history[request]) for request in requests])
        sampled = self.sampler(logits, slots, torch.from_numpy(slots))
        for request, token in zip(requests, sampled.token_ids.tolist(), strict=True):
            self.history[request].append(token)
        if sampled.logprob_rows is not None:
            assert sampled.logprobs is not None
            for place, row in enumerate(sampled.logprob_rows.tolist()):
                width = 1 + (KINDS[requests[row]].logprobs or 0)
                ids, values = sampled.logprobs.ids[place, :width], sampled.logprobs.values[place, :width]
                self.logprobs.setdefault(requests[row], []).append((ids.tolist(), values.tolist()))
