"""Base classes of tasks over texts or token ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.inputs.images.content import ContentRows, content_items
from penstock.inputs.images.rows import has_images, input_items, refuse_images
from penstock.inputs.processor import (
    DEFAULT_OPTIONS,
    InputOptions,
    Inputs,
    num_inputs,
    num_token_ids,
    split_inputs,
)
from penstock.inputs.token_rows import Rows, num_tokens, row_lengths
from penstock.tasks.model import TextModel
from penstock.tasks.run import WINDOW_ROWS, Prepared
from penstock.types import Ints, PooledOutput, PoolingParams, Request

R = TypeVar("R")
Matrix = NDArray[Any]
IMAGE_WINDOW_ROWS = 256  # inputs submitted together if some are images, whose patches take memory
MAX_LOOP_TOKENS = 1 << 16  # larger requests are laid out and finished off the event loop


@dataclass(kw_only=True, eq=False)
class TextTask(ABC, Generic[R]):
    """A task over texts or token ids."""

    inputs: Inputs
    params: PoolingParams
    options: InputOptions = DEFAULT_OPTIONS
    allows_empty_text: bool = True  # the row of an empty text still has special tokens
    check_lengths: Callable[[list[int]], None] | None = None  # called with the row lengths before truncation

    @property
    def num_rows(self) -> int:
        return num_inputs(self.inputs)

    @property
    def max_window_rows(self) -> int:
        """Maximum number of inputs submitted together; lower with images, which take memory."""
        return IMAGE_WINDOW_ROWS if has_images(self.inputs) else WINDOW_ROWS

    def check(self, model: TextModel) -> None:
        model.processor.check(self.params)

    @abstractmethod
    async def prepare(self, model: TextModel, request_id: str) -> Prepared[R]: ...

    def request(self, model: TextModel, request_id: str) -> Coroutine[Any, Any, Request]:
        """One row for each input, after its prompt."""
        if has_images(self.inputs):
            return self._image_request(model, request_id)
        return self._text_request(model, request_id)

    async def _image_request(self, model: TextModel, request_id: str) -> Request:
        """The request of inputs with images. Texts among them are prepared like any text."""
        processor, items = model.processor, input_items(self.inputs)
        if processor.content is not None:
            return await self._content_request(model, request_id, processor.content)
        if processor.dual is None:
            raise refuse_images(model.spec.name)
        rows, images = processor.dual.split(items)
        texts = await replace(self, inputs=rows)._text_request(model, request_id) if rows else None
        return processor.join_images(texts, images, request_id, self.params, self.options)

    async def _content_request(self, model: TextModel, request_id: str, content: ContentRows) -> Request:
        """The request of inputs with texts and images, for a model that reads both in one prompt."""
        processor, options = model.processor, self.options
        contents = content_items(input_items(self.inputs))
        texts = processor.content_texts(contents, options)
        special = [options.add_special_tokens and content.adds_special_tokens(own) for own in contents]
        rows: list[Ints | None] = [None] * len(texts)
        for adds in sorted(set(special)):
            chosen = [index for index, each in enumerate(special) if each is adds]
            encoded = await model.batcher.encode([texts[index] for index in chosen], adds)
            for index, ids in zip(chosen, encoded, strict=True):
                rows[index] = ids
        found = [ids for ids in rows if ids is not None]
        join = partial(processor.join_content, request_id, found, contents, self.params, options)
        return await model.batcher.call(join, sum(map(len, found)))

    async def _text_request(self, model: TextModel, request_id: str) -> Request:
        processor, options, params = model.processor, self.options, self.params
        if num_token_ids(self.inputs) <= MAX_LOOP_TOKENS:
            texts, rows = split_inputs(self.inputs, allow_empty_text=self.allows_empty_text)
        else:
            texts, rows = await split_off_loop(model, self.inputs, allow_empty_text=self.allows_empty_text)
        found: Rows = rows
        if texts is not None:
            prompted = processor.with_prompt(texts, options)
            known: Rows | None = None
            if processor.static is not None:
                known = await model.batcher.encode_words(prompted)
            if known is None:
                known = model.batcher.encode_short(prompted, options.add_special_tokens)
            found = await self._encode_long(model, prompted) if known is None else known
        if self.check_lengths is not None:
            self.check_lengths(row_lengths(found).tolist())
        from_text, size = texts is not None, num_tokens(found)
        if size <= MAX_LOOP_TOKENS:
            return processor.join(request_id, found, params, options, from_text=from_text)
        join = partial(processor.join, request_id, found, params, options, from_text=from_text)
        return await model.batcher.call(join, size)

    async def _encode_long(self, model: TextModel, texts: Sequence[str]) -> list[Ints]:
        limit = model.processor.row_limit(self.params, self.options)
        if self.check_lengths is not None:  # rejects long rows later, with its own message
            limit = replace(limit, truncates=True)
        return await model.batcher.encode(texts, self.options.add_special_tokens, limit)

    def windows(self, size: int) -> Iterator[TextTask[R]]:
        rows = split_windows(self.inputs, size)
        return (replace(self, inputs=window) for window in rows)

    @abstractmethod
    def merge(self, parts: Sequence[R]) -> R: ...


class RowTask(TextTask[R]):
    """A task whose result depends only on its request and the engine's output."""

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[R]:
        request = await self.request(model, request_id)
        is_slow = self.is_slow_to_finish(request)
        return Prepared(request, partial(self.finish, model, request), is_slow_to_finish=is_slow)

    def is_slow_to_finish(self, request: Request) -> bool:
        return request.num_tokens > MAX_LOOP_TOKENS

    @abstractmethod
    def finish(self, model: TextModel, request: Request, output: PooledOutput) -> R: ...


class MatrixTask(RowTask[Matrix]):
    """One vector for each input: [inputs, width]."""

    def is_slow_to_finish(self, request: Request) -> bool:
        return False

    def finish(self, model: TextModel, request: Request, output: PooledOutput) -> Matrix:
        return output.values

    def merge(self, parts: Sequence[Matrix]) -> Matrix:
        return np.concatenate(parts)


class ListTask(RowTask[list[R]]):
    """One item for each input."""

    def merge(self, parts: Sequence[list[R]]) -> list[R]:
        return concatenate(parts)


async def split_off_loop(
    model: TextModel, inputs: Inputs, *, allow_empty_text: bool
) -> tuple[list[str] | None, list[Ints]]:
    """`split_inputs`, on another thread if there are many token ids to convert."""
    split = partial(split_inputs, inputs, allow_empty_text=allow_empty_text)
    num_ids = num_token_ids(inputs)
    return split() if num_ids <= MAX_LOOP_TOKENS else await model.batcher.call(split, num_ids)


def concatenate(parts: Sequence[list[R]]) -> list[R]:
    return [row for part in parts for row in part]


def split_windows(inputs: Inputs, size: int) -> Iterator[Any]:
    if has_images(inputs):
        items = input_items(inputs)
        return (items[first : first + size] for first in range(0, len(items), size))
    texts, ids = split_inputs(inputs)
    rows: list[Any] = ids if texts is None else texts
    return (rows[first : first + size] for first in range(0, len(rows), size))
