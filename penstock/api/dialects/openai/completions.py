"""The OpenAI dialect's `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.api.call import Call, Reply, Streamed, streamed
from penstock.api.fields import Refused
from penstock.api.generation import (
    Generation,
    GenerationUsage,
    OpenAITextFields,
    PromptLogprobs,
    begin,
    events,
)
from penstock.api.replies import json_reply
from penstock.api.routes import RouteSpec
from penstock.errors import BadValue
from penstock.outputs.logprobs import CompletionLogprobs, concat_logprobs, prompt_entries
from penstock.tasks.generate import Generate, TextPrompts
from penstock.tasks.text_stream import TextDelta


class CompletionRequest(OpenAITextFields, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool = True
    suffix: Annotated[str | None, Refused("a prompt is continued at its end", (None, ""))] = None
    best_of: int | None = None
    prompt_embeds: Annotated[
        str | list[str] | None, Refused("give the prompt as text or token ids", (None, []))
    ] = None


async def completions(call: Call, body: CompletionRequest) -> Reply | Streamed:
    """Continue texts or token ids; `stream` sends the text while it is generated."""
    if body.best_of not in (None, 1 if body.n is None else body.n):
        raise BadValue("best_of is not supported; ask for n and choose among them", param="best_of")
    task = Generate(
        source=TextPrompts(prompts=body.prompt, add_special_tokens=body.add_special_tokens),
        fields=body,
        logprobs=body.logprobs,
        echo=bool(body.echo),
    )
    generation = await begin(call, body, task, kind="cmpl")
    choices = [_Choice(generation, body, row) for row in range(generation.job.num_rows)]
    if body.stream:
        return await streamed(events(generation, "text_completion", choices))
    async for deltas in generation.deltas():
        for delta in deltas:
            choices[delta.row].take(delta)
    return json_reply(
        {
            **generation.head("text_completion"),
            "choices": [choice.whole() for choice in choices],
            "usage": generation.usage,
        }
    )


class _Choice:
    """One choice of the answer, as it is generated."""

    def __init__(self, generation: Generation, body: CompletionRequest, row: int) -> None:
        prompt = row // generation.job.n
        self._generation = generation
        self._index = row
        self._prompt = generation.job.prompts[prompt]
        self._echo = self._prompt_text(body, prompt) if body.echo else None  # None once it was shown
        self._wants_logprobs = body.logprobs is not None
        self._shape = CompletionLogprobs(generation.token_name)
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._prompt_logprobs: list[dict[str, Any] | None] | None = None
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self._shows_prompt_ids = generation.shows_token_ids  # until they were shown
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def _prompt_text(self, body: CompletionRequest, index: int) -> str:
        if isinstance(body.prompt, str):
            return body.prompt
        given = body.prompt[index] if body.prompt else None
        if isinstance(given, str):
            return given
        return self._generation.tokenizer.decode(self._prompt.tolist(), body.skip_special_tokens)

    def take(self, delta: TextDelta) -> tuple[str, dict[str, Any] | None]:
        """Add a delta. Returns its text and log probabilities; the first begins with the echoed prompt."""
        texts, logprobs = [delta.text], []
        if self._echo is not None:
            texts.insert(0, self._echo)
            if self._wants_logprobs:
                logprobs.append(self._shape.unscored(int(self._prompt[0])))
                if (scores := delta.prompt_logprobs) is not None:
                    logprobs.append(self._shape.scored(scores.ids, scores.values))
            self._echo = None
        if self._wants_prompt_logprobs and (scores := delta.prompt_logprobs) is not None:
            name = self._generation.tokenizer.token_text
            self._prompt_logprobs = prompt_entries(scores.ids, scores.values, scores.ranks, name)
        if self._wants_logprobs and delta.logprobs is not None:
            logprobs.append(self._shape.scored(delta.logprobs.ids, delta.logprobs.values))
        self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        self._text += texts
        self._token_ids += delta.token_ids
        self._logprobs += logprobs
        return "".join(texts), concat_logprobs(logprobs) if logprobs else None

    def plain(self, text: str) -> dict[str, Any]:
        return self._shaped(text, None)

    def chunks(self, delta: TextDelta) -> list[dict[str, Any]]:
        """The choices of the delta's events; empty while there is nothing to show."""
        text, logprobs = self.take(delta)
        self._text.clear()
        self._logprobs.clear()
        if not text and logprobs is None and delta.finish_reason is None:
            return []
        choice = self._shaped(text, logprobs)
        self._token_ids = []
        return [choice]

    def whole(self) -> dict[str, Any]:
        choice = self._shaped(
            "".join(self._text), concat_logprobs(self._logprobs) if self._wants_logprobs else None
        )
        if self._wants_prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs or [None]  # a prompt of one token has no scores
        return choice

    def _shaped(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice = {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }
        if self._generation.shows_token_ids:
            choice["token_ids"] = self._token_ids
        if self._shows_prompt_ids:
            choice["prompt_token_ids"] = self._prompt.tolist()
            self._shows_prompt_ids = False
        return choice


class CompletionLogprobLists(msgspec.Struct, kw_only=True):
    """One value for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobLists | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # with return_token_ids
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # with return_token_ids
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """Texts that continue prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: GenerationUsage


ROUTES = (
    RouteSpec(
        "/v1/completions",
        CompletionRequest,
        completions,
        "OpenAI",
        CompletionAnswer,
        example={"prompt": "A penstock is", "max_tokens": 16},
    ),
)
