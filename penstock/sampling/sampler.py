"""From logits to the next token of each row, without asking the device for anything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.core import Ints, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    token_ids: Tensor  # [n]
    # Of the rows that asked, in their order: the chosen token first, then the likeliest, falling.
    logprob_ids: Tensor | None = None  # [asked, 1 + most]
    logprobs: Tensor | None = None  # [asked, 1 + most] fp32
    ranks: Tensor | None = None  # [asked], of the chosen token, from 1


class Sampler:
    """The likeliest token, or one drawn by temperature. Rows have slots, which they join and leave."""

    def __init__(self, vocab_size: int, max_slots: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._params: list[SamplingParams | None] = [None] * max_slots
        self._masks: list[Ints | None] = [None] * max_slots
        self._draws: list[torch.Generator | None] = [None] * max_slots

    def join(
        self, slot: int, params: SamplingParams, prompt_ids: Ints, output_ids: Ints | None = None
    ) -> None:
        self._params[slot] = params
        if params.temperature > 0:
            draw = torch.Generator(self.device)
            self._draws[slot] = draw if params.seed is None else draw.manual_seed(params.seed)

    def mask(self, slot: int, bitmask: Ints | None) -> None:
        """The tokens that the slot's next ones may be, 32 to a word and the lowest first; None: any."""
        self._masks[slot] = bitmask

    def leave(self, slot: int) -> None:
        self._params[slot] = self._draws[slot] = self._masks[slot] = None

    def __call__(self, logits: Tensor, slots: Ints, slots_device: Tensor) -> Sampled:
        for i, slot in enumerate(slots.tolist()):
            if (mask := self._masks[slot]) is not None:
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size]
                logits[i].masked_fill_(torch.from_numpy(bits == 0).to(self.device), float("-inf"))
        chosen = logits.argmax(dim=-1)
        asked: list[int] = []
        most = 0
        for i, slot in enumerate(slots.tolist()):
            params = self._params[slot]
            if params is None:
                continue
            if params.logprobs is not None:
                asked.append(i)
                most = max(most, params.logprobs)
            if params.temperature > 0:
                weights = torch.softmax(logits[i].float() / params.temperature, dim=-1)
                chosen[i] = torch.multinomial(weights, 1, generator=self._draws[slot])[0]
        if not asked:
            return Sampled(chosen)
        return Sampled(chosen, *self._logprobs(logits[asked], chosen[asked], most))

    @staticmethod
    def _logprobs(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        values = torch.log_softmax(logits.float(), dim=-1)
        own = values.gather(1, chosen[:, None])
        top, ids = values.topk(most, dim=-1)
        ranks = (values > own).sum(dim=-1) + 1
        return torch.cat([chosen[:, None], ids], 1), torch.cat([own, top], 1), ranks
