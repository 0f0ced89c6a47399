"""From a job to pieces of text: asks the engine, writes tokens as they come, ends rows at stop strings.

What server, command line and offline use share; `Generates` is all that is asked of an engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DeadlineExceeded, EngineError, PenstockError
from penstock.inputs.generation import Job
from penstock.outputs.detokenizer import Decodes, detokenizer
from penstock.outputs.stops import StopStrings
from penstock.types import GeneratedTokens, Ints, Request, Timings
from penstock.wire.router import Leave, Listener, Parts


class Generates(Protocol):
    def listen(self, request: Request, listener: Listener) -> Leave:
        """Have a request's rows continued. The listener is told what comes; once it leaves, which it does
        in any case, what has not ended is cancelled."""


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

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing but text."""
        return self.finish is None and self.logprobs is None and self.prompt is None


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

    def push(self, number: int) -> Piece:
        """One further token; the row goes on, as far as the engine knows."""
        if self._unscored:
            self._prompt_logprobs(None)
        self._count += 1
        text = self._text.push(number)
        if not self._stops.wanted:
            return Piece(self.row, text, [number])
        shown, stop = self._stops.push(text, search=self._count > self._min_tokens)
        self.done = stop is not None
        return Piece(self.row, shown, [number], None, None if stop is None else "stop", stop)

    def take(self, part: GeneratedTokens) -> Piece:
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

    def _prompt_logprobs(self, part: GeneratedTokens | None) -> Logprobs:
        """They come with the first part; answering without them would be wrong in silence."""
        ids, values = (None, None) if part is None else (part.prompt_logprob_ids, part.prompt_logprobs)
        if part is None or ids is None or values is None or len(ids) != self._unscored:
            raise EngineError(f"the engine gave no log probabilities of the prompt of row {self.row}")
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


def _first(part: GeneratedTokens, count: int, width: int) -> Logprobs | None:
    """The log probabilities of so many of the part's tokens, as many of each as were asked for."""
    if part.logprob_ids is None or part.logprobs is None:
        return None
    ranks = None if part.ranks is None else part.ranks[:count]
    return Logprobs(part.logprob_ids[:count, :width], part.logprobs[:count, :width], ranks)


async def write(engine: Generates, tokenizer: Decodes, job: Job) -> AsyncIterator[list[Piece]]:
    """Pieces of the job's rows until all have ended. Closing it, at any point, cancels what still runs."""
    writers = [RowWriter(tokenizer, job, row) for row in range(job.num_rows)]
    left = len(writers)
    inbox = _Inbox()
    try:
        inbox.open(engine, job)
        while left:
            pieces = []
            for row, new in await inbox.next():
                writer = writers[row]
                if writer.done:
                    continue
                pieces.append(piece := writer.push(new) if isinstance(new, int) else writer.take(new))
                if piece.finish is not None:
                    left -= 1
                    if isinstance(piece.stop_reason, str):  # the engine does not know that it has ended
                        inbox.ended(row)
            if pieces:
                yield pieces
    finally:
        inbox.close()


class _Inbox:
    """What comes of a job's requests, for one task. All that has come since the last call is handed out
    together, so a slow reader gets fewer, longer pieces."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._found: list[tuple[int, int | GeneratedTokens]] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._open: list[tuple[_Rows, Leave]] = []

    def open(self, engine: Generates, job: Job) -> None:
        """Ask for all requests; late ones fail."""
        if job.deadline_s is not None:
            whole = DeadlineExceeded(
                f"not finished within the timeout of {job.deadline_s - job.arrival_s:g} s"
            )
            self._timer = self._loop.call_later(job.deadline_s - time.monotonic(), self.fail, whole)
        for request, rows in job.requests():
            listener = _Rows(self, rows)
            self._open.append((listener, engine.listen(request, listener)))

    def put(self, row: int, new: int | GeneratedTokens) -> None:
        self._found.append((row, new))
        if self._waiter is not None:
            self._wake()

    def fail(self, error: BaseException) -> None:
        """What came before it is still handed out."""
        self._error = self._error or error
        self._wake()

    async def next(self) -> list[tuple[int, int | GeneratedTokens]]:
        if not self._found and self._error is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._found and self._error is not None:
            raise self._error
        found, self._found = self._found, []
        return found

    def ended(self, row: int) -> None:
        """Nobody wants more of this row: once all rows of its request have ended, so has the request."""
        for listener, leave in self._open:
            listener.wanted.discard(row)
            if not listener.wanted:
                leave()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for _, leave in self._open:
            leave()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Rows:
    """One request's part of an inbox; its rows are some of the job's."""

    def __init__(self, inbox: _Inbox, rows: list[int]) -> None:
        self.wanted = set(rows)
        self._inbox = inbox
        self._rows = rows
        self._left = len(rows)

    @property
    def over(self) -> bool:
        return self._left == 0

    def token(self, row: int, number: int) -> None:
        self._inbox.put(self._rows[row], number)

    def receive(self, parts: Parts | PenstockError) -> None:
        if isinstance(parts, PenstockError):
            self._left = 0
            if self.wanted:
                self._inbox.fail(parts)
            return
        self._left -= sum(part.finish is not None for part in parts)
        for part in parts:
            self._inbox.put(self._rows[part.row], part)
