"""Building an engine from its settings."""

from __future__ import annotations

import pytest

from penstock import Engine
from penstock.types import OutputDtype, PoolingParams, Task


@pytest.mark.parametrize(
    ("params", "numbers"),
    [
        (PoolingParams(Task.EMBED), 0),
        (PoolingParams(Task.TOKEN_EMBED), 4),
        (PoolingParams(Task.TOKEN_EMBED, dtype=OutputDtype.FLOAT16), 2),
        (PoolingParams(Task.TOKEN_EMBED, dtype=OutputDtype.BINARY), 1 / 8),
    ],
)
def test_the_scheduler_knows_the_output_bytes_of_a_token(params: PoolingParams, numbers: float) -> None:
    with Engine(device="null") as engine:
        scheduler = engine.local.engine.core.scheduler
        assert scheduler.token_bytes(params) == numbers * engine.spec.embed_dim
        cut = PoolingParams(params.task, dimensions=64, dtype=params.dtype)
        assert scheduler.token_bytes(cut) == numbers * 64
