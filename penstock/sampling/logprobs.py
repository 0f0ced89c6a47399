"""Log-probabilities of tokens in the model's own distribution, before edits, temperature and filters."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.language import use_kernel
from penstock.kernels.sampling import logsumexp_and_ranks, logsumexp_and_ranks_reference


def token_logprobs(
    logits: Tensor,  # [n, vocab], in the model's dtype
    tokens: Tensor,  # [rows]
    count: int,
    rows: Tensor | None = None,  # [rows], which of the logits; None: all, in order
) -> tuple[Tensor, Tensor, Tensor]:
    """int32 ids and fp32 logprobs [rows, 1 + count]: the token, then the likeliest, falling; and the token's
    int32 rank [rows], from 1. Serves sampled tokens and those of a prompt alike."""
    if rows is None:
        rows, taken = torch.arange(len(logits), device=logits.device), logits
    else:
        taken = logits.index_select(0, rows)
    sums, ranks = (logsumexp_and_ranks if use_kernel(logits) else logsumexp_and_ranks_reference)(
        logits, rows, tokens
    )
    ids = tokens.long()[:, None]
    values = taken.gather(1, ids)
    if count:
        top = taken.topk(min(count, logits.shape[1]), dim=1)
        ids, values = torch.cat((ids, top.indices), dim=1), torch.cat((values, top.values), dim=1)
    return ids.int(), values.float() - sums[:, None], ranks
