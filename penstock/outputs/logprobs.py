"""Log probabilities as the OpenAI API writes them: lists a completion, an object a token of a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.types import Ints

LOWEST = -9999.0  # stands for minus infinity, which JSON has not
Name = Callable[[int], str]


class CompletionLogprobs:
    """The four lists of a completion; `text_offset` counts on over the pieces of a stream."""

    def __init__(self, name: Name) -> None:
        self._name = name
        self._offset = 0

    def unscored(self, token: int) -> dict[str, Any]:
        """The prompt's first token, which nothing predicted."""
        return self._lists([token], [None], [None])

    def scored(self, ids: Ints, values: NDArray[np.float32]) -> dict[str, Any]:
        """`ids` and `values` [tokens, 1 + top], the chosen token first."""
        chosen = [_value(value) for value in values[:, 0]] if len(values) else []
        tops = [self._top(row, row_values) for row, row_values in zip(ids.tolist(), values, strict=True)]
        return self._lists(ids[:, 0].tolist(), chosen, tops)

    def _top(self, ids: list[int], values: NDArray[np.float32]) -> dict[str, float]:
        """By text; of tokens that read alike, such as halves of characters, the likeliest counts: clients
        compare it with the chosen token's to see whether that one was the likeliest."""
        top: dict[str, float] = {}
        for number, value in zip(ids, values, strict=True):
            name, found = self._name(number), _value(value)
            top[name] = max(top.get(name, found), found)
        return top

    def _lists(self, tokens: Sequence[int], chosen: list[Any], tops: list[Any]) -> dict[str, Any]:
        names = [self._name(number) for number in tokens]
        offsets = []
        for text in names:
            offsets.append(self._offset)
            self._offset += len(text)
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": names, "top_logprobs": tops}


def concat_logprobs(lists: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Lists of consecutive tokens as one."""
    names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    return {name: [value for some in lists for value in some[name]] for name in names}


def chat_content(
    ids: Ints, values: NDArray[np.float32], name: Name, raw: Callable[[int], bytes], top: int
) -> list[dict[str, Any]]:
    """An object for each token with its `top` likeliest; `raw` gives a token's bytes."""
    out = []
    for row, row_values in zip(ids.tolist(), values, strict=True):
        entries = [
            {"token": name(number), "logprob": _value(value), "bytes": list(raw(number))}
            for number, value in zip(row, row_values, strict=True)
        ]
        out.append({**entries[0], "top_logprobs": entries[1 : top + 1]})
    return out


def prompt_entries(
    ids: Ints, values: NDArray[np.float32], ranks: Ints | None, name: Name
) -> list[dict[str, Any] | None]:
    """As vLLM writes `prompt_logprobs`: nothing for the first token, {id: …} for the others."""
    out: list[dict[str, Any] | None] = [None]
    for at, (row, row_values) in enumerate(zip(ids.tolist(), values, strict=True)):
        entry: dict[str, Any] = {}
        for place, (number, value) in enumerate(zip(row, row_values, strict=True)):
            rank = place if place or ranks is None else int(ranks[at])
            about = {"logprob": _value(value), "rank": rank or None, "decoded_token": name(number)}
            entry.setdefault(str(number), about)
        out.append(entry)
    return out


def _value(value: Any) -> float:
    """With the digits of a float32, not those of its nearest double."""
    number = float(value)
    return float(str(np.float32(number))) if number > LOWEST else LOWEST
