"""Attention over a ragged run of tokens: a thin call that takes the cheapest correct path.

Rows arrive ordered by length, so rows of equal length form a dense block without any padding. On a
CPU each block is one library call; on CUDA one variable-length call serves the whole run, unless a
position bias is added to the scores.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.layers.batch import Batch

ScoreBias = Callable[[int], Tensor]  # length → [heads, length, length], added to the scores


def attend(qkv: Tensor, heads: int, batch: Batch, bias: ScoreBias | None = None) -> Tensor:
    """Bidirectional attention within each row. qkv [tokens, 3 · hidden] → [tokens, hidden]."""
    tokens, width = qkv.shape
    dim = width // (3 * heads)
    if qkv.is_cuda and bias is None and qkv.dtype in (torch.bfloat16, torch.float16):
        return _varlen(qkv.view(tokens, 3, heads, dim), batch)
    return _by_length(qkv, heads, dim, batch, bias)


def _by_length(qkv: Tensor, heads: int, dim: int, batch: Batch, bias: ScoreBias | None) -> Tensor:
    out = torch.empty((qkv.shape[0], heads * dim), dtype=qkv.dtype, device=qkv.device)
    for group in batch.groups:
        stop = group.first_token + group.num_rows * group.length
        block = qkv[group.first_token : stop].view(group.num_rows, group.length, 3, heads, dim)
        query, key, value = block.permute(2, 0, 3, 1, 4)  # each [rows, heads, length, dim]
        mask = None if bias is None else bias(group.length)
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out[group.first_token : stop].view(group.num_rows, group.length, heads, dim).copy_(
            context.transpose(1, 2)
        )
    return out


def _varlen(qkv: Tensor, batch: Batch) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = qkv.unbind(1)  # each [tokens, heads, dim]
    out = varlen_attn(
        query, key, value, batch.cu_lengths, batch.cu_lengths, batch.max_length, batch.max_length
    )
    assert isinstance(out, Tensor)
    return out.flatten(1)
