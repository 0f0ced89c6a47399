"""The OpenAI dialect's `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from penstock.api.endpoint import Call, Reply, Streamed, streamed
from penstock.api.generation import TextFields, Writing, begin, events
from penstock.api.work import json_reply
from penstock.errors import BadValue
from penstock.inputs.chat import part_texts
from penstock.inputs.generation import TextInputs
from penstock.outputs.logprobs import chat_content, prompt_entries
from penstock.tasks.text_stream import Piece
from penstock.types import Ints


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
    """Answers a conversation through the model's chat template; `stream` gives the text while it comes."""
    messages = [_checked(message, index) for index, message in enumerate(body.messages)]

    def rows(text: TextInputs) -> list[Ints]:
        return text.chat_row(
            messages,
            body,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            more=body.chat_template_kwargs,
        )

    logprobs = _top(body)
    writing = await begin(call, body, rows, kind="chatcmpl", logprobs=logprobs, default_tokens=None)
    role = "assistant" if body.add_generation_prompt else str(messages[-1]["role"])
    said = _echoed(messages[-1], role) if body.echo else ""
    choices = [_Choice(writing, index, role, said, logprobs) for index in range(writing.job.num_rows)]
    if body.stream:
        return await streamed(events(writing, "chat.completion.chunk", choices))
    async for pieces in writing.pieces():
        for piece in pieces:
            choices[piece.row].take(piece)
    content = {
        **writing.head("chat.completion"),
        "choices": [choice.shaped() for choice in choices],
        "usage": writing.usage,
    }
    if body.prompt_logprobs is not None:
        content["prompt_logprobs"] = choices[0].prompt_scores or [None]
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


def _top(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadValue("top_logprobs needs logprobs: true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _echoed(message: dict[str, Any], role: str) -> str:
    return "\n".join(part_texts(message["content"], -1)) if message["role"] == role else ""


class _Choice:
    """One choice as it grows."""

    def __init__(self, writing: Writing, index: int, role: str, said: str, logprobs: int | None) -> None:
        self._writing = writing
        self._index = index
        self._role = role
        self._text = [said] if said else []
        self._top = logprobs
        self._content: list[dict[str, Any]] = []
        self._began = False
        self._finish: str | None = None
        self._stop_reason: int | str | None = None
        self.prompt_scores: list[dict[str, Any] | None] | None = None

    def take(self, piece: Piece) -> None:
        self._text.append(piece.text)
        self._finish, self._stop_reason = piece.finish, piece.stop_reason
        if self._top is not None and piece.logprobs is not None:
            raw, scores = self._writing.tokenizer.token_raw, piece.logprobs
            self._content += chat_content(scores.ids, scores.values, self._writing.name, raw, self._top)
        if piece.prompt is not None:
            name = self._writing.tokenizer.token_text
            self.prompt_scores = prompt_entries(
                piece.prompt.ids, piece.prompt.values, piece.prompt.ranks, name
            )

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The event's choices: first the role alone, then what is new."""
        out: list[dict[str, Any]] = []
        if not self._began:
            self._began = True
            out.append({"index": self._index, "delta": {"role": self._role, "content": ""}, **_OPEN})
        self.take(piece)
        text, content = "".join(self._text), self._content
        self._text, self._content = [], []
        if text or content or piece.finish is not None:
            delta = {"content": text} if text or piece.finish is None else {}
            chunk = {"index": self._index, "delta": delta}
            chunk["logprobs"] = {"content": content} if content else None
            out.append({**chunk, "finish_reason": piece.finish, "stop_reason": piece.stop_reason})
        return out

    def plain(self, text: str) -> dict[str, Any]:
        return {"index": self._index, "delta": {"content": text}, **_OPEN, "stop_reason": None}

    def shaped(self) -> dict[str, Any]:
        return {
            "index": self._index,
            "message": {"role": self._role, "content": "".join(self._text)},
            "logprobs": None if self._top is None else {"content": self._content},
            "finish_reason": self._finish,
            "stop_reason": self._stop_reason,
        }


_OPEN = {"logprobs": None, "finish_reason": None}
