"""Rows that are too long are rejected with both lengths, or truncated. Truncation keeps special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from penstock.errors import BadValue
from penstock.types import Ints, shown

Side = Literal["left", "right"]


def truncation_limit(truncate_prompt_tokens: int | None, model_limit: int) -> int | None:
    """The number of tokens to truncate to. None means that over-length rows are rejected."""
    if truncate_prompt_tokens is None:
        return None
    if truncate_prompt_tokens == -1:
        return model_limit
    if truncate_prompt_tokens < 1:
        raise BadValue(
            f"truncate_prompt_tokens is {shown(truncate_prompt_tokens)}; use -1 for the model's limit, or 1 "
            f"to {model_limit}",
            param="truncate_prompt_tokens",
        )
    if truncate_prompt_tokens > model_limit:
        raise BadValue(
            f"truncate_prompt_tokens is {shown(truncate_prompt_tokens)}, above the model's limit; use -1, or "
            f"1 to {model_limit}",
            param="truncate_prompt_tokens",
        )
    return truncate_prompt_tokens


def truncate_rows(
    rows: list[Ints], cut_at: int | None, model_limit: int, frame: tuple[int, int], side: Side = "right"
) -> list[Ints]:
    """Truncate rows longer than `cut_at`, keeping `frame` = (leading, trailing) special tokens."""
    limit = model_limit if cut_at is None else cut_at
    if max(map(len, rows), default=0) <= limit:
        return rows
    if cut_at is None:
        index, row = next((i, row) for i, row in enumerate(rows) if len(row) > limit)
        raise BadValue(
            f"input {index} has {len(row)} tokens, but the model takes at most {model_limit}; shorten it or "
            "set truncate_prompt_tokens to -1",
            param="input",
        )
    return [row if len(row) <= limit else _truncate(row, limit, frame, side) for row in rows]


def num_longer(rows: Sequence[Ints], limit: int | None) -> int:
    """Number of rows that are longer than `limit`; 0 without a limit."""
    return 0 if limit is None else sum(len(row) > limit for row in rows)


def _truncate(row: Ints, limit: int, frame: tuple[int, int], side: Side) -> Ints:
    prefix, suffix = frame
    room = limit - prefix - suffix
    if room <= 0:  # the special tokens do not fit: keep the start of the row
        return row[:limit]
    body = row[prefix : len(row) - suffix]
    body = body[:room] if side == "right" else body[len(body) - room :]
    return np.concatenate([row[:prefix], body, row[len(row) - suffix :]])
