"""Embedding texts in chunks: one vector for a text of any length, or one for each part of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from penstock.api.endpoint import Call, Reply
from penstock.api.fields import ChunkFields
from penstock.api.state import ServedModel
from penstock.api.work import Result, answer_with, check_rows, run_request, run_task
from penstock.errors import BadValue
from penstock.inputs.chunks import Chunker
from penstock.inputs.processor import split_inputs
from penstock.outputs.chunks import combine
from penstock.outputs.encoders import encode_rows
from penstock.types import Array, Chunks, PooledOutput, PoolingParams, Request


@dataclass(frozen=True, slots=True, eq=False)
class ChunkedResult(Result):
    """A text's vector from those of its chunks, which the answer shows if they were asked for."""

    chunks: Chunks = field(kw_only=True)
    vectors: Array = field(kw_only=True)  # [chunks, dim]

    def rows(self) -> list[Array]:
        return list(self.answer.values)

    def extend(self, body: ChunkFields, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The items, each with the chunks of its text."""
        spans, chars = self.chunks.spans, self.chunks.chars
        if spans is None:
            return items
        vectors = encode_rows(list(self.vectors), body.encoding_format, body.embed_dtype, body.endianness)
        tokens = spans.tolist()
        places = chars.tolist() if chars is not None else [(None, None)] * len(tokens)
        parts = zip(vectors, tokens, places, strict=True)
        for item, count in zip(items, self.chunks.counts.tolist(), strict=True):
            item["chunks"] = [_chunk(index, *next(parts)) for index in range(count)]
        return items


def _chunk(index: int, vector: Any, tokens: list[int], chars: Any) -> dict[str, Any]:
    where = {"start_token": tokens[0], "end_token": tokens[1], "start_char": chars[0], "end_char": chars[1]}
    return {"index": index, "embedding": vector, **where}


async def run_chunked(call: Call, body: ChunkFields, params: PoolingParams) -> Result:
    """As `run_task`, with the texts chunked as the body says."""
    body.chunk_options().check()
    if body.chunking == "none":
        return await run_task(call, body, params)
    model = call.state.model(body.model)
    chunker = Chunker(model.processor)
    chunker.check(params, body.options(), body.chunk_options())
    if body.chunking == "late" and body.encoding_format == "bytes":
        raise BadValue("chunking 'late' answers as float or base64, not as bytes", param="encoding_format")
    call.request_id = body.request_id
    began = time.monotonic()
    request, chunks = await _prepare(call, model, body, params, chunker)
    call.tokenize_s = time.monotonic() - began
    answer = await run_request(call, model, request, body)
    if chunks is None:
        return Result(model, request, answer)
    normalizes = model.spec.pooling.normalize
    texts, vectors = await asyncio.to_thread(combine, answer.values, chunks, params, normalizes)
    return ChunkedResult(
        model, request, PooledOutput(answer.id, texts, answer.timings), chunks=chunks, vectors=vectors
    )


async def _prepare(
    call: Call, model: ServedModel, body: ChunkFields, params: PoolingParams, chunker: Chunker
) -> tuple[Request, Chunks | None]:
    options, request_id = body.options(), call.state.next_id()
    texts, rows = split_inputs(body.input, allow_empty_text=False)
    check_rows(call, texts if texts is not None else rows)
    special = options.add_special_tokens
    prompted = model.processor.with_prompt(texts or [], options)
    if body.chunking == "late":
        if texts is None:
            return chunker.late_ids(request_id, rows, options, body.chunk_options())
        located = await model.tokenizer.locate(prompted, special)
        return chunker.late(request_id, texts, located, options, body.chunk_options())
    if texts is not None:
        rows = await model.tokenizer.encode(prompted, special)
    return chunker.mean(request_id, rows, params, options, from_text=texts is not None)


def answer_chunked(call: Call, body: ChunkFields, result: Result, *, prefix: str, item: Any) -> Reply:
    """As `answer_with`, with the chunks of each text where the answer has them."""
    if not isinstance(result, ChunkedResult):
        return answer_with(call, body, result, prefix=prefix, item=item)
    return answer_with(call, body, result, prefix=prefix, item=lambda rows: result.extend(body, item(rows)))
