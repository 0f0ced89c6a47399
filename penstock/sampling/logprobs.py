"""Log probabilities of tokens in the model's own distribution, before edits, temperature and filters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.language import use_kernel
from penstock.kernels.sampling import logsumexp_and_ranks, logsumexp_and_ranks_reference


class LogprobTensors(NamedTuple):
    """`types.TokenLogprobs` on the device: the token itself, then the likeliest ones in descending order."""

    ids: Tensor  # int32 [rows, 1 + top]
    values: Tensor  # fp32 [rows, 1 + top]
    ranks: Tensor  # int32 [rows], rank of the token itself, from 1


def token_logprobs(
    logits: Tensor,  # [n, vocab], in the model's dtype
    tokens: Tensor,  # [rows]
    top: int,
    rows: Tensor | None = None,  # [rows], indices into `logits`; None: all, in order
) -> LogprobTensors:
    """Log probabilities of these tokens and of the `top` likeliest, for sampled tokens and for prompts."""
    if rows is None:
        rows, selected = torch.arange(len(logits), device=logits.device), logits
    else:
        selected = logits.index_select(0, rows)
    sums, ranks = (logsumexp_and_ranks if use_kernel(logits) else logsumexp_and_ranks_reference)(
        logits, rows, tokens
    )
    ids = tokens.long()[:, None]
    values = selected.gather(1, ids)
    if top:
        likeliest = selected.topk(min(top, logits.shape[1]), dim=1)
        ids = torch.cat((ids, likeliest.indices), dim=1)
        values = torch.cat((values, likeliest.values), dim=1)
    return LogprobTensors(ids.int(), values.float() - sums[:, None], ranks)
