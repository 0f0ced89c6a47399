"""Generation: from prompts or a conversation to completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from penstock.handle import EngineHandle
from penstock.inputs.generation import (
    DEFAULT_MAX_TOKENS,
    GenerationFields,
    GenerationInputs,
    GenerationJob,
    JobImages,
    JobOptions,
    grammar_of,
)
from penstock.tasks.model import TextModel
from penstock.tasks.run import DEFAULT_SCHEDULING, Scheduling
from penstock.tasks.text_stream import TextDelta, stream_text
from penstock.types import Ints, PreparedImage, Timings, TokenLogprobs

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompts:
    """Texts or token ids to continue."""

    prompts: Any
    add_special_tokens: bool = True

    @property
    def size(self) -> int:
        """Approximate number of characters or tokens."""
        if isinstance(self.prompts, str) or not hasattr(self.prompts, "__len__"):
            return len(self.prompts) if isinstance(self.prompts, str) else 1
        return len(self.prompts) + sum(len(row) for row in self.prompts if hasattr(row, "__len__"))

    def rows(self, inputs: GenerationInputs, fields: GenerationFields) -> tuple[list[Ints], JobImages | None]:
        return inputs.rows(self.prompts, fields, self.add_special_tokens), None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation, rendered by the model's chat template."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # chat templates contain them
    template_kwargs: Mapping[str, Any] | None = None
    template: str | None = None  # Jinja; None: the model's own
    images: Sequence[PreparedImage] = ()  # the images in the messages, in order

    @property
    def size(self) -> int:
        """Approximate number of characters, or of image patches if there are images."""
        if self.images:  # the messages then contain image bytes, which are not rendered
            return sum(len(image.patches) for image in self.images)
        contents = (message.get("content") for message in self.messages)
        return sum(len(str(content)) for content in contents if content is not None)

    def rows(self, inputs: GenerationInputs, fields: GenerationFields) -> tuple[list[Ints], JobImages | None]:
        chat = inputs.chat
        template = chat.template if self.template is None else chat.given(self.template)
        text = template.render(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
        )
        if self.images:
            return inputs.image_rows(text, self.images, self.add_special_tokens)
        return inputs.rows(text, fields, self.add_special_tokens), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """One generation call: its prompts and its options."""

    source: TextPrompts | ChatPrompt
    fields: GenerationFields
    logprobs: int | None = None
    echo: bool = False
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS  # None: as many as fit
    adapter: int = -1  # id of a LoRA adapter; -1: none

    async def prepare(
        self, model: TextModel, request_id: str, scheduling: Scheduling = DEFAULT_SCHEDULING
    ) -> GenerationJob:
        """Check everything, render and tokenise, off the event loop."""
        inputs = model.generation
        # Compiling a grammar may take long, so it does not run on the tokenizer's thread, which is shared.
        if self.fields.structured:
            await asyncio.to_thread(grammar_of, self.fields)
        make = partial(self._job, inputs, request_id, scheduling)
        return await model.batcher.call(make, self.source.size)

    def _job(self, inputs: GenerationInputs, request_id: str, scheduling: Scheduling) -> GenerationJob:
        rows, images = self.source.rows(inputs, self.fields)
        arrival_s = time.monotonic() if scheduling.arrival_s is None else scheduling.arrival_s
        options = JobOptions(
            logprobs=self.logprobs,
            echo=self.echo,
            default_max_tokens=self.default_max_tokens,
            priority=scheduling.priority,
            arrival_s=arrival_s,
            deadline_s=None if scheduling.timeout_s is None else arrival_s + scheduling.timeout_s,
            client=scheduling.client,
            weight=scheduling.weight,
            is_background=scheduling.is_background,
            adapter=self.adapter,
        )
        return inputs.job(request_id, rows, self.fields, options, images)

    async def stream(
        self,
        model: TextModel,
        engine: EngineHandle,
        request_id: str,
        scheduling: Scheduling = DEFAULT_SCHEDULING,
    ) -> AsyncGenerator[list[TextDelta], None]:
        """New text as it is generated. Closing the iterator cancels unfinished sequences."""
        job = await self.prepare(model, request_id, scheduling)
        async with aclosing(stream_text(engine, model.tokenizer, job)) as stream:
            async for deltas in stream:
                yield deltas

    async def run(
        self,
        model: TextModel,
        engine: EngineHandle,
        request_id: str,
        scheduling: Scheduling = DEFAULT_SCHEDULING,
    ) -> list[Completion]:
        """The completions of all prompts. The `n` completions of a prompt are next to each other."""
        job = await self.prepare(model, request_id, scheduling)
        parts: list[list[TextDelta]] = [[] for _ in range(job.num_rows)]
        async with aclosing(stream_text(engine, model.tokenizer, job)) as stream:
            async for deltas in stream:
                for delta in deltas:
                    parts[delta.row].append(delta)
        return [Completion.of(deltas, job.n) for deltas in parts]


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What was generated for one prompt."""

    text: str
    token_ids: list[int]  # all generated tokens, including the one that ended the text
    finish_reason: str  # "stop" | "length"
    stop_reason: int | str | None  # the stop string or stop token id that ended the text
    prompt_index: int = 0
    index: int = 0  # index among the prompt's `n` completions
    logprobs: TokenLogprobs | None = None  # log probabilities of `token_ids`, if requested
    prompt_logprobs: TokenLogprobs | None = None
    timings: Timings = field(default_factory=Timings)

    @classmethod
    def of(cls, deltas: Sequence[TextDelta], n: int) -> Completion:
        """Join the deltas of one sequence. The last delta has the finish reason."""
        last = deltas[-1]
        return cls(
            text="".join(delta.text for delta in deltas),
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            finish_reason=last.finish_reason or "length",
            stop_reason=last.stop_reason,
            prompt_index=last.row // n,
            index=last.row % n,
            logprobs=_joined([delta.logprobs for delta in deltas if delta.logprobs is not None]),
            prompt_logprobs=deltas[0].prompt_logprobs,
            timings=last.timings or Timings(),
        )


def _joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs | None:
    if not parts:
        return None
    return TokenLogprobs(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
