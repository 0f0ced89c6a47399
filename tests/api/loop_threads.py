"""Record which threads run a function, to show that long work leaves the event loop. Nothing is timed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest


def on_loop() -> bool:
    """Whether an event loop is running on this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class LoopThreads:
    """Wraps functions and records for each call whether it ran on an event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._lock = threading.Lock()
        self.calls: dict[str, list[bool]] = {}

    def watch(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls.setdefault(name, []).append(on_loop())
            return function(*args, **kwargs)

        self._monkeypatch.setattr(owner, name, noted)

    def ran_on_loop(self, name: str) -> set[bool]:
        return set(self.calls.pop(name, []))
