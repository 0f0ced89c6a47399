"""From a job to pieces of text: asks the engine, writes tokens as they come, ends rows at stop strings.

What server, command line and offline use share; `Generates` is all that is asked of an engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core import Generated, Ints, Request, Timings
from penstock.errors import DeadlineExceeded, EngineError
from penstock.inputs.generation import Job
from penstock.outputs.detokenizer import Decodes, detokenizer
from penstock.outputs.stops import StopStrings


class Generates(Protocol):
    def generate(self, request: Request) -> AsyncIterator[list[Generated]]:
        """The parts of a request's rows as they come. Closing the iterator cancels the request."""


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Of some tokens: the chosen one first, then the likeliest."""

    ids: Ints  # [tokens, 1 + top]
    values: NDArray[np.float32]  # [tokens, 1 + top]
    ranks: Ints | None  # [tokens]


@dataclass(slots=True, eq=False)
class Piece:
    """What is new of one row."""

    row: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None = None
    finish: str | None = None
    stop_reason: int | str | None = None  # the stop string or the named stop token that ended the row
    prompt: Logprobs | None = None  # of the prompt's tokens after the first
    timings: Timings | None = None


class RowWriter:
    """One row's text."""

    def __init__(self, tokenizer: Decodes, job: Job, row: int) -> None:
        prompt = job.prompts[row // job.n]
        self.row = row
        self.done = False
        self._text = detokenizer(tokenizer, prompt[-8:].tolist(), job.skip_special_tokens)
        self._stops = StopStrings(job.stops, job.include_stop)
        self._include = job.include_stop
        self._min_tokens = job.sampling.min_tokens
        self._named = frozenset(job.sampling.stop_token_ids)
        self._width = 1 + (job.sampling.logprobs or 0)
        self._count = 0
        # Tokens of the prompt whose log probabilities are awaited; nothing predicts the first.
        self._unscored = 0 if job.sampling.prompt_logprobs is None else len(prompt) - 1

    def take(self, part: Generated) -> Piece:
        piece = Piece(self.row, "", [], finish=part.finish, timings=part.timings)
        if self._unscored:
            piece.prompt = self._prompt_logprobs(part)
        ids = part.token_ids.tolist()
        if part.stop_token is not None and ids[-1:] != [part.stop_token]:
            ids.append(part.stop_token)  # it was made, and counts, whether or not the engine hands it out
        texts: list[str] = []
        for at, number in enumerate(ids):
            self._count += 1
            piece.token_ids.append(number)
            if part.stop_token is not None and at == len(ids) - 1 and not self._include:
                break  # it ends the row, and is not shown
            shown, stop = self._stops.push(self._text.push(number), search=self._count > self._min_tokens)
            texts.append(shown)
            if stop is not None:
                piece.finish, piece.stop_reason = "stop", stop
                break
        if piece.finish is not None and not isinstance(piece.stop_reason, str):
            texts.append(self._ended(piece, part.stop_token))
        self.done = piece.finish is not None
        piece.text = "".join(texts)
        piece.logprobs = _first(part, len(piece.token_ids), self._width)
        return piece

    def _prompt_logprobs(self, part: Generated) -> Logprobs:
        """They come with the first part; answering without them would be wrong in silence."""
        ids, values = part.prompt_logprob_ids, part.prompt_logprobs
        if ids is None or values is None or len(ids) != self._unscored:
            raise EngineError(f"the engine gave no log probabilities of the prompt of request {part.id}")
        self._unscored = 0
        return Logprobs(ids, values, part.prompt_ranks)

    def _ended(self, piece: Piece, stop_token: int | None) -> str:
        """The rest of the text; it may still complete a stop string."""
        if stop_token in self._named:
            piece.stop_reason = stop_token
        shown, stop = self._stops.push(self._text.finish(), search=self._count > self._min_tokens)
        if stop is not None:
            piece.finish, piece.stop_reason = "stop", stop
            return shown
        return shown + self._stops.finish()


def _first(part: Generated, count: int, width: int) -> Logprobs | None:
    """The log probabilities of so many of the part's tokens, as many of each as were asked for."""
    if part.logprob_ids is None or part.logprobs is None:
        return None
    ranks = None if part.ranks is None else part.ranks[:count]
    return Logprobs(part.logprob_ids[:count, :width], part.logprobs[:count, :width], ranks)


async def write(engine: Generates, tokenizer: Decodes, job: Job) -> AsyncIterator[list[Piece]]:
    """Pieces of the job's rows until all have ended. Closing it, at any point, cancels what still runs."""
    writers = [RowWriter(tokenizer, job, row) for row in range(job.num_rows)]
    parts = _Parts(engine, job.requests())
    try:
        while not all(writer.done for writer in writers):
            pieces = []
            for row, part in await _in_time(parts.next, job):
                writer = writers[row]
                if not writer.done:
                    pieces.append(writer.take(part))
                    if isinstance(pieces[-1].stop_reason, str):  # the engine does not know that it has ended
                        parts.ended(row)
            if pieces:
                yield pieces
    finally:
        await parts.close()


async def _in_time(
    work: Callable[[], Awaitable[list[tuple[int, Generated]]]], job: Job
) -> list[tuple[int, Generated]]:
    if job.deadline_s is None:
        return await work()
    left_s = job.deadline_s - time.monotonic()
    try:
        async with asyncio.timeout(left_s):
            return await work()
    except TimeoutError:
        whole = job.deadline_s - job.arrival_s
        raise DeadlineExceeded(f"not finished within the timeout of {whole:g} s") from None


class _Parts:
    """The parts of several requests as one stream. Each is read by a task of its own; what has come
    since the last call is handed out together, so a slow reader gets fewer, longer pieces."""

    def __init__(self, engine: Generates, requests: Sequence[tuple[Request, list[int]]]) -> None:
        self._queue: asyncio.Queue[list[tuple[int, Generated]] | BaseException] = asyncio.Queue()
        self._tasks: dict[asyncio.Task[None], set[int]] = {}
        for request, rows in requests:
            task = asyncio.create_task(self._read(engine, request, rows))
            self._tasks[task] = set(rows)

    async def _read(self, engine: Generates, request: Request, rows: list[int]) -> None:
        stream: Any = engine.generate(request)
        missing = set(range(len(rows)))
        try:
            async for parts in stream:
                self._queue.put_nowait([(rows[part.row], part) for part in parts])
                missing -= {part.row for part in parts if part.finish is not None}
            if missing:
                raise EngineError(
                    f"the engine ended {len(missing)} rows of request {request.id} without a reason"
                )
        except Exception as error:  # told to whoever reads; a cancelled task has no reader
            self._queue.put_nowait(error)
        finally:
            if hasattr(stream, "aclose"):
                await stream.aclose()

    async def next(self) -> list[tuple[int, Generated]]:
        found = [await self._queue.get()]
        while not self._queue.empty():
            found.append(self._queue.get_nowait())
        parts: list[tuple[int, Generated]] = []
        for some in found:
            if isinstance(some, BaseException):
                raise some
            parts += some
        return parts

    def ended(self, row: int) -> None:
        """Nobody wants more of this row: once all rows of its request have ended, so has the request."""
        for task, rows in self._tasks.items():
            rows.discard(row)
            if not rows:
                task.cancel()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
