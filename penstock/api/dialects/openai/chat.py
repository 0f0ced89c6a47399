"""The OpenAI dialect's `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from penstock.api.call import Call, Reply, Streamed, streamed
from penstock.api.conversations import check_messages, check_template
from penstock.api.fields import MediaOptions, NoEffect, Refused
from penstock.api.generation import (
    Generation,
    GenerationUsage,
    OpenAITextFields,
    PromptLogprobs,
    begin,
    events,
)
from penstock.api.images import message_images, prepared_images
from penstock.api.replies import json_reply
from penstock.api.routes import RouteSpec
from penstock.errors import BadValue
from penstock.inputs.chat import has_image_parts, part_texts
from penstock.inputs.generation import MAX_LOGPROBS
from penstock.outputs.logprobs import chat_content, prompt_entries
from penstock.tasks.generate import ChatPrompt, Generate
from penstock.tasks.text_stream import TextDelta
from penstock.types import PreparedImage, shown

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_CACHE = "the server finds equal beginnings of prompts by itself; see cache_salt"
_NO_TOOLS = "this server does not generate tool calls"


class ChatRequest(OpenAITextFields, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # templates write them out
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Annotated[bool | None, NoEffect(_NO_TOOLS)] = None
    functions: Annotated[list[dict[str, Any]] | None, Refused(_NO_TOOLS, (None, []))] = None
    function_call: Annotated[str | dict[str, Any] | None, Refused(_NO_TOOLS, (None, "none", "auto"))] = None
    include_reasoning: Annotated[
        bool, Refused("the server does not separate reasoning from the answer", (True,))
    ] = True
    modalities: Annotated[list[str] | None, Refused("answers are text", (None, [], ["text"]))] = None
    audio: Annotated[dict[str, Any] | None, Refused("answers are text")] = None
    prediction: Annotated[dict[str, Any] | None, NoEffect("it only makes an answer faster")] = None
    verbosity: Annotated[
        str | None, Refused("say in a message how long the answer should be", (None, "medium"))
    ] = None
    web_search_options: Annotated[dict[str, Any] | None, Refused("this server does not search")] = None
    moderation: Annotated[dict[str, Any] | None, Refused("this server does not moderate")] = None
    safety_identifier: Annotated[str | None, NoEffect("the server does not distinguish users")] = None
    prompt_cache_key: Annotated[str | None, NoEffect(_CACHE)] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, NoEffect(_CACHE)] = None
    prompt_cache_retention: Annotated[str | None, NoEffect(_CACHE)] = None
    media_io_kwargs: MediaOptions = None
    mm_processor_kwargs: MediaOptions = None
    return_prompt_text: Annotated[
        bool | None, Refused("set return_token_ids and decode them", (None, False))
    ] = None
    return_assistant_tokens_mask: Annotated[
        bool, Refused("the server does not track which role a token belongs to", (False,))
    ] = False

    def __post_init__(self) -> None:
        """Apply `max_completion_tokens`, the newer name of `max_tokens`."""
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens

    def template_variables(self) -> dict[str, Any]:
        """The variables of the template; `chat_template_kwargs` take precedence."""
        variables: dict[str, Any] = {}
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            variables["enable_thinking"] = self.reasoning_effort != "none"
        return {**variables, **(self.chat_template_kwargs or {})}


async def chat_completions(call: Call, body: ChatRequest) -> Reply | Streamed:
    """Reply to a conversation through the model's chat template; `stream` sends text while it is
    generated."""
    messages = check_messages(body.messages)
    check_tools(body)
    check_template(call, body.chat_template)
    images: Sequence[PreparedImage] = ()
    if found := message_images(body.messages):
        (images,) = await prepared_images(call, call.model(body, may_truncate=False), [found], "messages")
    source = ChatPrompt(
        messages=messages,
        images=images,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        template_kwargs=body.template_variables(),
        template=body.chat_template,
    )
    logprobs = _top_logprobs(body)
    task = Generate(source=source, fields=body, logprobs=logprobs, default_max_tokens=None)
    try:
        generation = await begin(call, body, task, kind="chatcmpl")
    except BadValue as error:
        raise _named_as_sent(error, body) from None
    role = "assistant" if body.add_generation_prompt else str(messages[-1]["role"])
    echo = _echoed(messages[-1], role) if body.echo else ""
    choices = [_Choice(generation, index, role, echo, logprobs) for index in range(generation.job.num_rows)]
    prompt_ids = {"prompt_token_ids": generation.prompt_token_ids(0)} if body.return_token_ids else {}
    if body.stream:
        return await streamed(events(generation, "chat.completion.chunk", choices, prompt_ids))
    async for deltas in generation.deltas():
        for delta in deltas:
            choices[delta.row].take(delta)
    content = {
        **generation.head("chat.completion"),
        "choices": [choice.whole() for choice in choices],
        "usage": generation.usage,
        **prompt_ids,
    }
    if body.prompt_logprobs is not None:
        content["prompt_logprobs"] = choices[0].prompt_logprobs or [None]
    return json_reply(content)


def check_tools(body: ChatRequest) -> None:
    """Refuse tools that the model may be expected to call. With tool_choice `none` it does not see tools."""
    if body.tools and body.tool_choice != "none":
        raise BadValue(
            "tools are not supported: this server does not generate tool calls; leave tools out, or set "
            'tool_choice to "none"',
            param="tools",
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise BadValue(
            'tool_choice is not supported: this server does not generate tool calls; use "none", or "auto" '
            "without tools",
            param="tool_choice",
        )


def _top_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs or 0
    if top and not body.logprobs:
        raise BadValue("top_logprobs needs logprobs: true", param="top_logprobs")
    if not 0 <= top <= MAX_LOGPROBS:
        raise BadValue(f"top_logprobs is {shown(top)}; use 0 to {MAX_LOGPROBS}", param="top_logprobs")
    return top if body.logprobs else None


def _named_as_sent(error: BadValue, body: ChatRequest) -> BadValue:
    """The error. If it is about max_tokens, it uses the newer name if the request did."""
    if body.max_completion_tokens is None or error.param != "max_tokens":
        return error
    name = "max_completion_tokens"
    return BadValue(error.message.replace(error.param, name), param=name)


def _echoed(message: dict[str, Any], role: str) -> str:
    content = message["content"]
    if has_image_parts(content):
        raise BadValue("echo cannot show a message with images; leave echo out", param="echo")
    return "\n".join(part_texts(content, -1)) if message["role"] == role and content is not None else ""


class _Choice:
    """One choice of the answer, as it is generated."""

    def __init__(
        self, generation: Generation, index: int, role: str, echo: str, num_logprobs: int | None
    ) -> None:
        self._generation = generation
        self._index = index
        self._role = role
        self._text = [echo] if echo else []
        self._num_logprobs = num_logprobs
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self._has_begun = False
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self.prompt_logprobs: list[dict[str, Any] | None] | None = None

    def take(self, delta: TextDelta) -> None:
        self._text.append(delta.text)
        self._token_ids += delta.token_ids
        self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        tokenizer = self._generation.tokenizer
        if self._num_logprobs is not None and (scores := delta.logprobs) is not None:
            name, raw = self._generation.token_name, tokenizer.token_raw_bytes
            self._logprobs += chat_content(scores.ids, scores.values, name, raw, self._num_logprobs)
        if (prompt := delta.prompt_logprobs) is not None:
            self.prompt_logprobs = prompt_entries(
                prompt.ids, prompt.values, prompt.ranks, tokenizer.token_text
            )

    def chunks(self, delta: TextDelta) -> list[dict[str, Any]]:
        """The choices of the delta's events: first the role alone, then what is new."""
        out: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            out.append({"index": self._index, "delta": {"role": self._role, "content": ""}, **_UNFINISHED})
        self.take(delta)
        text, logprobs = "".join(self._text), self._logprobs
        if text or logprobs or delta.finish_reason is not None:
            content = {"content": text} if text or delta.finish_reason is None else {}
            chunk = {"index": self._index, "delta": content}
            chunk["logprobs"] = {"content": logprobs} if logprobs else None
            chunk |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            out.append(chunk | self._ids())
            self._token_ids = []
        self._text, self._logprobs = [], []
        return out

    def _ids(self) -> dict[str, Any]:
        return {"token_ids": self._token_ids} if self._generation.shows_token_ids else {}

    def plain(self, text: str) -> dict[str, Any]:
        return {"index": self._index, "delta": {"content": text}, **_UNFINISHED, "stop_reason": None}

    def whole(self) -> dict[str, Any]:
        return {
            "index": self._index,
            "message": {"role": self._role, "content": "".join(self._text)},
            "logprobs": None if self._num_logprobs is None else {"content": self._logprobs},
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
            **self._ids(),
        }


_UNFINISHED = {"logprobs": None, "finish_reason": None}


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob, kw_only=True):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChosenTokenLogprob]


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # with return_token_ids


class ChatAnswer(msgspec.Struct, kw_only=True):
    """A reply to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: GenerationUsage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # with return_token_ids
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


ROUTES = (
    RouteSpec(
        "/v1/chat/completions",
        ChatRequest,
        chat_completions,
        "OpenAI",
        ChatAnswer,
        example={"messages": [{"role": "user", "content": "What is a penstock?"}], "max_tokens": 32},
    ),
)
