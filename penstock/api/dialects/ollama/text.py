"""The dialect of Ollama: `/api/chat` and `/api/generate`, whole or as a stream of JSON lines."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
import orjson

from penstock.api.call import Call, Reply, Streamed
from penstock.api.decoding import refused_fields
from penstock.api.dialects.ollama.errors import OLLAMA_ERRORS
from penstock.api.fields import CacheSalt, NoEffect, Refused, RequestFields
from penstock.api.generation import Generation, TextFields, begin
from penstock.api.replies import json_reply
from penstock.api.routes import RouteSpec
from penstock.errors import BadValue, PenstockError
from penstock.inputs.generation import JsonSchema, ResponseFormat
from penstock.tasks.generate import ChatPrompt, Generate, TextPrompts

NDJSON = b"application/x-ndjson"
MAX_MESSAGES = 4096
_FITS = (-1, -2)  # num_predict: as many tokens as fit
_WHOLE = (None, -1)  # repeat_last_n: the whole prompt and answer
_NO_TOOLS = "the server does not generate tool calls"
_NO_IMAGES = "this route reads texts; send images to /v1/chat/completions, as parts of type image_url"
Unused = Annotated[Any, NoEffect("how a model is loaded is chosen when the server starts")]


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How a text is continued. What is left out takes the model's own default, not Ollama's."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: Annotated[float | None, Refused("use top_p or min_p", accepts=(None, 1))] = None
    tfs_z: Annotated[float | None, Refused("use top_p or min_p", accepts=(None, 1))] = None
    mirostat: Annotated[int | None, Refused("use temperature, top_p or min_p", accepts=(None, 0))] = None
    mirostat_tau: Annotated[float | None, NoEffect("mirostat is off")] = None
    mirostat_eta: Annotated[float | None, NoEffect("mirostat is off")] = None
    penalize_newline: Annotated[
        bool | None, Refused("penalties know no exceptions", accepts=(None, True))
    ] = None
    num_ctx: Annotated[int | None, NoEffect("the whole context of the model is used")] = None
    num_keep: Annotated[int | None, NoEffect("no text is dropped while another is generated")] = None
    draft_num_predict: Annotated[int | None, NoEffect("it changes the speed only")] = None
    num_batch: Unused = None
    num_gpu: Unused = None
    main_gpu: Unused = None
    num_thread: Unused = None
    numa: Unused = None
    low_vram: Unused = None
    f16_kv: Unused = None
    use_mmap: Unused = None
    use_mlock: Unused = None
    vocab_only: Unused = None
    logits_all: Unused = None
    embedding_only: Unused = None


class OllamaTextFields(RequestFields, kw_only=True):
    """The fields of both routes."""

    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: TextOptions | None = None
    keep_alive: Annotated[float | str | None, NoEffect("models stay loaded as long as the server runs")] = (
        None
    )
    think: Annotated[
        bool | str | None,
        Refused("the server does not separate reasoning from the answer", accepts=(None, False)),
    ] = None
    truncate: Annotated[
        bool | None, Refused("a prompt beyond the context is an error", accepts=(None, False))
    ] = None
    shift: Annotated[bool | None, NoEffect("an answer ends where the context ends")] = None
    logprobs: Annotated[
        bool | None, Refused("/v1/chat/completions has log probabilities", accepts=(None, False))
    ] = None
    top_logprobs: Annotated[
        int | None, Refused("/v1/chat/completions has log probabilities", accepts=(None, 0))
    ] = None
    cache_salt: CacheSalt = ""


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message of the conversation."""

    role: str
    content: str = ""
    thinking: str | None = None  # of an earlier answer; it is not part of its text
    images: list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def plain(self, index: int) -> dict[str, Any]:
        """The message in the form that chat templates read."""
        if self.images:
            raise BadValue(f"messages[{index}] has images, but {_NO_IMAGES}", param="messages")
        if self.tool_calls or self.tool_name or self.tool_call_id or self.role.lower() == "tool":
            raise BadValue(f"messages[{index}] is about tools, but {_NO_TOOLS}", param="messages")
        return {"role": self.role.lower(), "content": self.content}


class OllamaChatRequest(OllamaTextFields, kw_only=True):
    """Body of `POST /api/chat`. As at Ollama, the answer is streamed unless `stream` is false."""

    messages: list[OllamaMessage] = msgspec.field(default_factory=list)
    tools: Annotated[list[Any] | None, Refused(_NO_TOOLS, accepts=(None, []))] = None


class OllamaGenerateRequest(OllamaTextFields, kw_only=True):
    """Body of `POST /api/generate`. As at Ollama, the prompt is the user's message in the model's chat
    template unless `raw` is true, and the answer is streamed unless `stream` is false."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    suffix: Annotated[str | None, Refused("texts are continued at their end", accepts=(None, ""))] = None
    template: Annotated[str | None, Refused("set --chat-template, or raw: true", accepts=(None, ""))] = None
    context: Annotated[list[int] | None, Refused("use /api/chat with messages", accepts=(None, []))] = None
    images: Annotated[list[Any] | None, Refused(_NO_IMAGES, accepts=(None, []))] = None


async def ollama_chat(call: Call, body: OllamaChatRequest) -> Reply | Streamed:
    """Reply to a conversation, in the dialect of Ollama."""
    if len(body.messages) > MAX_MESSAGES:
        raise BadValue(
            f"messages has {len(body.messages)} entries; give at most {MAX_MESSAGES}", param="messages"
        )
    messages = [message.plain(index) for index, message in enumerate(body.messages)]
    source = ChatPrompt(messages=messages, template_kwargs=_template_kwargs(body)) if messages else None
    return await _answer(call, body, source, _message)


async def ollama_generate(call: Call, body: OllamaGenerateRequest) -> Reply | Streamed:
    """Answer a prompt, in the dialect of Ollama."""
    source: TextPrompts | ChatPrompt | None = None
    if body.prompt and body.raw:
        if body.system:
            raise BadValue("system needs the chat template, which raw: true leaves out", param="system")
        source = TextPrompts(prompts=body.prompt)
    elif body.prompt:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": body.prompt}]
        source = ChatPrompt(messages=messages, template_kwargs=_template_kwargs(body))
    return await _answer(call, body, source, _response)


def _template_kwargs(body: OllamaTextFields) -> Mapping[str, Any] | None:
    return {"enable_thinking": False} if body.think is False else None


def _message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}}


def _response(text: str) -> dict[str, Any]:
    return {"response": text}


async def _answer(
    call: Call, body: OllamaTextFields, source: TextPrompts | ChatPrompt | None, shape: Any
) -> Reply | Streamed:
    """The answer, whole or as a stream. Without a prompt, as clients send to load a model, it is empty."""
    fields = _fields(body)
    if source is None:
        model = call.model(fields, may_truncate=False)
        _ = model.text.generation  # refuses a model that does not generate
        text = _Text(call, body.model or model.name, shape)
        return json_reply({**text.piece(""), "done": True, "done_reason": "load"})
    task = Generate(source=source, fields=fields, default_max_tokens=None)
    generation = await begin(call, fields, task, kind="ollama")
    text = _Text(call, body.model or generation.model.name, shape)
    if body.stream:
        lines = _lines(generation, text)
        return Streamed(await anext(lines), lines, NDJSON)
    parts = []
    async for deltas in generation.deltas():
        for delta in deltas:
            text.take(delta.text, delta.finish_reason)
            parts.append(delta.text)
    return json_reply(text.last("".join(parts), generation))


async def _lines(generation: Generation, text: _Text) -> AsyncGenerator[bytes, None]:
    """Yield a line for each piece of text, and a last line with the statistics. An error after the first line
    becomes the last line."""
    has_begun = False
    try:
        async with aclosing(generation.deltas()) as stream:
            async for deltas in stream:
                pieces = [delta.text for delta in deltas if text.take(delta.text, delta.finish_reason)]
                if pieces:
                    has_begun = True
                    yield b"".join(_line({**text.piece(piece), "done": False}) for piece in pieces)
    except PenstockError as error:
        if not has_begun:
            raise
        generation.call.metrics.refused(error)
        yield _line(OLLAMA_ERRORS.body(error))
        return
    yield _line(text.last("", generation))


def _line(content: dict[str, Any]) -> bytes:
    return orjson.dumps(content) + b"\n"


class _Text:
    """A text as it is generated: its pieces, and how long they took."""

    def __init__(self, call: Call, model: str, shape: Any) -> None:
        self._call = call
        self._model = model
        self._shape = shape
        self._first_s: float | None = None  # when the first piece came
        self._finish_reason = "stop"

    def take(self, piece: str, finish_reason: str | None) -> bool:
        """Record a piece. Returns whether it has text."""
        if self._first_s is None:
            self._first_s = time.monotonic()
        self._finish_reason = finish_reason or self._finish_reason
        return bool(piece)

    def piece(self, text: str) -> dict[str, Any]:
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": created, **self._shape(text)}

    def last(self, text: str, generation: Generation) -> dict[str, Any]:
        """The last piece, with the finish reason and the statistics; times are in nanoseconds."""
        now, began, usage = time.monotonic(), self._call.began_s, generation.usage
        first = now if self._first_s is None else self._first_s
        return {
            **self.piece(text),
            "done": True,
            "done_reason": self._finish_reason,
            "total_duration": int((now - began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": int((first - began) * 1e9),
            "eval_count": usage["completion_tokens"],
            "eval_duration": int((now - first) * 1e9),
        }


_OPTIONS_CHECK = refused_fields(TextOptions)


def _fields(body: OllamaTextFields) -> TextFields:
    """The body in the common fields of text generation."""
    given = body.options or TextOptions()
    if _OPTIONS_CHECK is not None:
        _OPTIONS_CHECK.check(given)
    seed = None if given.seed is not None and given.seed < 0 else given.seed
    return TextFields(
        model=body.model,
        adapter=body.adapter,
        priority=body.priority,
        timeout=body.timeout,
        request_id=body.request_id,
        cache_salt=body.cache_salt,
        stream=body.stream,
        max_tokens=_max_tokens(given.num_predict),
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        seed=seed,
        stop=given.stop,
        response_format=_response_format(body.format),
        **_penalties(given),
    )


def _max_tokens(num_predict: int | None) -> int | None:
    if num_predict is None or num_predict in _FITS:
        return None
    if num_predict < 1:
        raise BadValue(
            f"options.num_predict is {num_predict}; use -1 for as many tokens as fit, or at least 1",
            param="options",
        )
    return num_predict


def _penalties(given: TextOptions) -> dict[str, Any]:
    """The given penalties. They apply to the whole text; a window of it is refused."""
    pairs = (
        ("repetition_penalty", given.repeat_penalty, 1.0),
        ("presence_penalty", given.presence_penalty, 0.0),
        ("frequency_penalty", given.frequency_penalty, 0.0),
    )
    found = {name: value for name, value, _ in pairs if value is not None}
    has_effect = any(value not in (None, neutral) for _, value, neutral in pairs)
    if given.repeat_last_n == 0:
        return {}
    if has_effect and given.repeat_last_n not in _WHOLE:
        raise BadValue(
            f"options.repeat_last_n is {given.repeat_last_n}; penalties are for the whole text: use -1, or 0 "
            "for none",
            param="options",
        )
    return found


def _response_format(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if given is None or given == "":
        return None
    if isinstance(given, dict):
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=given))
    if given != "json":
        raise BadValue(f'format is {given[:80]!r}; use "json" or a JSON schema', param="format")
    return ResponseFormat(type="json_object")


# --- answers ------------------------------------------------------------------------------------------------


class OllamaTextAnswer(msgspec.Struct, kw_only=True):
    """The statistics are left out where there was no prompt. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"]
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET


class OllamaReply(msgspec.Struct, kw_only=True):
    role: Literal["assistant"]
    content: str


class OllamaChatAnswer(OllamaTextAnswer, kw_only=True):
    message: OllamaReply


class OllamaGenerateAnswer(OllamaTextAnswer, kw_only=True):
    response: str


ROUTES = (
    RouteSpec(
        "/api/chat",
        OllamaChatRequest,
        ollama_chat,
        "Ollama",
        OllamaChatAnswer,
        OLLAMA_ERRORS,
        {
            "messages": [{"role": "user", "content": "What feeds a turbine?"}],
            "options": {"num_predict": 16},
            "stream": False,
        },
        media=("application/x-ndjson",),
    ),
    RouteSpec(
        "/api/generate",
        OllamaGenerateRequest,
        ollama_generate,
        "Ollama",
        OllamaGenerateAnswer,
        OLLAMA_ERRORS,
        {"prompt": "What feeds a turbine?", "raw": True, "options": {"num_predict": 16}, "stream": False},
        media=("application/x-ndjson",),
    ),
)
