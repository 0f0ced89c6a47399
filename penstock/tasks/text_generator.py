"""A generating model in this process in terms of text: what the command line talks to."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from penstock.errors import NotPossible
from penstock.inputs.generation import DEFAULT_TOKENS, GenerationFields, TextInputs
from penstock.tasks.text_stream import Generates, Piece, write
from penstock.types import Ints

Message = Mapping[str, Any]


class Writer:
    def __init__(self, engine: Generates, inputs: TextInputs) -> None:
        inputs.check_task()
        self._engine = engine
        self.inputs = inputs
        self._numbers = itertools.count()

    def complete(
        self, prompt: Any, fields: GenerationFields, *, default_tokens: int | None = DEFAULT_TOKENS
    ) -> AsyncGenerator[list[Piece], None]:
        """What follows a text or token ids. Closing the iterator cancels it."""
        return self._write(self.inputs.rows(prompt, fields), fields, default_tokens)

    def chat(
        self, messages: Sequence[Message], fields: GenerationFields
    ) -> AsyncGenerator[list[Piece], None]:
        """The answer to a conversation."""
        return self._write(self.inputs.chat_row(messages, fields), fields, None)

    async def _write(
        self, rows: list[Ints], fields: GenerationFields, default_tokens: int | None
    ) -> AsyncGenerator[list[Piece], None]:
        name = f"text-{next(self._numbers)}"
        job = self.inputs.job(name, rows, fields, default_tokens=default_tokens)
        if job.sampling.grammar is not None and not getattr(self._engine, "constrains", False):
            raise NotPossible("this engine does not constrain its output", param="response_format")
        stream: Any = write(self._engine, self.inputs.tokenizer, job)
        async with aclosing(stream):
            async for pieces in stream:
                yield pieces
