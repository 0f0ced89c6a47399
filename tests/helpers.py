"""Builders of requests and model descriptions, so that a test only states what matters to it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from penstock.checkpoint.pooling import PoolingSpec
from penstock.checkpoint.spec import ModelSpec
from penstock.types import Ints, PoolingParams, Request, RequestImages, Task


def ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int32)


def make_request(
    request_id: str,
    lengths: Sequence[int],
    *,
    first_token: int = 1,
    params: PoolingParams | None = None,
    priority: int = 0,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    type_ids: Sequence[int] | None = None,
    skip: Sequence[int] | None = None,
    key_limits: Sequence[int] | None = None,
    client: str = "",
    weight: float = 1.0,
) -> Request:
    """A request whose tokens count up from `first_token`, so that all tokens differ."""
    total = sum(lengths)
    return Request(
        request_id,
        np.arange(first_token, first_token + total, dtype=np.int32),
        ints(lengths),
        params or PoolingParams(),
        type_ids=None if type_ids is None else ints(type_ids),
        skip=None if skip is None else ints(skip),
        key_limits=None if key_limits is None else ints(key_limits),
        priority=priority,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        client=client,
        weight=weight,
    )


def make_images(
    grids: Sequence[tuple[int, int]],
    rows: Sequence[int],
    *,
    starts: Sequence[int] | None = None,
    num_tokens: Sequence[int] | None = None,
    seed: int = 0,
    values: int = 12,
    are_rows: bool = False,
) -> RequestImages:
    """Images of random patches. By default each has one token, the first of its row."""
    draw = np.random.default_rng(seed)
    patches = [draw.integers(0, 256, (height * width, values), dtype=np.uint8) for height, width in grids]
    digests = [
        blake2b(each.tobytes() + bytes(grid), digest_size=16).digest()
        for each, grid in zip(patches, grids, strict=True)
    ]
    return RequestImages(
        np.concatenate(patches),
        np.array(grids, dtype=np.int32).reshape(-1, 2),
        ints(rows),
        ints(starts or [0] * len(grids)),
        ints(num_tokens or [1] * len(grids)),
        np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 16),
        are_rows,
    )


def row_tokens(request: Request, row: int) -> list[int]:
    start = int(request.lengths[:row].sum())
    return request.token_ids[start : start + int(request.lengths[row])].tolist()


def make_spec(**changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "folder": "/nowhere",
        "name": "test-model",
        "architecture": "BertModel",
        "config": {},
        "max_model_len": 16,
        "max_positions": 16,
        "embed_dim": 8,
        "token_dim": 8,
        "vocab_size": 100,
        "pooling": PoolingSpec(methods=("mean",)),
        "prompts": {},
        "default_prompt_name": None,
        "similarity": "cosine",
        "lower_case": False,
        "tasks": (Task.EMBED,),
    }
    return ModelSpec(**(values | changes))
