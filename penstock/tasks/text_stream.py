"""Turns a generation job into text: submits its requests, detokenises tokens as they arrive, and ends
sequences at stop strings. The server, the offline engines and the commands all generate through
`stream_text`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DeadlineExceeded, EngineError, PenstockError
from penstock.handle import EngineHandle, Unsubscribe
from penstock.inputs.generation import GenerationJob
from penstock.outputs.detokenizer import TokenDecoder, detokenizer
from penstock.outputs.stops import StopStrings
from penstock.types import GeneratedTokens, Ints, Timings, TokenLogprobs


@dataclass(slots=True, eq=False)
class TextDelta:
    """New text and tokens of one sequence."""

    row: int  # index of the sequence: prompt · n + index among the prompt's n
    text: str
    token_ids: list[int]
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None  # "stop" | "length", with the last delta
    stop_reason: int | str | None = None  # the stop string or stop token id that ended the sequence
    prompt_logprobs: TokenLogprobs | None = None  # for all prompt tokens but the first; with the first delta
    timings: Timings | None = None  # with the last delta

    @property
    def is_plain(self) -> bool:
        """Whether it has only text and token ids."""
        return self.finish_reason is None and self.logprobs is None and self.prompt_logprobs is None


class SequenceText:
    """The text of one sequence: detokenises, and looks for stop strings."""

    def __init__(self, tokenizer: TokenDecoder, job: GenerationJob, row: int) -> None:
        prompt = job.prompts[row // job.n]
        self.row = row
        self.finished = False
        self._text = detokenizer(tokenizer, prompt[-8:].tolist(), job.skip_special_tokens)
        self._stops = StopStrings(job.stops, job.include_stop)
        self._include_stop = job.include_stop
        self._min_tokens = job.sampling.min_tokens
        self._stop_token_ids = frozenset(job.sampling.stop_token_ids)
        self._num_logprobs = 1 + (job.sampling.logprobs or 0)
        self._num_tokens = 0
        # Prompt tokens whose log probabilities are still to come; the first token has none.
        self._num_unscored = 0 if job.sampling.prompt_logprobs is None else len(prompt) - 1

    def push(self, token_id: int) -> TextDelta:
        """Add one token of a sequence that the engine continues."""
        if self._num_unscored:
            self._take_prompt_logprobs(None)
        self._num_tokens += 1
        text = self._text.push(token_id)
        if not self._stops.is_active:
            return TextDelta(self.row, text, [token_id])
        shown, stop = self._stops.push(text, search=self._num_tokens > self._min_tokens)
        self.finished = stop is not None
        return TextDelta(self.row, shown, [token_id], None, None if stop is None else "stop", stop)

    def take(self, part: GeneratedTokens) -> TextDelta:
        """Add tokens that may come with log probabilities or a finish reason."""
        delta = TextDelta(self.row, "", [], finish_reason=part.finish_reason, timings=part.timings)
        if self._num_unscored:
            delta.prompt_logprobs = self._take_prompt_logprobs(part)
        ids = part.token_ids.tolist()
        if part.stop_token is not None and ids[-1:] != [part.stop_token]:
            ids.append(part.stop_token)  # it was generated, so it counts whether or not the engine returns it
        texts: list[str] = []
        for at, token_id in enumerate(ids):
            self._num_tokens += 1
            delta.token_ids.append(token_id)
            if part.stop_token is not None and at == len(ids) - 1 and not self._include_stop:
                break  # it ends the sequence and is not shown
            search = self._num_tokens > self._min_tokens
            shown, stop = self._stops.push(self._text.push(token_id), search=search)
            texts.append(shown)
            if stop is not None:
                delta.finish_reason, delta.stop_reason = "stop", stop
                break
        if delta.finish_reason is not None and not isinstance(delta.stop_reason, str):
            texts.append(self._finish(delta, part.stop_token))
        self.finished = delta.finish_reason is not None
        delta.text = "".join(texts)
        delta.logprobs = _leading_logprobs(part, len(delta.token_ids), self._num_logprobs)
        return delta

    def _take_prompt_logprobs(self, part: GeneratedTokens | None) -> TokenLogprobs:
        """The prompt's log probabilities, which come with the first part. Raises `EngineError` if they are
        missing, because the answer would be silently wrong."""
        scores = None
        if part is not None:
            scores = _logprobs(part.prompt_logprob_ids, part.prompt_logprobs, part.prompt_ranks)
        if scores is not None and len(scores.ids) == self._num_unscored:
            self._num_unscored = 0
            return scores
        raise EngineError(f"the engine returned no prompt log probabilities for sequence {self.row}")

    def _finish(self, delta: TextDelta, stop_token: int | None) -> str:
        """The rest of the text, which may still complete a stop string."""
        if stop_token in self._stop_token_ids:
            delta.stop_reason = stop_token
        shown, stop = self._stops.push(self._text.finish(), search=self._num_tokens > self._min_tokens)
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
            return shown
        return shown + self._stops.finish()


def _leading_logprobs(part: GeneratedTokens, num_tokens: int, width: int) -> TokenLogprobs | None:
    """The log probabilities of the part's first tokens, `width` of them for each."""
    scores = _logprobs(part.logprob_ids, part.logprobs, part.ranks)
    if scores is None:
        return None
    ids, values, ranks = scores
    return TokenLogprobs(ids[:num_tokens, :width], values[:num_tokens, :width], ranks[:num_tokens])


def _logprobs(
    ids: Ints | None, values: NDArray[np.float32] | None, ranks: Ints | None
) -> TokenLogprobs | None:
    """The three arrays as one; None if any is missing."""
    return None if ids is None or values is None or ranks is None else TokenLogprobs(ids, values, ranks)


async def stream_text(
    engine: EngineHandle, tokenizer: TokenDecoder, job: GenerationJob
) -> AsyncGenerator[list[TextDelta], None]:
    """Deltas of the job's sequences until all have finished. Closing it cancels unfinished sequences."""
    sequences = [SequenceText(tokenizer, job, row) for row in range(job.num_rows)]
    num_unfinished = len(sequences)
    inbox = _Inbox()
    try:
        inbox.subscribe(engine, job)
        while num_unfinished:
            deltas = []
            for row, new in await inbox.next():
                sequence = sequences[row]
                if sequence.finished:
                    continue
                delta = sequence.push(new) if isinstance(new, int) else sequence.take(new)
                deltas.append(delta)
                if delta.finish_reason is not None:
                    num_unfinished -= 1
                    if isinstance(delta.stop_reason, str):  # the engine does not know that it has finished
                        inbox.finish(row)
            if deltas:
                yield deltas
    finally:
        inbox.close()


class _Inbox:
    """Received tokens of a job's requests, for one reader. `next` returns all that arrived since the last
    call, so a slow reader gets fewer and longer deltas."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: list[tuple[int, int | GeneratedTokens]] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._subscriptions: list[tuple[_RequestRows, Unsubscribe]] = []

    def subscribe(self, engine: EngineHandle, job: GenerationJob) -> None:
        """Submit all requests of the job and arm its deadline."""
        if job.deadline_s is not None:
            timeout_s = job.deadline_s - job.arrival_s
            late = DeadlineExceeded(f"not finished within the timeout of {timeout_s:g} s")
            self._timer = self._loop.call_later(job.deadline_s - time.monotonic(), self.fail, late)
        for request, rows in job.requests():
            listener = _RequestRows(self, rows)
            self._subscriptions.append((listener, engine.stream(request, listener)))

    def put(self, row: int, new: int | GeneratedTokens) -> None:
        self._arrived.append((row, new))
        if self._waiter is not None:
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Make `next` raise `error`, once everything that arrived earlier has been returned."""
        self._error = self._error or error
        self._wake()

    async def next(self) -> list[tuple[int, int | GeneratedTokens]]:
        if not self._arrived and self._error is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._arrived and self._error is not None:
            raise self._error
        arrived, self._arrived = self._arrived, []
        return arrived

    def finish(self, row: int) -> None:
        """A stop string ended this sequence. A request is cancelled once all its sequences have finished."""
        for listener, unsubscribe in self._subscriptions:
            listener.wanted.discard(row)
            if not listener.wanted:
                unsubscribe()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for _, unsubscribe in self._subscriptions:
            unsubscribe()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _RequestRows:
    """The `StreamListener` of one request, whose rows are some of the job's sequences."""

    def __init__(self, inbox: _Inbox, rows: list[int]) -> None:
        self.wanted = set(rows)
        self._inbox = inbox
        self._rows = rows
        self._num_unfinished = len(rows)

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    def on_token(self, row: int, token_id: int) -> None:
        self._inbox.put(self._rows[row], token_id)

    def on_tokens(self, parts: list[GeneratedTokens]) -> None:
        for part in parts:
            self._num_unfinished -= part.finish_reason is not None
            self._inbox.put(self._rows[part.row], part)

    def on_error(self, error: PenstockError) -> None:
        self._num_unfinished = 0
        if self.wanted:
            self._inbox.fail(error)
