"""Copies many stored tensors to a device at once.

The destination is one contiguous tensor, viewed as bytes and cut into chunks. Threads read each chunk's parts
from the files into a staging buffer, in the destination's order, and one copy moves the chunk to the device.
So a stack of hundreds of small tensors costs as few copies as one large tensor. A thread waits for a copy
only before it fills the same buffer again.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.config import available_cpus
from penstock.errors import ModelLoadError

MAX_THREADS = 16
MAX_CHUNK_BYTES = 8 << 20
MIN_CHUNK_BYTES = 1 << 20  # a smaller tensor is read by the calling thread
_BUFFERS = 2  # per thread: one is filled while the other is copied


class Part(NamedTuple):
    """A range of bytes of a file."""

    path: Path
    offset: int
    size: int


class _Piece(NamedTuple):
    """A range of bytes of a file, and its offset `begin` in a chunk."""

    path: Path
    offset: int
    size: int
    begin: int


class _Buffer:
    """Staging memory of one thread."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = _staging_memory(size, device)
        self.view: memoryview = self.bytes.numpy().data
        self.copied = torch.cuda.Event(blocking=True) if device.type == "cuda" else None
        self.is_used = False

    def wait(self) -> None:
        """Wait until the last copy out of this buffer has ended."""
        if self.is_used and self.copied is not None:
            self.copied.synchronize()
        self.is_used = True


class BulkReader:
    """Fills tensors on `device` from files. Use it from one thread only."""

    def __init__(
        self, device: torch.device, threads: int | None = None, max_chunk_bytes: int = MAX_CHUNK_BYTES
    ) -> None:
        self.device = device
        self.num_threads = threads or min(available_cpus(), MAX_THREADS)
        self.max_chunk_bytes = max_chunk_bytes
        self._min_chunk_bytes = min(MIN_CHUNK_BYTES, max_chunk_bytes)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="weights")
        self._descriptors: dict[Path, int] = {}
        self._local = local()

    def fill(self, out: Tensor, parts: Sequence[Part]) -> None:
        """Fill a contiguous tensor with the bytes of `parts`, one after another.

        On return, all bytes are read from the files. Later work on the current stream sees them in `out`.
        """
        flat = out.view(-1).view(torch.uint8) if out.numel() else out.new_empty(0, dtype=torch.uint8)
        parts = _merged(parts)
        ends = list(accumulate(part.size for part in parts))
        total = ends[-1] if ends else 0
        if total != len(flat):
            raise ValueError(f"{total} bytes do not fill a tensor of {len(flat)} bytes")
        for path in {part.path for part in parts}:
            self._open(path)
        size = min(max(total // (2 * self.num_threads), self._min_chunk_bytes), self.max_chunk_bytes)
        begins = range(0, total, size)
        with self._ordered():
            if len(begins) <= 1:
                for begin in begins:
                    self._copy(flat, parts, ends, begin, total)
                return
            chunks = [
                self._pool.submit(self._copy, flat, parts, ends, begin, min(begin + size, total))
                for begin in begins
            ]
            for number, chunk in enumerate(chunks):
                try:
                    chunk.result()
                except BaseException:
                    for later in chunks[number + 1 :]:
                        later.cancel()
                    raise

    def close(self) -> None:
        """Wait for all copies and free the buffers."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._local = local()

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """Order the copies after earlier work on the current stream, and before later work."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)  # earlier work may still use the memory
        try:
            yield
        finally:
            current.wait_stream(self._stream)

    def _copy(self, flat: Tensor, parts: Sequence[Part], ends: Sequence[int], begin: int, end: int) -> None:
        buffer = self._next_buffer()
        buffer.wait()
        for piece in _pieces(parts, ends, begin, end):
            _read(self._descriptors[piece.path], piece, buffer.view)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())  # not inherited by threads
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            flat[begin:end].copy_(buffer.bytes[: end - begin], non_blocking=True)
            if buffer.copied is not None:
                buffer.copied.record(self._stream)

    def _next_buffer(self) -> _Buffer:
        state: Any = self._local
        if not hasattr(state, "buffers"):
            state.buffers = [_Buffer(self.max_chunk_bytes, self.device) for _ in range(_BUFFERS)]
        state.buffers.reverse()
        buffer: _Buffer = state.buffers[0]
        return buffer

    def _open(self, path: Path) -> None:
        if path not in self._descriptors:
            try:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None


def _staging_memory(size: int, device: torch.device) -> Tensor:
    """Pinned memory for a GPU, so that copies run asynchronously; pageable memory if none is left."""
    if device.type == "cuda":
        try:
            with torch.cuda.device(device):
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            pass  # copies from pageable memory are slower, but correct
    return torch.empty(size, dtype=torch.uint8)


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Join parts that are adjacent in a file, such as the gate and up projections of an expert."""
    merged: list[Part] = []
    path, begin, end = None, 0, 0
    for part in parts:
        if part.path is path and part.offset == end:
            end += part.size
            merged[-1] = Part(path, begin, end - begin)
        else:
            path, begin, end = part.path, part.offset, part.offset + part.size
            merged.append(part)
    return merged


def _pieces(parts: Sequence[Part], ends: Sequence[int], begin: int, end: int) -> Iterator[_Piece]:
    """The pieces of a chunk, which is bytes `begin` to `end` of the destination. `ends`: end of each part."""
    at, number = begin, bisect_right(ends, begin)
    while at < end:
        part, stop = parts[number], min(ends[number], end)
        if stop > at:
            skipped = at - (ends[number] - part.size)
            yield _Piece(part.path, part.offset + skipped, stop - at, at - begin)
        at, number = stop, number + 1


def _read(descriptor: int, piece: _Piece, into: memoryview) -> None:
    """Read a piece to its place in a chunk. Releases the GIL while it reads."""
    done = 0
    while done < piece.size:
        target = into[piece.begin + done : piece.begin + piece.size]
        try:
            count = os.preadv(descriptor, [target], piece.offset + done)
        except OSError as error:
            raise ModelLoadError(f"{piece.path} cannot be read: {error.strerror}") from None
        if not count:
            raise ModelLoadError(f"{piece.path} ended while it was read; has it been replaced?")
        done += count
