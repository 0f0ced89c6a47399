"""What `/v1/completions` and `/v1/chat/completions` share: from a body to pieces of text, and to events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import msgspec
import orjson

from penstock.api.endpoint import Call
from penstock.api.state import ServedModel
from penstock.api.work import note_phases, settle_timeout
from penstock.errors import BadValue, NotPossible
from penstock.inputs.generation import GenerationFields, Job, TextInputs, grammar_of
from penstock.inputs.tokenizer import Tokenizer
from penstock.tasks.text_stream import Generates, Piece, write
from penstock.types import Ints, PoolingParams, Task

DONE = b"data: [DONE]\n\n"


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool = False  # in an event of its own, before the last
    continuous_usage_stats: bool = False  # in every event


class TextFields(GenerationFields, kw_only=True):
    """Which model, when, and how the answer comes."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool = False
    priority: int = 0
    timeout: float | None = None
    request_id: str | None = None
    user: str | None = None

    @property
    def usage_in_stream(self) -> StreamOptions:
        return self.stream_options or StreamOptions()


@dataclass(slots=True, eq=False)
class Writing:
    """One body on its way: what was asked, and what has come so far."""

    call: Call
    body: TextFields
    model: ServedModel
    job: Job
    kind: str  # of the answer: cmpl | chatcmpl
    hidden: bool = False  # tokens are made only to learn about the prompt
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer.tokenizer

    def name(self, number: int) -> str:
        """A token as the answer shows it."""
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{number}"
        return self.tokenizer.token_text(number)

    def head(self, object_name: str) -> dict[str, Any]:
        name = f"{self.kind}-{self.body.request_id or self.job.id}"
        return {"id": name, "object": object_name, "created": self.created, "model": self.model.spec.name}

    @property
    def usage(self) -> dict[str, int]:
        prompt, new = sum(map(len, self.job.prompts)), self.completion_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + new, "completion_tokens": new}

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """The engine's pieces, counted. Closing it cancels the rows."""
        engine = cast(Generates, self.model.client)
        try:
            async with aclosing(cast(Any, write(engine, self.tokenizer, self.job))) as stream:
                async for pieces in stream:
                    for piece in pieces:
                        self._note(piece)
                    yield pieces
        finally:
            self.call.metrics.generated(self.model.spec.name, self.completion_tokens)
        note_phases(self.call, time.monotonic())

    def _note(self, piece: Piece) -> None:
        if self.hidden:
            piece.text, piece.token_ids, piece.logprobs = "", [], None
            piece.finish = piece.finish and "length"
        if piece.token_ids:
            if self.completion_tokens == 0:
                self.call.metrics.first_token(time.monotonic() - self.call.began_s)
            self.completion_tokens += len(piece.token_ids)
        if piece.timings is not None:
            waited = max(0.0, piece.timings.queue_s - self.call.tokenize_s)  # counted from the arrival
            self.call.queue_s = max(self.call.queue_s, waited)
            self.call.device_s = max(self.call.device_s, piece.timings.device_s)


async def begin(
    call: Call,
    body: TextFields,
    rows: Callable[[TextInputs], list[Ints]],
    *,
    kind: str,
    logprobs: int | None,
    echo: bool = False,
    default_tokens: int | None,
) -> Writing:
    """Check everything and make the job; `rows` renders and tokenises, on the tokenizer's thread."""
    call.request_id = body.request_id
    model = call.state.model(body.model)
    text = text_inputs(call, model)
    check_stream(body)
    timeout_s = settle_timeout(call, body)
    began = time.monotonic()
    if body.structured:  # compiling may take long, and others wait for the tokenizer's thread
        await asyncio.to_thread(grammar_of, body)

    def prepare() -> Job:
        prompts = rows(text)
        return text.job(
            call.state.next_id(),
            prompts,
            body,
            logprobs=logprobs,
            echo=echo,
            default_tokens=default_tokens,
            priority=body.priority,
            arrival_s=call.began_s,
            deadline_s=None if timeout_s is None else call.began_s + timeout_s,
        )

    job = await model.tokenizer.call(prepare)
    call.tokenize_s = time.monotonic() - began
    if job.num_rows > (most := call.state.config.max_rows):
        raise BadValue(
            f"{len(job.prompts)} prompts, each n = {job.n} times, are {job.num_rows} rows; at most {most} go "
            "into one request",
            param="n",
        )
    if job.sampling.grammar is not None and not getattr(model.client, "constrains", False):
        raise NotPossible(
            "this engine does not constrain its output; leave out response_format and guided_*",
            param="response_format",
        )
    call.metrics.work(model.spec.name, job.num_rows, sum(map(len, job.prompts)))
    return Writing(call, body, model, job, kind, hidden=echo and body.max_tokens == 0)


def text_inputs(call: Call, model: ServedModel) -> TextInputs:
    """The model's text side; of one that does not generate, a reason."""
    if model.text is None:
        model.processor.check(PoolingParams(Task.GENERATE))
        model.text = TextInputs(model.spec, model.tokenizer.tokenizer, call.state.config.chat_template)
    return model.text


def check_stream(body: TextFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise BadValue("stream_options are for stream: true only", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise BadValue("prompt_logprobs are not given in a stream", param="prompt_logprobs")


def event(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


class Choice(Protocol):
    """One row of a stream."""

    def chunks(self, piece: Piece) -> Sequence[dict[str, Any]]:
        """The choices of a piece's events: none while there is nothing to tell."""

    def plain(self, text: str) -> dict[str, Any]:
        """The choice of an event that has nothing but text, of a row that has begun."""


async def events(writing: Writing, object_name: str, rows: Sequence[Choice]) -> AsyncGenerator[bytes, None]:
    """Server-sent events: the choices of each piece, the usage where asked for, the end."""
    told = writing.body.usage_in_stream
    head = writing.head(object_name)
    frames: list[_Frame | None] = [None] * len(rows)  # of rows that have begun

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        whole = {**head, "choices": [choice]}
        if told.include_usage:
            whole["usage"] = writing.usage if told.continuous_usage_stats else None
        return whole

    async with aclosing(writing.pieces()) as stream:
        async for pieces in stream:
            out = []
            for piece in pieces:
                frame = frames[piece.row]
                if frame is not None and piece.is_plain:
                    if piece.text:
                        out.append(frame.event(piece.text))
                    continue
                row = rows[piece.row]
                out += [event(chunk(choice)) for choice in row.chunks(piece)]
                if not told.continuous_usage_stats:
                    frames[piece.row] = _Frame(chunk(row.plain(_MARK)))
            if out:
                yield b"".join(out)
    if told.include_usage:
        yield event({**head, "choices": [], "usage": writing.usage})
    yield DONE


_MARK = "\0text\0"


class _Frame:
    """What is the same in all events of a row that have nothing but text, written once."""

    def __init__(self, marked: dict[str, Any]) -> None:
        self._before, _, self._after = event(marked).rpartition(orjson.dumps(_MARK))  # names stand before it

    def event(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + self._after
