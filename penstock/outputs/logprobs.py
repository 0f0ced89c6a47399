"""Log probabilities in the OpenAI API's formats: lists for completions, one object per token for chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.types import Ints

LOWEST = -9999.0  # replaces minus infinity, which JSON cannot represent
TokenName = Callable[[int], str]


class CompletionLogprobs:
    """Builds the four lists of a completion. `text_offset` continues across the parts of a stream."""

    def __init__(self, name: TokenName) -> None:
        self._name = name
        self._offset = 0

    def unscored(self, token: int) -> dict[str, Any]:
        """The lists for the prompt's first token, which has no log probability."""
        return self._lists([token], [None], [None])

    def scored(self, ids: Ints, values: NDArray[np.float32]) -> dict[str, Any]:
        """The lists for scored tokens: `ids` and `values` [tokens, 1 + top], the chosen token first."""
        chosen = [_value(value) for value in values[:, 0]] if len(values) else []
        tops = [self._top(row, row_values) for row, row_values in zip(ids.tolist(), values, strict=True)]
        return self._lists(ids[:, 0].tolist(), chosen, tops)

    def _top(self, ids: list[int], values: NDArray[np.float32]) -> dict[str, float]:
        """Log probabilities by token text.

        If several tokens have the same text, such as halves of characters, the most likely one counts.
        Clients compare it with the chosen token's value to see whether that token was the most likely.
        """
        top: dict[str, float] = {}
        for token_id, value in zip(ids, values, strict=True):
            name, logprob = self._name(token_id), _value(value)
            top[name] = max(top.get(name, logprob), logprob)
        return top

    def _lists(self, tokens: Sequence[int], chosen: list[Any], tops: list[Any]) -> dict[str, Any]:
        names = [self._name(token_id) for token_id in tokens]
        offsets = []
        for text in names:
            offsets.append(self._offset)
            self._offset += len(text)
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": names, "top_logprobs": tops}


def concat_logprobs(lists: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate the lists of consecutive tokens."""
    names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    return {name: [value for part in lists for value in part[name]] for name in names}


def chat_content(
    ids: Ints, values: NDArray[np.float32], name: TokenName, raw: Callable[[int], bytes], top: int
) -> list[dict[str, Any]]:
    """One object per token with its `top` most likely tokens. `raw` returns a token's bytes."""
    out = []
    for row, row_values in zip(ids.tolist(), values, strict=True):
        entries = [
            {"token": name(token_id), "logprob": _value(value), "bytes": list(raw(token_id))}
            for token_id, value in zip(row, row_values, strict=True)
        ]
        out.append({**entries[0], "top_logprobs": entries[1 : top + 1]})
    return out


def prompt_entries(
    ids: Ints, values: NDArray[np.float32], ranks: Ints | None, name: TokenName
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` in vLLM's format: None for the first token, {id: …} for the others."""
    out: list[dict[str, Any] | None] = [None]
    for at, (row, row_values) in enumerate(zip(ids.tolist(), values, strict=True)):
        entry: dict[str, Any] = {}
        for column, (token_id, value) in enumerate(zip(row, row_values, strict=True)):
            rank = column if column or ranks is None else int(ranks[at])
            details = {"logprob": _value(value), "rank": rank or None, "decoded_token": name(token_id)}
            entry.setdefault(str(token_id), details)
        out.append(entry)
    return out


def _value(value: Any) -> float:
    """The shortest decimal that stands for the float32 value, rather than for its exact double."""
    number = float(value)
    return float(str(np.float32(number))) if number > LOWEST else LOWEST
