"""What the tasks share that give each input a row of values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.inputs.processor import DEFAULT_OPTIONS, InputOptions, Inputs, num_inputs, split_inputs
from penstock.tasks.model import TextModel
from penstock.tasks.run import Prepared
from penstock.types import PooledOutput, PoolingParams, Request

R = TypeVar("R")
Matrix = NDArray[Any]


@dataclass(kw_only=True, eq=False)
class TextTask(ABC, Generic[R]):
    """A task over texts or token ids."""

    inputs: Inputs
    params: PoolingParams
    options: InputOptions = DEFAULT_OPTIONS
    allows_empty_text: bool = True  # an empty text has its special tokens, so it has values too
    check_lengths: Callable[[list[int]], None] | None = None  # sees the rows' tokens before they are cut

    @property
    def num_rows(self) -> int:
        return num_inputs(self.inputs)

    def check(self, model: TextModel) -> None:
        model.processor.check(self.params)

    @abstractmethod
    async def prepare(self, model: TextModel, request_id: str) -> Prepared[R]: ...

    async def request(self, model: TextModel, request_id: str) -> Request:
        """One row for each input, after its prompt."""
        processor, options = model.processor, self.options
        texts, rows = split_inputs(self.inputs, allow_empty_text=self.allows_empty_text)
        if texts is not None:
            prompted = processor.with_prompt(texts, options)
            rows = await model.batcher.encode(prompted, options.add_special_tokens)
        if self.check_lengths is not None:
            self.check_lengths([len(row) for row in rows])
        return processor.join(request_id, rows, self.params, options, from_text=texts is not None)

    def windows(self, size: int) -> Iterator[TextTask[R]]:
        rows = split_windows(self.inputs, size)
        return (replace(self, inputs=window) for window in rows)

    @abstractmethod
    def merge(self, parts: Sequence[R]) -> R: ...


class RowTask(TextTask[R]):
    """A task whose result follows from its request and the engine's values."""

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[R]:
        request = await self.request(model, request_id)
        return Prepared(request, partial(self.finish, model, request))

    @abstractmethod
    def finish(self, model: TextModel, request: Request, output: PooledOutput) -> R: ...


class MatrixTask(RowTask[Matrix]):
    """One vector for each input: [inputs, width]."""

    def finish(self, model: TextModel, request: Request, output: PooledOutput) -> Matrix:
        return output.values

    def merge(self, parts: Sequence[Matrix]) -> Matrix:
        return np.concatenate(parts)


class ListTask(RowTask[list[R]]):
    """One item for each input."""

    def merge(self, parts: Sequence[list[R]]) -> list[R]:
        return concatenate(parts)


def concatenate(parts: Sequence[list[R]]) -> list[R]:
    return [row for part in parts for row in part]


def split_windows(inputs: Inputs, size: int) -> Iterator[Any]:
    texts, ids = split_inputs(inputs)
    rows: list[Any] = ids if texts is None else texts
    return (rows[first : first + size] for first in range(0, len(rows), size))
