"""A `StreamListener` that tests read from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import numpy as np

from penstock.errors import PenstockError
from penstock.handle import EngineHandle
from penstock.types import GeneratedTokens, Request


class QueuedTokens:
    """Queues the parts that one request generates. Each decoded token is a part of its own."""

    def __init__(self, request: Request) -> None:
        self.queue: asyncio.Queue[GeneratedTokens | PenstockError] = asyncio.Queue()
        self._id = request.id
        self._num_unfinished = request.num_rows

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    def on_token(self, row: int, token_id: int) -> None:
        self.queue.put_nowait(GeneratedTokens(self._id, row, np.array([token_id], dtype=np.int32)))

    def on_tokens(self, parts: list[GeneratedTokens]) -> None:
        for part in parts:
            self._num_unfinished -= part.finish_reason is not None
            self.queue.put_nowait(part)

    def on_error(self, error: PenstockError) -> None:
        self._num_unfinished = 0
        self.queue.put_nowait(error)


async def read_stream(engine: EngineHandle, request: Request) -> AsyncGenerator[GeneratedTokens, None]:
    """Yield the parts of a request until all sequences finish. Closing the generator cancels the rest."""
    listener = QueuedTokens(request)
    unsubscribe = engine.stream(request, listener)
    try:
        while not (listener.finished and listener.queue.empty()):
            part = await listener.queue.get()
            if isinstance(part, PenstockError):
                raise part
            yield part
    finally:
        unsubscribe()
