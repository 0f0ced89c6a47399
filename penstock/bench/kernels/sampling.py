"""Cases of the sampler: a whole call for rows with equal options, compared with sorting an fp32 copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.bench.kernels.cases import Case, Place, size
from penstock.kernels.sampling import gumbel_reference
from penstock.sampling.plan import Column
from penstock.sampling.sampler import Sampler
from penstock.types import SamplerParams

KINDS = {
    "greedy": SamplerParams(temperature=0.0),
    "plain": SamplerParams(temperature=0.8),
    "top-k": SamplerParams(temperature=0.8, top_k=50),
    "top-p": SamplerParams(temperature=0.8, top_p=0.95),
    "top-k/top-p": SamplerParams(temperature=0.8, top_k=50, top_p=0.95),
    "penalties": SamplerParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.2),
    "logprobs": SamplerParams(temperature=0.0, logprobs=5),
}
_PROMPT = 64  # tokens of each prompt


def sampling(place: Place) -> Iterator[Case]:
    """Rows of a decode step with equal options. On a CPU, there are few rows and a small vocabulary."""
    rows, vocab = (128, 151_936) if place.device.type == "cuda" else (2, 5_000)
    logits = place.random(rows, vocab, scale=2.0)
    for name, params in KINDS.items():
        run, noise = _sampler(logits, params)
        yield Case(
            f"sampling {name}",
            f"{rows} × {vocab:,}",
            run=run,
            reference=partial(one_by_one, logits, params, noise),
            moved_bytes=size(logits) + 4 * rows,
            flops=0,
        )


def _sampler(logits: Tensor, params: SamplerParams) -> tuple[Callable[[], Tensor], Tensor | None]:
    """A call of the sampler, and the noise of its first step, so that the reference need not compute it."""
    rows, vocab = logits.shape
    sampler = Sampler(vocab, rows, logits.device)
    slots = np.arange(rows, dtype=np.int32)
    at = torch.arange(rows, dtype=torch.int32, device=logits.device)
    for slot in slots.tolist():
        given = msgspec.structs.replace(params, seed=slot)
        sampler.join(slot, given, np.arange(_PROMPT, dtype=np.int32))
    sampler.flush()

    def run() -> Tensor:
        sampled = sampler(logits, slots, at)
        return sampled.token_ids if sampled.logprobs is None else sampled.logprobs.values

    if not params.temperature:
        return run, None
    keys = sampler.table[:rows, Column.KEY : Column.KEY + 4]
    return run, torch.cat([gumbel_reference(key[None], at[:1] * 0, vocab) for key in keys])


def one_by_one(logits: Tensor, params: SamplerParams, noise: Tensor | None) -> Tensor:
    x = logits.float()
    if params.logprobs is not None:
        logprobs = x.log_softmax(dim=1)
        return torch.cat(
            (logprobs.gather(1, x.argmax(dim=1)[:, None]), logprobs.topk(params.logprobs).values), 1
        )
    if params.repetition_penalty != 1:
        seen = torch.arange(x.shape[1], device=x.device) < _PROMPT
        penalized = torch.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
        x = torch.where(seen, penalized, x)
    if noise is None:
        return x.argmax(dim=1).int()
    x = x / params.temperature
    if params.top_k or params.top_p < 1:
        x = _filtered(x, params)
    return (x + noise).argmax(dim=1).int()


def _filtered(x: Tensor, params: SamplerParams) -> Tensor:
    falling = x.sort(dim=1, descending=True).values
    if params.top_k:
        falling = falling.masked_fill(falling < falling[:, params.top_k - 1, None], float("-inf"))
    weights = falling.softmax(dim=1)
    kept = weights.cumsum(dim=1) - weights < params.top_p
    last = (kept & (weights > 0)).sum(dim=1, keepdim=True) - 1
    return x.masked_fill(x < falling.gather(1, last), float("-inf"))
