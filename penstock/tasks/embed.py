"""Embeddings: one vector for each text, read whole or in chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadValue
from penstock.inputs.chunks import Chunker, ChunkOptions
from penstock.outputs.chunks import combine
from penstock.tasks.model import TextModel
from penstock.tasks.rows import (
    MAX_LOOP_TOKENS,
    MatrixTask,
    TextTask,
    concatenate,
    split_off_loop,
    split_windows,
)
from penstock.tasks.run import Prepared
from penstock.types import Chunks, Ints, PooledOutput, PoolingParams, Request


class Embed(MatrixTask):
    """One vector for each text, [texts, dimensions]. A text beyond the model's limit is an error unless it
    is truncated."""


@dataclass(frozen=True, slots=True, eq=False)
class TextChunks:
    """The late chunks of one text."""

    vector: NDArray[Any]  # [dim], for the whole text
    vectors: NDArray[Any]  # [chunks, dim]
    tokens: Ints  # [chunks, 2], first and end token of each chunk within the model input
    chars: Ints | None  # [chunks, 2], first and end character within the text; None for token ids


@dataclass(frozen=True, slots=True, eq=False)
class ChunkedEmbeddings:
    """Vectors of texts that were embedded in chunks. `chunks` is None if every text was one row."""

    vectors: NDArray[Any]  # [texts, dim]
    chunk_vectors: NDArray[Any]  # [chunks, dim]
    chunks: Chunks | None = None

    def by_text(self) -> list[TextChunks]:
        """The chunks of each text. Only for late chunking, where chunks have spans."""
        chunks = self.chunks
        if chunks is None or chunks.spans is None:
            raise ValueError("these texts have no spans: they were not chunked late")
        cuts = np.cumsum(chunks.counts)[:-1]
        chars = [None] * len(chunks.counts) if chunks.chars is None else np.split(chunks.chars, cuts)
        vectors, spans = np.split(self.chunk_vectors, cuts), np.split(chunks.spans, cuts)
        return [TextChunks(*each) for each in zip(self.vectors, vectors, spans, chars, strict=True)]


@dataclass(kw_only=True, eq=False)
class EmbedInChunks(TextTask[list[ChunkedEmbeddings]]):
    """Texts of any length: `mean` combines the vectors of several rows, `late` pools parts of one row.

    The result has an entry for each window of the call.
    """

    chunking: ChunkOptions

    def check(self, model: TextModel) -> None:
        Chunker(model.processor).check(self.params, self.options, self.chunking)
        model.processor.check(self.params)
        spans = self.chunking.chunk_spans
        if spans is not None and len(spans) != self.num_rows:
            raise BadValue(
                f"chunk_spans has {len(spans)} lists for {self.num_rows} texts; give one list for each text",
                param="chunk_spans",
            )

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[list[ChunkedEmbeddings]]:
        request, chunks = await self.chunked_request(model, request_id)
        finish = partial(_finish, model, chunks, self.params)
        return Prepared(request, finish, is_slow_to_finish=chunks is not None)

    async def chunked_request(self, model: TextModel, request_id: str) -> tuple[Request, Chunks | None]:
        chunker, options, special = Chunker(model.processor), self.options, self.options.add_special_tokens
        texts, rows = await split_off_loop(model, self.inputs, allow_empty_text=self.allows_empty_text)
        prompted = model.processor.with_prompt(texts or [], options)
        if self.chunking.chunking == "late":
            if texts is None:
                make = partial(chunker.late_from_ids, request_id, rows, options, self.chunking)
                return await model.batcher.call(make, sum(map(len, rows)))
            limit = model.processor.row_limit(self.params, options)
            located = await model.batcher.encode_with_offsets(prompted, special, limit)
            make = partial(chunker.late, request_id, texts, located, options, self.chunking)
            return await model.batcher.call(make, sum(len(row.ids) for row in located))
        if texts is not None:
            rows = await model.batcher.encode(prompted, special)
        mean = partial(chunker.mean, request_id, rows, self.params, options, from_text=texts is not None)
        num_tokens = sum(map(len, rows))
        return mean() if num_tokens <= MAX_LOOP_TOKENS else await model.batcher.call(mean, num_tokens)

    def windows(self, size: int) -> Iterator[EmbedInChunks]:
        spans = None if self.chunking.chunk_spans is None else iter(self.chunking.chunk_spans)
        for window in split_windows(self.inputs, size):
            own = None if spans is None else list(itertools.islice(spans, len(window)))
            yield replace(self, inputs=window, chunking=replace(self.chunking, chunk_spans=own))

    def merge(self, parts: Sequence[list[ChunkedEmbeddings]]) -> list[ChunkedEmbeddings]:
        return concatenate(parts)


def _finish(
    model: TextModel, chunks: Chunks | None, params: PoolingParams, output: PooledOutput
) -> list[ChunkedEmbeddings]:
    if chunks is None:
        return [ChunkedEmbeddings(output.values, output.values)]
    texts, vectors = combine(output.values, chunks, params, model.spec.pooling.normalize)
    return [ChunkedEmbeddings(texts, vectors, chunks)]
