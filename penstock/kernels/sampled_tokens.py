"""Copy of tokens that an earlier step sampled into this step's input, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.language import cdiv, jit, tl, use_kernel, wait_for_inputs

_BLOCK = 128


@jit(unspecialized=("tokens", "slots", "count"), overlaps=True)
def _insert_sampled_tokens(
    tokens: tl.tensor, slots: tl.tensor, last: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    wait_for_inputs()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + place, mask=place < count, other=-1)
    token = tl.load(last + slot, mask=slot >= 0, other=0)
    tl.store(tokens + place, token, mask=slot >= 0)


def insert_sampled_tokens(
    tokens: Tensor,  # int32 [n], overwritten where a slot is given
    slots: Tensor,  # int32 [n]; -1: keep the token of the plan
    last: Tensor,  # int32 [slots], the last token of each slot
) -> None:
    if use_kernel(tokens):
        count = len(tokens)
        _insert_sampled_tokens[(cdiv(count, _BLOCK),)](tokens, slots, last, count, BLOCK=_BLOCK, num_warps=4)
        return
    named = slots >= 0
    tokens.copy_(torch.where(named, last[slots.clamp(min=0).long()], tokens))
