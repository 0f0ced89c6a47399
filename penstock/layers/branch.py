"""Parallel branches of a CUDA graph: a captured graph runs a branch concurrently with the work after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


class Branch:
    """A part of a step whose output is not read before `join`.

    Outside a capture it runs inline, because a second stream would cost the host more time than the device
    saves. Work in a branch must not allocate: memory belongs to the stream that it was allocated on.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._stream = _side_stream(device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make later work wait for the branch."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
