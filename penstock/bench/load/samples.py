"""Measurements of finished requests, in columns: cheap to append, send and join."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

# Times are seconds on the machine's monotonic clock; 0 if the event did not happen.
COLUMNS: dict[str, str] = {
    "request": "i",  # index of the request in the data set
    "due": "d",  # scheduled time; equal to `start` without a rate
    "start": "d",  # before the connection was made or taken from the pool
    "first_byte": "d",
    "end": "d",  # the whole body has arrived
    "first_token": "d",  # streams only
    "last_token": "d",
    "status": "i",  # HTTP status; 0: no answer
    "error": "i",  # −1: none, −2: in flight when the run was stopped, otherwise an index into the messages
    "input_tokens": "i",  # counted by the server; −1: unknown
    "output_tokens": "i",
    "body_bytes": "q",
    "gaps": "i",  # number of values in `gaps` that belong to this request
}
OK, GIVEN_UP = -1, -2


class Block(msgspec.Struct, frozen=True, tag="block"):
    """Finished requests that a load process sends to the parent."""

    columns: dict[str, bytes]
    gaps: bytes  # float32 seconds between tokens
    messages: list[str]  # the column `error` of this block has indices into it


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The last report of a load process."""

    cpu_s: float
    completed: int
    given_up_reason: str | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    pass


Report = Ready | Block | Done


class Recorder:
    """Collects rows, and converts them to columns when they are flushed."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, ...]] = []
        self._gaps = array("f")
        self._messages: dict[str, int] = {}

    def add(self, values: tuple[float, ...], gaps: Sequence[float] = ()) -> None:
        """Add a row; `values` are in the order of COLUMNS."""
        self._rows.append(values)
        if gaps:
            self._gaps.extend(gaps)

    def message(self, text: str) -> int:
        """The index of an error message. Equal messages are stored once."""
        return self._messages.setdefault(text, len(self._messages))

    def __len__(self) -> int:
        return len(self._rows)

    def flush(self) -> Block:
        columns: Iterable[Iterable[Any]] = (
            zip(*self._rows, strict=True) if self._rows else [()] * len(COLUMNS)
        )
        named = zip(COLUMNS.items(), columns, strict=True)
        block = Block(
            {name: array(code, values).tobytes() for (name, code), values in named},
            self._gaps.tobytes(),
            list(self._messages),
        )
        self._rows.clear()
        del self._gaps[:]
        self._messages.clear()
        return block


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """All requests of a run, ordered by their start."""

    columns: dict[str, NDArray[Any]]
    gaps: NDArray[np.float32]  # all requests in one array; the column `gaps` has the number for each
    messages: list[str]

    def __len__(self) -> int:
        return len(self.columns["request"])

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return self.columns[name].astype(np.float64)

    @property
    def ok(self) -> NDArray[np.bool_]:
        return np.asarray(self.columns["error"] == OK)

    @property
    def failed(self) -> NDArray[np.bool_]:
        return np.asarray(self.columns["error"] >= 0)

    def errors(self) -> dict[str, int]:
        """Error messages with their counts, most frequent first."""
        codes, counts = np.unique(self.columns["error"][self.failed], return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return {self.messages[int(codes[i])]: int(counts[i]) for i in order}


def join(blocks: Iterable[Block]) -> Samples:
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in COLUMNS}
    gaps: list[NDArray[np.float32]] = []
    messages: dict[str, int] = {}
    for block in blocks:
        values = {name: np.frombuffer(block.columns[name], dtype=code) for name, code in COLUMNS.items()}
        merged = np.array([messages.setdefault(text, len(messages)) for text in block.messages], np.int32)
        codes = values["error"].copy()
        codes[codes >= 0] = merged[codes[codes >= 0]]
        values["error"] = codes
        for name, value in values.items():
            parts[name].append(value)
        gaps.append(np.frombuffer(block.gaps, dtype=np.float32))
    columns = {
        name: np.concatenate(parts[name]) if parts[name] else np.empty(0, dtype=code)
        for name, code in COLUMNS.items()
    }
    flat = np.concatenate(gaps) if gaps else np.empty(0, np.float32)
    return _ordered(columns, flat, list(messages))


def _ordered(columns: dict[str, NDArray[Any]], gaps: NDArray[np.float32], messages: list[str]) -> Samples:
    order = np.argsort(columns["start"], kind="stable")
    counts = columns["gaps"].astype(np.int64)
    if len(gaps):
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])[order]
        lengths = counts[order]
        ends = np.cumsum(lengths)
        gaps = gaps[np.repeat(starts - (ends - lengths), lengths) + np.arange(len(gaps))]
    return Samples({name: column[order] for name, column in columns.items()}, gaps, messages)
