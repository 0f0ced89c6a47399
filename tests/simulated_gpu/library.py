"""Host versions of operations that PyTorch only has on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM = 256  # limit of the library


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    is_causal: bool = False,
    scale: float | None = None,
    window: Sequence[int] | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    """Replaces `varlen_attn`. Tensors are [tokens, heads, dim]. The last query of a row is aligned with its
    last key, and windows are relative to that."""
    if query.shape[2] > MAX_HEAD_DIM:
        raise RuntimeError(f"FlashAttention forward only supports head dimension at most {MAX_HEAD_DIM}")
    left, right = (-1, -1) if window is None else window
    right = 0 if is_causal else right
    repeats = query.shape[1] // key.shape[1]
    out = torch.full_like(query, float("nan"))
    for first, last, first_key, last_key in _rows(cu_queries, cu_keys):
        q = query[first:last].float().transpose(0, 1)
        k, v = (
            x[first_key:last_key].float().repeat_interleave(repeats, 1).transpose(0, 1) for x in (key, value)
        )
        scores = q @ k.transpose(1, 2) * (query.shape[2] ** -0.5 if scale is None else scale)
        ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if left >= 0:
            hidden |= ahead < -left
        if right >= 0:
            hidden |= ahead > right
        attended = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num() @ v
        out[first:last] = attended.transpose(0, 1).to(out.dtype)
    return out, query.new_empty(0), query.new_empty(0)


def _rows(cu_queries: Tensor, cu_keys: Tensor) -> zip[tuple[int, int, int, int]]:
    queries, keys = cu_queries.tolist(), cu_keys.tolist()
    return zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True)


ON_HOST: dict[str, Callable[..., Any]] = {"torch_attn::_varlen_attn": attend}
