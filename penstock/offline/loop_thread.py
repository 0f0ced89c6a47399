"""An event loop on its own thread, on which synchronous programs run coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.errors import EngineUnavailable

T = TypeVar("T")


class LoopThread:
    def __init__(self, name: str = "penstock-offline") -> None:
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine. Cancelling the future cancels it."""
        if self._closed:
            call.close()
            raise EngineUnavailable("the engine is closed")
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result. An interrupt cancels it."""
        future = self.submit(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
