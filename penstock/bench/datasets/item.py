"""The data of one request, for any API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# a text · texts · token ids · lists of token ids · chat messages · the fields of a native request
Prompt = str | list[str] | list[int] | list[list[int]] | list[dict[str, Any]] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    prompt: Prompt  # the documents, if there is a query
    rows: int = 1  # inputs of the model
    tokens: int | None = None  # counted by the client; None: not counted
    output_tokens: int = 1
    query: str | None = None

    @property
    def texts(self) -> list[str]:
        """All texts of the request; other kinds of content are left out."""
        prompt = self.prompt
        found = [self.query] if self.query is not None else []
        if isinstance(prompt, str):
            return [*found, prompt]
        if isinstance(prompt, list):
            return found + [part for part in prompt if isinstance(part, str)]
        return found


def item_of(prompt: Prompt, output_tokens: int = 1) -> Item:
    return Item(prompt, rows=_rows(prompt), output_tokens=output_tokens)


def _rows(prompt: Prompt) -> int:
    if isinstance(prompt, dict):
        value = prompt.get("input")
        return len(value) if isinstance(value, list) and value and not isinstance(value[0], int) else 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return len(prompt)
    return 1
