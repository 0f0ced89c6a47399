"""Attention of rows that run one token each over keys and values in blocks of memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def paged_reference(
    query: Tensor,  # [rows, heads, dim]
    keys: Tensor,  # [slots, kv heads, dim]
    values: Tensor,  # [slots, kv heads, dim]
    tables: Tensor,  # int32 [rows, width], blocks of each row
    counts: Tensor,  # int32 [rows], tokens of each row; the last is the query's own
    *,
    block_size: int,
    scale: float,
    window: int | None = None,  # how far back a token sees
    softcap: float | None = None,
) -> Tensor:
    """[rows, heads · dim]. Rows are filled up to the longest, and what is beyond their end is masked."""
    rows, heads, dim = query.shape
    places = torch.arange(tables.shape[1] * block_size, device=query.device)
    slots = tables.repeat_interleave(block_size, dim=1) * block_size + places % block_size
    seen = places[None, :] < counts[:, None]
    if window is not None:
        seen &= places[None, :] >= counts[:, None] - 1 - window
    k, v = (x[slots].transpose(1, 2) for x in (keys, values))  # [rows, kv heads, places, dim]
    if softcap is None:
        q, mask = query[:, :, None], seen[:, None, None]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=heads != k.shape[1]
        )
        return out.reshape(rows, heads * dim)
    grouped = query.view(rows, k.shape[1], -1, dim)
    scores = torch.tanh(grouped @ k.transpose(2, 3) * (scale / softcap)) * softcap
    scores = scores.float().masked_fill(~seen[:, None, None], float("-inf"))
    return (scores.softmax(dim=-1).to(v.dtype) @ v).reshape(rows, heads * dim)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    counts: Tensor,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor,
) -> None:
    """As the reference, into `out` [rows, heads · dim]."""
    out.copy_(
        paged_reference(
            query,
            keys,
            values,
            tables,
            counts,
            block_size=block_size,
            scale=scale,
            window=window,
            softcap=softcap,
        )
    )
