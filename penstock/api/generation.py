"""Text generation for every dialect: from a body to text deltas and server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol

import msgspec
import orjson

from penstock.api.call import Call
from penstock.api.fields import CacheSalt, NoEffect, Refused, User
from penstock.api.replies import record_phases
from penstock.api.run import scheduling_of
from penstock.api.state import ServedModel
from penstock.errors import BadValue
from penstock.inputs.generation import GenerationFields, GenerationJob
from penstock.inputs.tokenizer import Tokenizer
from penstock.tasks.generate import Generate
from penstock.tasks.run import Scheduling
from penstock.tasks.text_stream import TextDelta, stream_text

DONE = b"data: [DONE]\n\n"


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool = False  # in a separate event before the last
    continuous_usage_stats: bool = False  # in every event
    include_obfuscation: Annotated[bool | None, NoEffect("events are not padded")] = None


class TextFields(GenerationFields, kw_only=True):
    """The model, the scheduling, and how the answer is sent."""

    model: str | None = None
    adapter: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool = False
    priority: int = 0
    timeout: float | None = None
    request_id: str | None = None
    user: User = None
    cache_salt: CacheSalt = ""

    @property
    def usage_in_stream(self) -> StreamOptions:
        return self.stream_options or StreamOptions()


_KEPT = "nothing is kept after the answer"
_NO_BEAMS = "beam search is not supported"
_NO_TRANSFER = "caches of other servers cannot be read"


class OpenAITextFields(TextFields, kw_only=True):
    """The other fields that OpenAI's and vLLM's text routes have in common."""

    return_tokens_as_token_ids: bool | None = False  # type: ignore[assignment]
    return_token_ids: bool | None = False
    service_tier: Annotated[str | None, NoEffect("there is one tier; see priority")] = None
    store: Annotated[bool | None, NoEffect(_KEPT)] = None
    metadata: Annotated[dict[str, Any] | None, NoEffect(_KEPT)] = None
    session_id: Annotated[str | None, NoEffect("one server serves all sessions")] = None
    stream_interval: Annotated[int | None, NoEffect("text is sent as soon as it is generated")] = None
    use_beam_search: Annotated[bool, Refused("ask for n and choose among them", (False,))] = False
    length_penalty: Annotated[float | None, NoEffect(_NO_BEAMS)] = None
    early_stopping: Annotated[bool | str | None, NoEffect(_NO_BEAMS)] = None
    guided_decoding_backend: Annotated[str | None, NoEffect("there is one backend")] = None
    guided_whitespace_pattern: Annotated[str | None, Refused("write it into guided_regex")] = None
    logprob_token_ids: Annotated[
        list[int] | None, Refused("only the likeliest tokens are reported", (None, []))
    ] = None
    thinking_token_budget: Annotated[
        int | None, Refused("the server does not separate reasoning from the answer")
    ] = None
    repetition_detection: Annotated[dict[str, Any] | None, Refused("set stop or max_tokens")] = None
    return_token_offsets: Annotated[bool | None, Refused("tokens have no offsets", (None, False))] = None
    routed_experts_prompt_start: Annotated[int, NoEffect("experts are not reported")] = 0
    kv_transfer_params: Annotated[dict[str, Any] | None, Refused(_NO_TRANSFER)] = None
    ec_transfer_params: Annotated[dict[str, Any] | None, Refused(_NO_TRANSFER)] = None
    vllm_xargs: Annotated[dict[str, Any] | None, Refused("this server has no plugins", (None, {}))] = None


class GenerationUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class PromptLogprob(msgspec.Struct, kw_only=True):
    logprob: float
    rank: int | None  # 1: the likeliest token
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; None for the first token


@dataclass(slots=True, eq=False)
class Generation:
    """One generation request: its parameters, and its progress."""

    call: Call
    body: TextFields
    model: ServedModel
    job: GenerationJob
    kind: str  # prefix of the answer's id, such as cmpl
    scores_prompt_only: bool = False  # one token is generated only to score the prompt; it is not shown
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0
    _launched_s: float | None = None  # start of its first step; None until it is known

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.text.tokenizer

    @property
    def shows_token_ids(self) -> bool:
        return bool(getattr(self.body, "return_token_ids", False))

    def prompt_token_ids(self, index: int) -> list[int]:
        ids: list[int] = self.job.prompts[index].tolist()
        return ids

    def token_name(self, token_id: int) -> str:
        """A token as the answer shows it."""
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def head(self, object_name: str) -> dict[str, Any]:
        name = f"{self.kind}-{self.body.request_id or self.job.id}"
        return {"id": name, "object": object_name, "created": self.created, "model": self.model.name}

    @property
    def usage(self) -> dict[str, int]:
        prompt, new = sum(map(len, self.job.prompts)), self.completion_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + new, "completion_tokens": new}

    async def deltas(self) -> AsyncGenerator[list[TextDelta], None]:
        """Yield the engine's deltas, and count them. Closing the generator cancels the sequences."""
        try:
            async with aclosing(stream_text(self.model.engine, self.tokenizer, self.job)) as stream:
                async for deltas in stream:
                    for delta in deltas:
                        self._count(delta)
                    yield deltas
        finally:
            self.call.metrics.generated(self.model.spec.name, self.completion_tokens)
            if self.call.trace is not None:
                self.call.trace.generated(self._launched_s, self.call.device_s)
            self.call.count_generated(self.completion_tokens)
        record_phases(self.call, time.monotonic())  # text is encoded while it is generated

    def _count(self, delta: TextDelta) -> None:
        if self.scores_prompt_only:
            delta.text, delta.token_ids, delta.logprobs = "", [], None
            delta.finish_reason = delta.finish_reason and "length"
        if delta.token_ids:
            if self.completion_tokens == 0:
                now_s = time.monotonic()
                self.call.metrics.first_token(self.model.spec.name, now_s - self.call.began_s)
                if self.call.trace is not None:
                    self.call.trace.first_token(now_s)
            self.completion_tokens += len(delta.token_ids)
        if delta.timings is not None:
            launched_s = self.call.began_s + delta.timings.queue_s
            self._launched_s = min(self._launched_s or launched_s, launched_s)
            waited = max(0.0, delta.timings.queue_s - self.call.tokenize_s)  # the engine counts from arrival
            self.call.queue_s = max(self.call.queue_s, waited)
            self.call.device_s = max(self.call.device_s, delta.timings.device_s)


async def begin(call: Call, body: TextFields, task: Generate, *, kind: str) -> Generation:
    """Check everything and prepare the job, off the event loop."""
    model = call.model(body, may_truncate=False)
    _ = model.text.generation  # refuses a model that does not generate
    if model.adapter is not None:
        task = replace(task, adapter=model.adapter.id)
    check_stream(body)
    check_structured(body)
    scheduling = scheduling_of(call, body)
    began = time.monotonic()
    job = await _prepare(call, model, task, scheduling)
    call.tokenize_s = time.monotonic() - began
    if job.num_rows > (max_rows := call.state.config.max_rows):
        raise BadValue(
            f"{len(job.prompts)} prompts with n = {job.n} are {job.num_rows} sequences; one request takes at "
            f"most {max_rows}",
            param="n",
        )
    num_tokens = sum(map(len, job.prompts))
    call.count_tokens(num_tokens)
    call.count_work(model, job.num_rows, num_tokens)
    if call.trace is not None:
        call.trace.tokenized(began, call.tokenize_s)
    return Generation(call, body, model, job, kind, scores_prompt_only=task.echo and body.max_tokens == 0)


async def _prepare(call: Call, model: ServedModel, task: Generate, scheduling: Scheduling) -> GenerationJob:
    """Tokenise the prompts, unless the queue has no room for them."""
    if call.is_background:
        return await task.prepare(model.text, call.state.next_id(), scheduling)
    admission, num_tokens = model.admission, None
    kind, num_bytes = call.work_size(type(task).__name__)
    admitted = admission.admit(kind, num_bytes, generates=True, light_weight=call.light_weight)
    try:
        job = await task.prepare(model.text, call.state.next_id(), scheduling)
        num_tokens = sum(map(len, job.prompts))
        return job
    finally:
        admission.tokenised(kind, admitted, num_tokens)


def check_structured(body: TextFields) -> None:
    """Refuse `structured_outputs` without any known constraint: the text would not follow it."""
    outputs = body.structured_outputs
    if outputs is not None and all(value is None for value in msgspec.structs.astuple(outputs)):
        raise BadValue(
            "structured_outputs needs one of json, regex, choice, grammar or json_object",
            param="structured_outputs",
        )


def check_stream(body: TextFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise BadValue("stream_options are for stream: true only", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise BadValue("prompt_logprobs are not given in a stream", param="prompt_logprobs")


def event(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


class Choice(Protocol):
    """One sequence of a stream."""

    def chunks(self, delta: TextDelta) -> Sequence[dict[str, Any]]:
        """The choices of a delta's events; empty while there is nothing to show."""

    def plain(self, text: str) -> dict[str, Any]:
        """The choice of an event with text only, after the sequence's first event."""


async def events(
    generation: Generation,
    object_name: str,
    choices: Sequence[Choice],
    first: Mapping[str, Any] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events: the choices of each delta, the usage if requested, and the end. The first
    event also has the fields of `first`."""
    options = generation.body.usage_in_stream
    head = generation.head(object_name)
    once = dict(first or {})
    is_uniform = not (options.continuous_usage_stats or generation.shows_token_ids)
    templates: list[_EventTemplate | None] = [None] * len(choices)  # None until a sequence has begun

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        whole = {**head, "choices": [choice], **once}
        once.clear()
        if options.include_usage:
            whole["usage"] = generation.usage if options.continuous_usage_stats else None
        return whole

    async with aclosing(generation.deltas()) as stream:
        async for deltas in stream:
            out = []
            for delta in deltas:
                template = templates[delta.row]
                if template is not None and delta.is_plain:
                    if delta.text:
                        out.append(template.event(delta.text))
                    continue
                choice = choices[delta.row]
                out += [event(chunk(each)) for each in choice.chunks(delta)]
                if is_uniform:
                    templates[delta.row] = _EventTemplate(chunk(choice.plain(_PLACEHOLDER)))
            if out:
                yield b"".join(out)
    if options.include_usage:
        yield event({**head, "choices": [], "usage": generation.usage})
    yield DONE


_PLACEHOLDER = "\0text\0"


class _EventTemplate:
    """An event with text only, encoded once per sequence. Each event fills in its text."""

    def __init__(self, marked: dict[str, Any]) -> None:
        self._before, _, self._after = event(marked).rpartition(orjson.dumps(_PLACEHOLDER))

    def event(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + self._after
