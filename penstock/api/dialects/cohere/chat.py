"""The dialect of Cohere: `/v2/chat`, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
import orjson

from penstock.api.call import Call, Reply, Streamed, streamed
from penstock.api.dialects.cohere.shared import cohere_errors
from penstock.api.fields import NoEffect, Refused, RequestFields
from penstock.api.generation import DONE, Generation, TextFields, begin
from penstock.api.replies import json_reply
from penstock.api.routes import RouteSpec
from penstock.errors import BadValue, DeadlineExceeded, PenstockError, shown
from penstock.inputs.generation import JsonSchema, ResponseFormat
from penstock.outputs.logprobs import chat_content
from penstock.tasks.generate import ChatPrompt, Generate
from penstock.tasks.text_stream import TextDelta

MAX_MESSAGES = 4096
FinishReason = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS"]
_NO_TOOLS = "the server does not generate tool calls"


class ContentPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message. Only `text` is supported."""

    type: str
    text: str | None = None


class CohereMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    citations: list[Any] | None = None  # of an earlier answer; they are not part of its text
    tool_calls: list[Any] | None = None
    tool_plan: str | None = None
    tool_call_id: str | None = None

    def plain(self, index: int) -> dict[str, Any]:
        """The message in the form that chat templates read."""
        where = f"messages[{index}]"
        if self.role == "tool" or self.tool_calls or self.tool_plan or self.tool_call_id:
            raise BadValue(f"{where} is about tools, but {_NO_TOOLS}", param="messages")
        if self.content is None or self.content == []:
            raise BadValue(f"{where} has no content", param="messages")
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        for part in self.content:
            if part.type != "text":
                raise BadValue(
                    f"{where}.content has a part of type {shown(part.type)}; only text parts are supported",
                    param="messages",
                )
            if part.text is None:
                raise BadValue(f"{where}.content has a part without text", param="messages")
        return {
            "role": self.role,
            "content": [{"type": "text", "text": part.text} for part in self.content],
        }


class CohereResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether the answer is JSON, and of which schema."""

    type: Literal["text", "json_object"] = "text"
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None  # an older name of json_schema

    def common(self) -> ResponseFormat | None:
        if self.json_schema is not None and self.schema is not None:
            raise BadValue("response_format has both json_schema and schema", param="response_format")
        schema = self.schema if self.json_schema is None else self.json_schema
        if self.type == "text":
            if schema is not None:
                raise BadValue(
                    "response_format has a schema, which needs type 'json_object'", param="response_format"
                )
            return None
        if schema is None:
            return ResponseFormat(type="json_object")
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema))


class CohereChatRequest(RequestFields, kw_only=True):
    """Body of `POST /v2/chat`."""

    messages: Annotated[list[CohereMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    p: float | None = None
    k: int | None = None
    seed: int | None = None
    stop_sequences: list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    response_format: CohereResponseFormat | None = None
    logprobs: bool = False
    safety_mode: Annotated[
        Literal["CONTEXTUAL", "STRICT", "OFF", "NONE"] | None,
        Refused(
            "no safety instructions are added to the conversation; write them into a system message",
            accepts=(None, "CONTEXTUAL", "OFF", "NONE"),
        ),
    ] = None
    tools: Annotated[list[Any] | None, Refused(_NO_TOOLS, accepts=(None, []))] = None
    tool_choice: Annotated[Literal["REQUIRED", "NONE"] | None, Refused(_NO_TOOLS, accepts=(None, "NONE"))] = (
        None
    )
    strict_tools: Annotated[bool | None, NoEffect("there are no tools")] = None
    documents: Annotated[
        list[Any] | None,
        Refused("write what the model is to read into a message", accepts=(None, [])),
    ] = None
    citation_options: Annotated[
        dict[str, Any] | None, NoEffect("without documents there is nothing to cite")
    ] = None
    thinking: Annotated[
        dict[str, Any] | None, Refused("the server does not tell thoughts from the answer")
    ] = None

    def text_fields(self) -> TextFields:
        """The request in the common fields of text generation."""
        response_format = None if self.response_format is None else self.response_format.common()
        return TextFields(
            model=self.model,
            adapter=self.adapter,
            stream=self.stream,
            priority=self.priority,
            timeout=self.timeout,
            request_id=self.request_id,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.p,
            top_k=self.k,
            seed=self.seed,
            stop=self.stop_sequences,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            response_format=response_format,
        )


async def cohere_chat(call: Call, body: CohereChatRequest) -> Reply | Streamed:
    """Reply to a conversation, in the shape of Cohere's v2 API; `stream` sends events while text is
    generated."""
    messages = [message.plain(index) for index, message in enumerate(body.messages)]
    fields = body.text_fields()
    task = Generate(
        source=ChatPrompt(messages=messages),
        fields=fields,
        logprobs=0 if body.logprobs else None,
        default_max_tokens=None,
    )
    generation = await begin(call, fields, task, kind="chat")
    if body.stream:
        return await streamed(_events(generation))
    return json_reply(await _whole(generation, with_logprobs=body.logprobs))


async def _whole(generation: Generation, *, with_logprobs: bool) -> dict[str, Any]:
    texts: list[str] = []
    logprobs: list[dict[str, Any]] = []
    reason: FinishReason = "COMPLETE"
    async for deltas in generation.deltas():
        for delta in deltas:
            texts.append(delta.text)
            logprobs += _scored_tokens(generation, delta)
            reason = _finish_reason(delta) or reason
    content = {
        "id": _id(generation),
        "finish_reason": reason,
        "message": {"role": "assistant", "content": [{"type": "text", "text": "".join(texts)}]},
        "usage": _usage(generation),
    }
    return {**content, "logprobs": logprobs} if with_logprobs else content


async def _events(generation: Generation) -> AsyncGenerator[bytes, None]:
    """The events of a stream. The first come with the first text, so an earlier failure sets the status."""
    has_begun, reason = False, "COMPLETE"
    try:
        async with aclosing(generation.deltas()) as stream:
            async for deltas in stream:
                out = [] if has_begun else _first_events(generation)
                has_begun = True
                for delta in deltas:
                    reason = _finish_reason(delta) or reason
                    out += _delta_events(generation, delta)
                if out:
                    yield b"".join(out)
    except PenstockError as error:
        if not has_begun:
            raise
        generation.call.metrics.refused(error)
        yield _last_events(generation, _error_reason(error), error.message)
        return
    yield _last_events(generation, reason)


def _first_events(generation: Generation) -> list[bytes]:
    message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
    content = {"message": {"content": {"type": "text", "text": ""}}}
    return [
        _event("message-start", id=_id(generation), delta={"message": message}),
        _event("content-start", index=0, delta=content),
    ]


def _delta_events(generation: Generation, delta: TextDelta) -> list[bytes]:
    scored = _scored_tokens(generation, delta)
    if not delta.text and not scored:
        return []
    more = {"logprobs": _joined(scored)} if scored else {}
    return [_event("content-delta", index=0, delta={"message": {"content": {"text": delta.text}}}, **more)]


def _last_events(generation: Generation, reason: str, error: str | None = None) -> bytes:
    end: dict[str, Any] = {"finish_reason": reason, "usage": _usage(generation)}
    if error is not None:
        end["error"] = error
    events = (
        _event("content-end", index=0),
        _event("message-end", id=_id(generation), delta=end),
        DONE,
    )
    return b"".join(events)


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **content}))


def _id(generation: Generation) -> str:
    return str(generation.head("")["id"])


def _finish_reason(delta: TextDelta) -> FinishReason | None:
    if delta.finish_reason is None:
        return None
    if delta.finish_reason == "length":
        return "MAX_TOKENS"
    return "STOP_SEQUENCE" if isinstance(delta.stop_reason, str) else "COMPLETE"


def _error_reason(error: PenstockError) -> str:
    return "TIMEOUT" if isinstance(error, DeadlineExceeded) else "ERROR"


def _scored_tokens(generation: Generation, delta: TextDelta) -> list[dict[str, Any]]:
    """The tokens of a delta with their log probabilities, if these were requested."""
    if (scores := delta.logprobs) is None:
        return []
    raw = generation.tokenizer.token_raw_bytes
    entries = chat_content(scores.ids, scores.values, generation.token_name, raw, 0)
    return [
        {"text": entry["token"], "token_ids": [token_id], "logprobs": [entry["logprob"]]}
        for entry, token_id in zip(entries, scores.ids[:, 0].tolist(), strict=True)
    ]


def _joined(scored: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry for all tokens of an event."""
    return {
        "text": "".join(each["text"] for each in scored),
        "token_ids": [token_id for each in scored for token_id in each["token_ids"]],
        "logprobs": [logprob for each in scored for logprob in each["logprobs"]],
    }


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    tokens = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    return {"billed_units": tokens, "tokens": tokens}


# --- answers ------------------------------------------------------------------------------------------------


class ChatTokens(msgspec.Struct, kw_only=True):
    input_tokens: int
    output_tokens: int


class ChatUsage(msgspec.Struct, kw_only=True):
    billed_units: ChatTokens
    tokens: ChatTokens


class TextContent(msgspec.Struct, kw_only=True):
    type: Literal["text"]
    text: str


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"]
    content: list[TextContent]


class ScoredTokens(msgspec.Struct, kw_only=True):
    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereChatAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    finish_reason: FinishReason
    message: AssistantMessage
    usage: ChatUsage
    logprobs: list[ScoredTokens] | msgspec.UnsetType = msgspec.UNSET  # with logprobs: true


ROUTES = (
    RouteSpec(
        "/v2/chat",
        CohereChatRequest,
        cohere_chat,
        "Cohere",
        CohereChatAnswer,
        cohere_errors({"top_p": "p", "top_k": "k", "stop": "stop_sequences"}),
        {"messages": [{"role": "user", "content": "What feeds a turbine?"}], "max_tokens": 16},
    ),
)
