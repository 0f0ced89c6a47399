"""Requests that score pairs of texts."""

from __future__ import annotations

import numpy as np

from penstock import Engine
from penstock.types import Ints, PooledOutput, PoolingParams, Request, Task
from tests.waiting import PATIENCE_S

TEXTS = [
    "what is a cat",
    "who is king",
    "a cat purrs",
    "the king is dead",
    "yellow",
    "a cat",
    "kings and cats",
]
PAIRS = np.array([0, 1, 1, 0, 0], dtype=np.int32)


def score_request(name: str, rows: list[list[int]], pairs: Ints, **more: object) -> Request:
    return Request(
        name,
        np.array([token for row in rows for token in row], dtype=np.int32),
        np.array([len(row) for row in rows], dtype=np.int32),
        PoolingParams(Task.SCORE),
        pairs=pairs,
        **more,  # type: ignore[arg-type]
    )


def run(engine: Engine, request: Request) -> PooledOutput:
    return engine.local.engine.submit(request).result(timeout=PATIENCE_S)
