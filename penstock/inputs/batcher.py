"""Tokenisation for concurrent callers: short texts inline, long ones in batches on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.config import available_cpus
from penstock.inputs.tokenizer import EncodedText, Tokenizer
from penstock.types import Ints

T = TypeVar("T")
MAX_INLINE_CHARS = 1024  # shorter inputs take less time to encode than a hand-over to a thread
_Job = tuple[list[str], bool, "asyncio.Future[list[Ints]]"]


class BatchTokenizer:
    """Encodes one batch at a time. Calls that arrive meanwhile form the next batch."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._waiting: list[_Job] = []
        self._running = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-tokenize")
        self._workers = ThreadPoolExecutor(min(4, available_cpus()), thread_name_prefix="penstock-inputs")

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Ints]:
        if sum(map(len, texts)) <= MAX_INLINE_CHARS:
            return self.tokenizer.encode(texts, add_special_tokens)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Ints]] = loop.create_future()
        self._waiting.append((list(texts), add_special_tokens, future))
        if not self._running:
            self._start(loop)
        return await future

    async def encode_with_offsets(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[EncodedText]:
        """Like `Tokenizer.encode_with_offsets`, on a worker thread and not batched."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._workers, self.tokenizer.encode_with_offsets, texts, add_special_tokens
        )

    async def call(self, work: Callable[[], T]) -> T:
        """Run other tokenisation work on a worker thread, not batched: long pairs keep several cores busy."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def close(self) -> None:
        for pool in (self._thread, self._workers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        jobs = [job for job in self._waiting if not job[2].cancelled()]
        self._waiting = []
        self._running = bool(jobs)
        if jobs:
            done = loop.run_in_executor(self._thread, self._encode_all, jobs)
            done.add_done_callback(lambda result: self._finish(loop, jobs, result))

    def _encode_all(self, jobs: list[_Job]) -> list[list[Ints] | Exception]:
        """The rows of each job, or its error: a bad text fails only its own call."""
        out: list[list[Ints] | Exception] = []
        for special in (True, False):
            matching = [texts for texts, add, _ in jobs if add is special]
            if len(matching) == len(jobs):
                try:
                    rows = iter(self.tokenizer.encode([t for texts in matching for t in texts], special))
                    return [[next(rows) for _ in texts] for texts in matching]
                except Exception:
                    break
        for texts, special, _ in jobs:
            try:
                out.append(self.tokenizer.encode(texts, special))
            except Exception as error:
                out.append(error)
        return out

    def _finish(
        self,
        loop: asyncio.AbstractEventLoop,
        jobs: list[_Job],
        result: asyncio.Future[list[list[Ints] | Exception]],
    ) -> None:
        for (_, _, future), rows in zip(jobs, result.result(), strict=True):
            if future.done():
                continue
            if isinstance(rows, Exception):
                future.set_exception(rows)
            else:
                future.set_result(rows)
        self._start(loop)
