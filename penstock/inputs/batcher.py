"""Tokenisation for concurrent callers: short texts inline, longer ones in slices on a thread.

No call waits for all of another call: a slice serves the oldest call and the calls with the least work left.
Calls with very long texts run on separate threads.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from penstock.config import available_cpus
from penstock.errors import BadValue
from penstock.inputs.long_texts import RowLimit, max_chars, num_chars
from penstock.inputs.token_rows import TokenRows
from penstock.inputs.tokenizer import EncodedText, Tokenizer
from penstock.inputs.words import MAX_TEXT_CHARS
from penstock.types import Ints

T = TypeVar("T")
MAX_INLINE_CHARS = 1024  # encoding shorter inputs takes less time than a hand-over to a thread
MAX_INLINE_WORD_CHARS = 4096  # the same for a tokenizer with a word cache
MAX_SLICE_CHARS = 1 << 16  # characters of all calls in a slice; tokenising them takes 10 to 40 ms


@dataclass(slots=True, eq=False)
class _Job:
    """One call; some of its rows may be done."""

    texts: Sequence[str]
    add_special_tokens: bool
    limit: RowLimit | None
    future: asyncio.Future[list[Ints]]
    num_chars_left: int
    rows: list[Ints] = field(default_factory=list)

    def take(self, max_chars: int, num_taken: int = 0) -> list[str]:
        """Take the next texts, after `num_taken` of this slice: one, or at most `max_chars` characters."""
        taken: list[str] = []
        size = 0
        for at in range(len(self.rows) + num_taken, len(self.texts)):
            text = self.texts[at]
            size += len(text)
            if taken and size > max_chars:
                break
            taken.append(text)
            self.num_chars_left -= len(text)
        return taken

    def error_of(self, rows: list[Ints]) -> BadValue | None:
        """The error if one of the newest rows is too long, so that the rest is not tokenised."""
        if self.limit is not None and not self.limit.truncates:
            try:
                self.limit.reject_long(rows, len(self.rows) - len(rows))
            except BadValue as error:
                return error
        return None


_Slice = list[tuple[_Job, list[str]]]
_Rows = list[Ints] | Exception


class BatchTokenizer:
    """Encodes one slice at a time. Calls that arrive meanwhile join the next slice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._waiting: list[_Job] = []
        self._running = False
        num_workers = min(4, available_cpus())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-tokenize")
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="penstock-inputs")
        self._large = ThreadPoolExecutor(num_workers, thread_name_prefix="penstock-large-inputs")

    def encode_short(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Ints] | None:
        """Encode short texts, which takes less time than a hand-over to a thread; None for longer texts."""
        words = self.tokenizer.words
        if num_chars(texts) > (MAX_INLINE_CHARS if words is None else MAX_INLINE_WORD_CHARS):
            return None
        return self.tokenizer.encode(texts, add_special_tokens)

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool = True, limit: RowLimit | None = None
    ) -> list[Ints]:
        """Like `Tokenizer.encode`."""
        if (rows := self.encode_short(texts, add_special_tokens)) is not None:
            return rows
        size = num_chars(texts)
        longest = max_chars(texts)
        if longest > MAX_SLICE_CHARS or (limit is not None and longest > limit.max_whole_chars):
            return await self.call(partial(self.tokenizer.encode, texts, add_special_tokens, limit), size)
        loop = asyncio.get_running_loop()
        job = _Job(texts, add_special_tokens, limit, loop.create_future(), size)
        self._waiting.append(job)
        if not self._running:
            self._start(loop)
        return await job.future

    async def encode_words(self, texts: Sequence[str]) -> TokenRows | None:
        """Encode short texts word by word, without special tokens.

        None if the tokenizer has no word cache, or if a text is long.
        """
        words = self.tokenizer.words
        if words is None or max_chars(texts) > MAX_TEXT_CHARS:
            return None
        size = num_chars(texts)
        if size <= MAX_INLINE_CHARS:
            return words.encode(texts)
        return await self.call(partial(words.encode, texts), size)

    async def encode_with_offsets(
        self, texts: Sequence[str], add_special_tokens: bool = True, limit: RowLimit | None = None
    ) -> list[EncodedText]:
        """Like `Tokenizer.encode_with_offsets`, on a worker thread, without batching."""
        work = partial(self.tokenizer.encode_with_offsets, texts, add_special_tokens, limit)
        return await self.call(work, num_chars(texts))

    async def call(self, work: Callable[[], T], size: int = 0) -> T:
        """Run other work on a worker thread, without batching: long pairs keep several cores busy.

        `size` is the number of characters or tokens. Large work has separate threads, so that small work does
        not wait for it.
        """
        pool = self._workers if size <= MAX_SLICE_CHARS else self._large
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        for pool in (self._thread, self._workers, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Encode the next slice."""
        self._waiting = [job for job in self._waiting if not job.future.done()]
        self._running = bool(self._waiting)
        if self._running:
            batch = self._next_slice()
            done = loop.run_in_executor(self._thread, self._encode_slice, batch)
            done.add_done_callback(lambda result: self._finish(loop, batch, result))

    def _next_slice(self) -> _Slice:
        """Fill half of a slice from the oldest call, and the rest from the calls with the least work left.

        So a small call waits for one slice, and a large one never starves.
        """
        oldest, *others = self._waiting
        first = oldest.take(MAX_SLICE_CHARS // 2)
        batch, room = [(oldest, first)], MAX_SLICE_CHARS - sum(map(len, first))
        for job in sorted(others, key=lambda job: job.num_chars_left):
            if room <= 0:
                break
            taken = job.take(room)
            batch.append((job, taken))
            room -= sum(map(len, taken))
        if room > 0 and (more := oldest.take(room, len(first))):
            batch.append((oldest, more))
        return batch

    def _encode_slice(self, batch: _Slice) -> list[_Rows]:
        """The rows of each call, or its error. A bad text fails only its own call."""
        special = batch[0][0].add_special_tokens
        if len(batch) > 1 and all(job.add_special_tokens == special for job, _ in batch):
            try:
                rows = self.tokenizer.encode([text for _, texts in batch for text in texts], special)
            except Exception:
                return [self._encode(job, texts) for job, texts in batch]
            left = iter(rows)
            return [list(itertools.islice(left, len(texts))) for _, texts in batch]
        return [self._encode(job, texts) for job, texts in batch]

    def _encode(self, job: _Job, texts: list[str]) -> _Rows:
        try:
            return self.tokenizer.encode(texts, job.add_special_tokens)
        except Exception as error:
            return error

    def _finish(
        self, loop: asyncio.AbstractEventLoop, batch: _Slice, result: asyncio.Future[list[_Rows]]
    ) -> None:
        for (job, _), rows in zip(batch, result.result(), strict=True):
            if job.future.done():
                continue
            if isinstance(rows, Exception):
                job.future.set_exception(rows)
                continue
            job.rows += rows
            if len(job.rows) == len(job.texts):
                job.future.set_result(job.rows)
            elif (error := job.error_of(rows)) is not None:
                job.future.set_exception(error)
        self._start(loop)
