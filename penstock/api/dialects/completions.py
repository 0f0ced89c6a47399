"""The OpenAI dialect's `/v1/completions`."""

from __future__ import annotations

from typing import Any

from penstock.api.endpoint import Call, Reply, Streamed, streamed
from penstock.api.generation import TextFields, Writing, begin, events
from penstock.api.work import json_reply
from penstock.errors import BadValue
from penstock.inputs.generation import DEFAULT_TOKENS
from penstock.outputs.logprobs import CompletionLogprobs, joined, prompt_entries
from penstock.tasks.text_stream import Piece


class CompletionRequest(TextFields, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool = True
    suffix: str | None = None
    best_of: int | None = None


async def completions(call: Call, body: CompletionRequest) -> Reply | Streamed:
    """Continues texts or token ids; `stream` gives the new text while it comes."""
    if body.suffix:
        raise BadValue("suffix is not supported: a prompt is continued at its end", param="suffix")
    if body.best_of not in (None, body.n):
        raise BadValue("best_of is not supported; ask for n and choose among them", param="best_of")
    writing = await begin(
        call,
        body,
        lambda text: text.rows(body.prompt, body, body.add_special_tokens),
        kind="cmpl",
        logprobs=body.logprobs,
        echo=bool(body.echo),
        default_tokens=DEFAULT_TOKENS,
    )
    rows = [_Row(writing, body, row) for row in range(writing.job.num_rows)]
    if body.stream:
        return await streamed(events(writing, "text_completion", rows))
    async for pieces in writing.pieces():
        for piece in pieces:
            rows[piece.row].take(piece)
    choices = [row.choice() for row in rows]
    return json_reply({**writing.head("text_completion"), "choices": choices, "usage": writing.usage})


class _Row:
    """One choice as it grows."""

    def __init__(self, writing: Writing, body: CompletionRequest, row: int) -> None:
        self._writing = writing
        self._index = row
        self._prompt = writing.job.prompts[row // writing.job.n]
        self._echo = self._prompt_text(body, row // writing.job.n) if body.echo else None
        self._wants = body.logprobs is not None
        self._scores = CompletionLogprobs(writing.name)
        self._wants_prompt = body.prompt_logprobs is not None
        self._prompt_scores: list[dict[str, Any] | None] | None = None
        self._text: list[str] = []
        self._lists: list[dict[str, Any]] = []
        self._finish: str | None = None
        self._stop_reason: int | str | None = None

    def _prompt_text(self, body: CompletionRequest, index: int) -> str:
        if isinstance(body.prompt, str):
            return body.prompt
        given = body.prompt[index] if body.prompt else None
        if isinstance(given, str):
            return given
        return self._writing.tokenizer.decode(self._prompt.tolist(), body.skip_special_tokens)

    def take(self, piece: Piece) -> tuple[str, dict[str, Any] | None]:
        """The piece's part of the text and of the log probabilities; before the first, what is echoed."""
        texts, lists = [piece.text], []
        if self._echo is not None:
            texts.insert(0, self._echo)
            if self._wants:
                lists.append(self._scores.unscored(int(self._prompt[0])))
                if piece.prompt is not None:
                    lists.append(self._scores.scored(piece.prompt.ids, piece.prompt.values))
            self._echo = None
        if self._wants_prompt and piece.prompt is not None:
            scores = piece.prompt
            self._prompt_scores = prompt_entries(
                scores.ids, scores.values, scores.ranks, self._writing.tokenizer.token_text
            )
        if self._wants and piece.logprobs is not None:
            lists.append(self._scores.scored(piece.logprobs.ids, piece.logprobs.values))
        self._finish, self._stop_reason = piece.finish, piece.stop_reason
        self._text += texts
        self._lists += lists
        return "".join(texts), joined(lists) if lists else None

    def plain(self, text: str) -> dict[str, Any]:
        return self._shaped(text, None)

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The event's choices: none while there is nothing to tell."""
        text, logprobs = self.take(piece)
        self._text.clear()
        self._lists.clear()
        if not text and logprobs is None and piece.finish is None:
            return []
        return [self._shaped(text, logprobs)]

    def choice(self) -> dict[str, Any]:
        choice = self._shaped("".join(self._text), joined(self._lists) if self._wants else None)
        if self._wants_prompt:
            choice["prompt_logprobs"] = self._prompt_scores or [None]  # a prompt of one token has no others
        return choice

    def _shaped(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._finish,
            "stop_reason": self._stop_reason,
        }
