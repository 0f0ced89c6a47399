"""Runs one batch: its lines go through the same endpoints as HTTP requests, as background requests.

As many lines are in flight as it takes to fill the engine's steps. Answers are committed in groups. If the
server is full, the engine is down or the model is asleep, a line waits and is retried.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from penstock.api.body import sized
from penstock.api.call import JSON, Call, Reply, Streamed
from penstock.api.endpoint import Endpoint
from penstock.api.error_styles import openai_error_body
from penstock.api.keys import ApiKey
from penstock.api.metrics import BATCH_LINES, BATCH_LINES_WAITING
from penstock.batches.journal import Journal, LineAnswer
from penstock.batches.lines import UNREADABLE, RequestLine, parse_line, read_lines
from penstock.batches.records import BatchRecord, Usage, new_id
from penstock.errors import (
    BadValue,
    EngineError,
    EngineUnavailable,
    ModelAsleep,
    NotFound,
    PenstockError,
    Unauthorized,
)
from penstock.types import Task

if TYPE_CHECKING:
    from penstock.api.batch_service import BatchService

COMMIT_S = 0.5  # between two commits
MAX_UNCOMMITTED = 4096  # answers
MAX_UNCOMMITTED_BYTES = 32 << 20
STEPS_IN_FLIGHT = 3  # engine steps that the lines in flight fill
MAX_LINES_IN_FLIGHT = 4096
MAX_BYTES_IN_FLIGHT = 64 << 20
READ_LINES = 64  # read from the file at a time
CHECK_S = 0.5  # between checks whether the batch is cancelled or has expired
FIRST_DELAY_S, MAX_DELAY_S = 0.25, 5.0  # before a line is retried
MAX_CRASHES_SHARED = 2  # engine crashes with a line in flight, before the line is retried alone
MAX_CRASHES_ALONE = 2  # further crashes, before the line fails
_FIRST_BYTES = 4096  # assumed before any line is answered, at four bytes per token
_CLIENT = "batch "  # prefix of the owner's name: batches and requests of a key get separate fair shares
_ENDINGS = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered"),
    "expired": ("batch_expired", "the completion window ended before this line was answered"),
}


class _Streams(msgspec.Struct):
    """The field of a body that requests a stream."""

    stream: bool | None = None


class _ErrorBody(msgspec.Struct, kw_only=True):
    code: str
    message: str


class _Response(msgspec.Struct, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class OutputLine(msgspec.Struct, kw_only=True):
    """A line of the output file or of the error file."""

    id: str
    custom_id: str
    response: _Response | None = None
    error: _ErrorBody | None = None


_decode_streams = msgspec.json.Decoder(_Streams).decode
_encode = msgspec.json.encode


class BatchRun:
    """One batch, from its first unanswered line to its end."""

    def __init__(self, service: BatchService, batch: BatchRecord) -> None:
        self._service = service
        self._state = service.state
        self.batch = batch
        self._endpoint: Endpoint | None = service.endpoints.get(batch.endpoint)
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes_in_flight = 0
        self._answers: list[LineAnswer] = []
        self._answer_bytes = 0
        self._append: asyncio.Future[BatchRecord] | None = None  # the last commit, on its thread
        self._failure: BaseException | None = None  # why the batch cannot continue
        self._waiting = BATCH_LINES_WAITING.labels(batch.endpoint)
        # Totals over answered lines, for an estimate of bytes per token.
        self._num_known_bytes, self._num_known_tokens = _FIRST_BYTES, _FIRST_BYTES / 4
        self._changed = asyncio.Event()  # a line was answered, or the batch must stop
        self._ending = ""  # why the batch ends early: a key of `_ENDINGS`
        self._num_suspects = 0  # lines that were in flight in several crashes; they run alone
        self._alone = asyncio.Lock()

    async def run(self) -> None:
        store, path = self._service.store, self._service.store.path(self.batch.input_file_id)
        journal = await asyncio.to_thread(Journal, store, self.batch)
        helpers = [asyncio.create_task(self._watch()), asyncio.create_task(self._commit_often(journal))]
        self._waiting.inc(self._num_left)
        try:
            done = await asyncio.to_thread(store.done_lines, self.batch.id)
            lines = read_lines(path, self._service.config.max_body_bytes)
            left = self._left(lines, done)
            self._check_end()
            async for number, raw in left:
                while not self._ending and not self._has_room():
                    await self._next_change()
                if self._ending:
                    break
                self._begin(number, raw)
            while self._tasks and not self._ending:
                await self._next_change()
            await self._stop_lines()
            await self._commit(journal)
            if self._ending:
                done = await asyncio.to_thread(store.done_lines, self.batch.id)
                await self._end_lines(journal, done)
            await _stop(helpers)
            await self._settled()
            if self._num_left:
                raise EngineError(f"{self._num_left} lines have no answer")
            await self._finish()
        finally:
            await self._stop_lines()
            await _stop(helpers)
            await self._settled()
            journal.close()
            self._waiting.dec(self._num_left)

    @property
    def _num_left(self) -> int:
        """The number of unanswered lines."""
        return self.batch.total - self.batch.num_answered

    # --- lines ------------------------------------------------------------------------------------------

    async def _left(
        self, lines: Iterator[tuple[int, bytes | None]], done: set[int]
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the unanswered lines, read a few at a time."""
        while block := await asyncio.to_thread(lambda: list(islice(lines, READ_LINES))):
            for number, raw in block:
                if raw is not None and number not in done:
                    yield number, raw

    def _has_room(self) -> bool:
        if not self._tasks:
            return True
        if self._num_suspects or len(self._answers) >= MAX_UNCOMMITTED:
            return False
        if self._answer_bytes >= MAX_UNCOMMITTED_BYTES:
            return False
        max_lines, max_bytes = self._window()
        return len(self._tasks) < max_lines and self._bytes_in_flight < max_bytes

    def _window(self) -> tuple[int, int]:
        """How many lines, and bytes of lines, should be in flight to fill the steps of all engines."""
        try:
            use = None if self._endpoint is None else self._endpoint.use
            engine = self._state.find(self.batch.model, use)[0].engine
        except PenstockError:
            return MAX_LINES_IN_FLIGHT, _FIRST_BYTES
        settings, num_engines = engine.engine_settings, max(1, getattr(engine, "num_ready", 1))
        if self._endpoint is not None and self._endpoint.use is Task.GENERATE:
            return max(1, num_engines * settings.get("max_num_seqs", 64) // 2), MAX_BYTES_IN_FLIGHT
        num_tokens = num_engines * STEPS_IN_FLIGHT * settings.get("max_num_batched_tokens", 1024)
        bytes_per_token = self._num_known_bytes / max(1.0, self._num_known_tokens)
        return MAX_LINES_IN_FLIGHT, min(MAX_BYTES_IN_FLIGHT, int(num_tokens * bytes_per_token))

    def _begin(self, number: int, raw: bytes) -> None:
        task = asyncio.create_task(self._run_line(number, raw))
        self._tasks.add(task)
        self._bytes_in_flight += len(raw)
        task.add_done_callback(lambda done: self._ended(done, len(raw)))

    def _ended(self, task: asyncio.Task[None], num_bytes: int) -> None:
        self._tasks.discard(task)
        self._bytes_in_flight -= num_bytes
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
        self._changed.set()

    async def _run_line(self, number: int, raw: bytes) -> None:
        answer = await self._answer(number, parse_line(raw))
        self._answers.append(answer)
        self._answer_bytes += len(answer.raw)
        if not answer.is_error:
            self._num_known_bytes += len(raw)
            self._num_known_tokens += answer.usage.input_tokens

    async def _answer(self, number: int, line: RequestLine) -> LineAnswer:
        """Run a line until it has an answer."""
        delay_s, num_crashes = FIRST_DELAY_S, 0
        is_suspect = False
        try:
            while True:
                was_ready = self._state.ready
                try:
                    if not is_suspect:
                        return await self._attempt(number, line)
                    async with self._alone:
                        return await self._attempt(number, line)
                except PenstockError as error:
                    if (
                        was_ready
                        and isinstance(error, EngineUnavailable)
                        and not isinstance(error, ModelAsleep)
                    ):
                        num_crashes += 1
                    if num_crashes >= MAX_CRASHES_SHARED and not is_suspect:
                        is_suspect = True
                        self._num_suspects += 1
                    if num_crashes >= MAX_CRASHES_SHARED + MAX_CRASHES_ALONE:
                        why = "the engine stopped each time that this line ran"
                        return _failed(number, line, EngineError(why))
                    await asyncio.sleep(
                        max(delay_s, min(MAX_DELAY_S, getattr(error, "retry_after_s", 0.0) / 2))
                    )
                    delay_s = min(MAX_DELAY_S, 2 * delay_s)
        finally:
            self._num_suspects -= is_suspect

    async def _attempt(self, number: int, line: RequestLine) -> LineAnswer:
        body = bytes(line.body)
        if self._endpoint is None:
            why = f"this server has no route {self.batch.endpoint}"
            return _failed(number, line, NotFound(why))
        if _asks_for_stream(body):
            why = "a line of a batch cannot be streamed; leave out stream"
            return _failed(number, line, BadValue(why))
        call = Call(self._state, self._service.metrics, time.monotonic())
        call.is_background = True
        call.client = _CLIENT + self.batch.owner
        if self._state.config.needs_key and self.batch.owner:
            if (key := self._key()) is None:
                why = f"key {self.batch.owner}, which made this batch, is no longer valid"
                return _failed(number, line, Unauthorized(why))
            call.key = key
        reply = await self._endpoint.answer(call, body)
        if isinstance(reply, Streamed):
            await reply.rest.aclose()
            why = f"{self.batch.endpoint} streams its answer, which a line of a batch cannot have"
            return _failed(number, line, BadValue(why))
        if reply.content_type != JSON:
            why = "the answer would not be JSON; use another encoding_format"
            return _failed(number, line, BadValue(why))
        return await _answered(
            number, line, reply, Usage(input_tokens=call.num_tokens, output_tokens=call.num_generated)
        )

    def _key(self) -> ApiKey | None:
        return self._state.keys.named(self.batch.owner)

    # --- the end ----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Check whether the batch is cancelled or has expired, even while no line is answered."""
        while not self._ending:
            await asyncio.sleep(CHECK_S)
            self._take(await asyncio.to_thread(self._service.store.batch, self.batch.id))
            self._check_end()

    def _take(self, record: BatchRecord) -> None:
        """Use a record of the store, unless a commit has finished since it was read."""
        if record.num_answered >= self.batch.num_answered:
            self.batch = record

    def _check_end(self) -> None:
        if self.batch.status == "cancelling":
            self._ending = "cancelled"
        elif time.time() >= self.batch.expires_at and self.batch.status == "in_progress":
            self._ending = "expired"
        if self._ending:
            self._changed.set()

    async def _stop_lines(self) -> None:
        await _stop(list(self._tasks))

    async def _end_lines(self, journal: Journal, done: set[int]) -> None:
        """Answer every remaining line with the reason why it does not run."""
        code, message = _ENDINGS[self._ending]
        lines = read_lines(
            self._service.store.path(self.batch.input_file_id), self._service.config.max_body_bytes
        )
        async for number, raw in self._left(lines, done):
            output = OutputLine(
                id=new_id("batch_req_"),
                custom_id=parse_line(raw).custom_id,
                error=_ErrorBody(code=code, message=message),
            )
            self._answers.append(LineAnswer(number, _encode(output), is_error=True))
            if len(self._answers) >= MAX_UNCOMMITTED:
                await self._commit(journal)
        await self._commit(journal)

    async def _finish(self) -> None:
        """End the batch in one transaction, with the files that it wrote."""
        store, ending = self._service.store, self._ending

        def finalise(record: BatchRecord) -> None:
            if record.status == "in_progress" and not ending:
                record.status, record.finalizing_at = "finalizing", int(time.time())

        def settle(record: BatchRecord) -> None:
            now = int(time.time())
            if ending == "cancelled":
                record.status, record.cancelled_at = "cancelled", now
            elif ending == "expired":
                record.status, record.expired_at = "expired", now
            else:
                record.status, record.completed_at = "completed", now

        batch = await asyncio.to_thread(store.update, self.batch.id, finalise)
        await asyncio.to_thread(store.end, self.batch.id, settle, self._service.output_files(batch))
        for file_id, size in (
            (batch.output_file_id, batch.output_bytes),
            (batch.error_file_id, batch.error_bytes),
        ):
            if not size:
                store.path(file_id).unlink(missing_ok=True)

    # --- commits ----------------------------------------------------------------------------------------

    async def _next_change(self) -> None:
        """Wait until a line is answered, answers are committed, or the batch must stop."""
        self._changed.clear()
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def _commit_often(self, journal: Journal) -> None:
        """Commit answers regularly while lines run. A failure ends the batch."""
        try:
            while True:
                await asyncio.sleep(COMMIT_S)
                await self._commit(journal)
        except (OSError, sqlite3.Error, PenstockError) as error:
            self._failure = error
            self._changed.set()

    async def _commit(self, journal: Journal) -> None:
        """Commit all answers so far. Waits for an earlier one first: its thread outlives a cancelled task."""
        await self._settled()
        answers, self._answers, self._answer_bytes = self._answers, [], 0
        if not answers:
            return
        self._append = asyncio.ensure_future(asyncio.to_thread(journal.append, answers))
        self.batch = await asyncio.shield(self._append)
        num_failed = sum(answer.is_error for answer in answers)
        BATCH_LINES.labels(self.batch.endpoint, "failed").inc(num_failed)
        BATCH_LINES.labels(self.batch.endpoint, "completed").inc(len(answers) - num_failed)
        self._waiting.dec(len(answers))
        self._check_end()
        self._changed.set()

    async def _settled(self) -> None:
        """Wait until no commit is under way."""
        while self._append is not None and not self._append.done():
            await asyncio.wait([self._append])


async def _stop(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _asks_for_stream(body: bytes) -> bool:
    try:
        return _decode_streams(body).stream is True
    except UNREADABLE:
        return False  # the route reports what is wrong


async def _answered(number: int, line: RequestLine, reply: Reply, usage: Usage) -> LineAnswer:
    _, pieces = await sized(reply.body)
    raw = reply.body if isinstance(reply.body, bytes) else b"".join(pieces)
    output = _output(line, reply.status, raw)
    return LineAnswer(number, output, is_error=reply.status != 200, usage=usage)


def _failed(number: int, line: RequestLine, error: PenstockError) -> LineAnswer:
    """An error of a line, in the shape of the routes of OpenAI."""
    return LineAnswer(number, _output(line, error.status, _encode(openai_error_body(error))), is_error=True)


def _output(line: RequestLine, status: int, body: bytes) -> bytes:
    name = new_id("batch_req_")
    response = _Response(status_code=status, request_id=name.removeprefix("batch_"), body=msgspec.Raw(body))
    return _encode(OutputLine(id=name, custom_id=line.custom_id, response=response))
