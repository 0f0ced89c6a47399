"""Generation requests sent directly to an engine's handle, with parameters that no public field sets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock import Engine
from penstock.types import Array, GeneratedTokens, PoolingParams, Request, SamplerParams, Task
from tests.generation.streams import read_stream

_ids = itertools.count()


@dataclass
class GeneratedSequence:
    """Everything that the engine returns for one prompt."""

    token_ids: list[int]
    finish: str | None
    logprobs: Array | None  # [tokens, 1 + logprobs]


def request_of(row: Sequence[int], params: SamplerParams) -> Request:
    ids, length = np.array(row, dtype=np.int32), np.array([len(row)], dtype=np.int32)
    return Request(f"direct-{next(_ids)}", ids, length, PoolingParams(Task.GENERATE), sampling=params)


def generate(
    engine: Engine, rows: Sequence[Sequence[int]], params: SamplerParams | Sequence[SamplerParams]
) -> list[GeneratedSequence]:
    """Run one request for each row, all at once."""
    each = [params] * len(rows) if isinstance(params, SamplerParams) else params

    async def read(request: Request) -> GeneratedSequence:
        parts = [part async for part in read_stream(engine.local.engine, request)]
        return _joined(parts)

    async def read_all() -> list[GeneratedSequence]:
        requests = [request_of(row, own) for row, own in zip(rows, each, strict=True)]
        return list(await asyncio.gather(*map(read, requests)))

    return asyncio.run(read_all())


def _joined(parts: list[GeneratedTokens]) -> GeneratedSequence:
    scores = [part.logprobs for part in parts if part.logprobs is not None]
    ids = [token for part in parts for token in part.token_ids.tolist()]
    return GeneratedSequence(ids, parts[-1].finish_reason, np.concatenate(scores) if scores else None)
