"""The tokenizer of a Penstock server, used through `/tokenize` and `/detokenize`.

It is exact for every model of the server, under any name, and needs no file on the client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.bench.datasets.tokens import TokenIds, frame_of
from penstock.bench.probe import Caller, HttpReply
from penstock.bench.target import Target
from penstock.errors import BadValue

_MAX_ROWS = 512  # rows per request
_MAX_UNITS = 1 << 18  # characters or token ids per request
_MAX_VOCAB_BITS = 22
_TOO_LARGE = (400, 413, 422)  # statuses that a smaller request may avoid
Row = TypeVar("Row", str, Sequence[int])


class ServerTokenizer:
    """Raises `BadValue` if the server has no `/tokenize` that accepts several texts as `input`."""

    def __init__(self, target: Target, model: str) -> None:
        self.name = f"{target.base_url}/tokenize"
        self._caller, self._model = Caller(target), model
        bare, full = (self._encode(["a"], special) for special in (False, True))
        self.opening, self.closing = frame_of(bare[0], full[0])

    @property
    def num_special(self) -> int:
        """Special tokens that the template adds to a text."""
        return len(self.opening) + len(self.closing)

    @cached_property
    def ordinary(self) -> NDArray[np.int64]:
        """Ids of ordinary tokens: they decode to a text although special tokens are skipped."""
        rows = [[i] for i in range(self._num_ids())]
        texts = self._decode(rows, skip_special_tokens=True)
        return np.array([i for i, text in enumerate(texts) if text], np.int64)

    @cached_property
    def vocab_size(self) -> int:
        return int(self.ordinary[-1]) + 1

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokenIds]:
        return self._encode(list(texts), add_special_tokens)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return self._decode(list(rows), skip_special_tokens=False)

    def config(self) -> dict[str, Any]:
        """The response of `/tokenizer_info`; empty if the server does not have that route."""
        answer = self._caller.call("GET", "/tokenizer_info")
        config = answer.json() if answer.status == 200 else None
        return config if isinstance(config, dict) else {}

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[TokenIds]:
        def ask(part: list[str]) -> HttpReply:
            body = {"model": self._model, "input": part, "add_special_tokens": add_special_tokens}
            return self._caller.call("POST", "/tokenize", body)

        return [entry["tokens"] for entry in _ask_in_parts(texts, ask, "tokens")]

    def _decode(self, rows: list[Any], *, skip_special_tokens: bool) -> list[str]:
        def ask(part: list[Any]) -> HttpReply:
            body = {"model": self._model, "tokens": part, "skip_special_tokens": skip_special_tokens}
            return self._caller.call("POST", "/detokenize", body)

        return [entry["prompt"] for entry in _ask_in_parts(rows, ask, "prompt")]

    def _num_ids(self) -> int:
        """The number of ids, by bisection: the server refuses ids beyond its vocabulary."""
        known = 0
        for bit in reversed(range(_MAX_VOCAB_BITS)):
            body = {"model": self._model, "tokens": [known + (1 << bit) - 1]}
            if self._caller.call("POST", "/detokenize", body).status == 200:
                known += 1 << bit
        if not known:
            raise BadValue(
                f"{self._caller.target.base_url}/detokenize decodes no token id", param="tokenizer"
            )
        return known


def _ask_in_parts(rows: list[Row], ask: Callable[[list[Row]], HttpReply], key: str) -> list[dict[str, Any]]:
    """The entries of `data` for all rows, from requests of a size that servers accept."""
    return [entry for part in _parts(rows) for entry in _ask(part, ask, key)]


def _parts(rows: list[Row]) -> Iterator[list[Row]]:
    part: list[Row] = []
    units = 0
    for row in rows:
        if part and (len(part) == _MAX_ROWS or units + len(row) > _MAX_UNITS):
            yield part
            part, units = [], 0
        part.append(row)
        units += len(row)
    if part:
        yield part


def _ask(rows: list[Row], ask: Callable[[list[Row]], HttpReply], key: str) -> list[dict[str, Any]]:
    """Send one request, or two with half of the rows each if the server refuses it as too large."""
    answer = ask(rows)
    if answer.status in _TOO_LARGE and len(rows) > 1:
        half = len(rows) // 2
        return _ask(rows[:half], ask, key) + _ask(rows[half:], ask, key)
    data = _entries(answer, key) if answer.status == 200 else None
    if data is not None and len(data) == len(rows):
        return data
    reason = answer.refusal() if answer.status != 200 else "an answer of another form"
    raise BadValue(f"the server's tokenizer cannot be used: {reason}", param="tokenizer")


def _entries(answer: HttpReply, key: str) -> list[dict[str, Any]] | None:
    found = answer.json()
    data = found.get("data") if isinstance(found, dict) else None
    is_right = isinstance(data, list) and all(isinstance(entry, dict) and key in entry for entry in data)
    return data if is_right else None
