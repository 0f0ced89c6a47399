"""The OpenAI dialect's `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from penstock.api.endpoint import Call, Reply, Streamed, streamed
from penstock.api.generation import Generation, TextFields, begin, events
from penstock.api.replies import json_reply
from penstock.api.routes import RouteSpec
from penstock.errors import BadValue
from penstock.inputs.chat import part_texts
from penstock.outputs.logprobs import chat_content, prompt_entries
from penstock.tasks.generate import ChatPrompt, Generate
from penstock.tasks.text_stream import TextDelta

MAX_MESSAGES = 4096


class ChatRequest(TextFields, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # templates write them out
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """The newer name of max_tokens."""
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens


async def chat_completions(call: Call, body: ChatRequest) -> Reply | Streamed:
    """Reply to a conversation through the model's chat template; `stream` sends text while it is
    generated."""
    if len(body.messages) > MAX_MESSAGES:
        raise BadValue(
            f"messages has {len(body.messages)} entries; give at most {MAX_MESSAGES}", param="messages"
        )
    messages = [_checked(message, index) for index, message in enumerate(body.messages)]

    source = ChatPrompt(
        messages=messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        template_kwargs=body.chat_template_kwargs,
    )
    logprobs = _top_logprobs(body)
    task = Generate(source=source, fields=body, logprobs=logprobs, default_max_tokens=None)
    generation = await begin(call, body, task, kind="chatcmpl")
    role = "assistant" if body.add_generation_prompt else str(messages[-1]["role"])
    echo = _echoed(messages[-1], role) if body.echo else ""
    choices = [_Choice(generation, index, role, echo, logprobs) for index in range(generation.job.num_rows)]
    if body.stream:
        return await streamed(events(generation, "chat.completion.chunk", choices))
    async for deltas in generation.deltas():
        for delta in deltas:
            choices[delta.row].take(delta)
    content = {
        **generation.head("chat.completion"),
        "choices": [choice.whole() for choice in choices],
        "usage": generation.usage,
    }
    if body.prompt_logprobs is not None:
        content["prompt_logprobs"] = choices[0].prompt_logprobs or [None]
    return json_reply(content)


def _checked(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message without the empty fields that clients send along."""
    if not isinstance(message.get("role"), str):
        raise BadValue(f"message {index} has no role", param="messages")
    if message.get("content") is None and not message.get("tool_calls"):
        raise BadValue(f"message {index} has no content", param="messages")
    if message.get("content") is not None:
        part_texts(message["content"], index)
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadValue("top_logprobs needs logprobs: true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _echoed(message: dict[str, Any], role: str) -> str:
    return "\n".join(part_texts(message["content"], -1)) if message["role"] == role else ""


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
        self._has_begun = False
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self.prompt_logprobs: list[dict[str, Any] | None] | None = None

    def take(self, delta: TextDelta) -> None:
        self._text.append(delta.text)
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
        self._text, self._logprobs = [], []
        if text or logprobs or delta.finish_reason is not None:
            content = {"content": text} if text or delta.finish_reason is None else {}
            chunk = {"index": self._index, "delta": content}
            chunk["logprobs"] = {"content": logprobs} if logprobs else None
            out.append({**chunk, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason})
        return out

    def plain(self, text: str) -> dict[str, Any]:
        return {"index": self._index, "delta": {"content": text}, **_UNFINISHED, "stop_reason": None}

    def whole(self) -> dict[str, Any]:
        return {
            "index": self._index,
            "message": {"role": self._role, "content": "".join(self._text)},
            "logprobs": None if self._num_logprobs is None else {"content": self._logprobs},
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }


_UNFINISHED = {"logprobs": None, "finish_reason": None}


ROUTES = (RouteSpec("/v1/chat/completions", ChatRequest, chat_completions, "OpenAI"),)
