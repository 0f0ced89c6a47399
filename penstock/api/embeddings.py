"""Embeddings for every dialect that has them: whole texts, and texts in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.api.answers import ListAnswer
from penstock.api.call import Call, Reply
from penstock.api.fields import ChunkFields
from penstock.api.replies import Items, vector_reply
from penstock.api.run import Result, run
from penstock.api.state import ServedModel
from penstock.errors import BadValue
from penstock.inputs.images.rows import has_images
from penstock.outputs.encoders import encode_rows
from penstock.tasks.embed import ChunkedEmbeddings, EmbedInChunks
from penstock.tasks.embed_types import Columns
from penstock.tasks.multi_task import pooling_task
from penstock.types import Chunks, OutputDtype, PoolingParams, Task

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]

_MAX_CHAR_TOKENS = 4  # tokens per character, at most: one for each byte


class ChunkEntry(msgspec.Struct, kw_only=True):
    """A part of a text, with chunking: late."""

    index: int
    embedding: list[float] | str
    start_token: int
    end_token: int
    start_char: int | None
    end_char: int | None


class EmbeddingEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # a string with encoding_format: base64
    chunks: list[ChunkEntry] | msgspec.UnsetType = msgspec.UNSET


class EmbeddingsAnswer(ListAnswer, kw_only=True):
    data: list[EmbeddingEntry]


def embedding_items(rows: list[Any]) -> list[dict[str, Any]]:
    return [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]


async def vectors(
    call: Call, body: ChunkFields, model: ServedModel, params: PoolingParams, *, prefix: str, items: Items
) -> Reply:
    """The values of a pooling task, in the chunks that the body or the server's default asks for."""
    if body.chunking is None and model.default_chunking == "mean" and params.task is Task.EMBED:
        body.chunking = _default_chunking(body, model)
    if body.wants_chunks:
        return await _in_chunks(call, body, model, params, prefix=prefix, items=items)
    task = pooling_task(model.text, body.input, params, body.options())
    result = await run(call, body, model, task)
    return vector_reply(call, body, result, prefix=prefix, items=items)


def _default_chunking(body: ChunkFields, model: ServedModel) -> Literal["mean"] | None:
    """`mean` for a body with texts that may be too long, unless they are truncated or cannot be chunked."""
    if body.truncate_prompt_tokens is not None or body.wants_chunks:
        return None
    return "mean" if _may_be_chunked(body.input, model) else None


def is_chunked_by_default(inputs: str | list[Any], model: ServedModel) -> bool:
    """Whether the server's default embeds these inputs in chunks, if their body does not say."""
    return model.default_chunking == "mean" and _may_be_chunked(inputs, model)


def _may_be_chunked(inputs: str | list[Any], model: ServedModel) -> bool:
    if has_images(inputs):
        return False
    needs_end = model.spec.text_end or model.spec.query_end
    return not needs_end and _max_tokens(inputs) > model.spec.max_model_len


def _max_tokens(inputs: str | list[Any]) -> int:
    """An upper limit for the tokens of the longest input, which holds for nearly all texts."""
    if isinstance(inputs, str):
        return _MAX_CHAR_TOKENS * len(inputs)
    if inputs and isinstance(inputs[0], int):
        return len(inputs)
    return max((_max_tokens(each) for each in inputs), default=0)


async def _in_chunks(
    call: Call, body: ChunkFields, model: ServedModel, params: PoolingParams, *, prefix: str, items: Items
) -> Reply:
    if has_images(body.input):
        raise BadValue("inputs with images are not chunked; leave chunking out", param="chunking")
    task = EmbedInChunks(
        inputs=body.input,
        params=params,
        options=body.options(),
        chunking=body.chunk_options(),
    )
    if body.chunking == "late" and body.wants_bytes:
        raise BadValue("chunking 'late' answers as float or base64, not as bytes", param="encoding_format")
    result = await run(call, body, model, task)
    (embeddings,) = result.value
    texts = Result(result.model, result.request, result.output, embeddings.vectors)
    if embeddings.chunks is None or embeddings.chunks.spans is None:
        return vector_reply(call, body, texts, prefix=prefix, items=items)
    chunks = _chunk_items(body, embeddings, embeddings.chunks)

    def with_chunks(rows: list[Any]) -> list[dict[str, Any]]:
        return [{**item, "chunks": own} for item, own in zip(items(rows), chunks, strict=True)]

    return vector_reply(call, body, texts, prefix=prefix, items=with_chunks)


def _chunk_items(
    body: ChunkFields, embeddings: ChunkedEmbeddings, chunks: Chunks
) -> list[list[dict[str, Any]]]:
    """For each text its chunks: vector, tokens and characters."""
    vectors = encode_rows(
        list(embeddings.chunk_vectors), body.encoding_format, body.embed_dtype, body.endianness
    )
    tokens = [] if chunks.spans is None else chunks.spans.tolist()
    chars = [(None, None)] * len(tokens) if chunks.chars is None else chunks.chars.tolist()
    parts = zip(vectors, tokens, chars, strict=True)
    return [[_chunk(index, *next(parts)) for index in range(count)] for count in chunks.counts.tolist()]


def _chunk(index: int, vector: Any, tokens: list[int], chars: Any) -> dict[str, Any]:
    where = {"start_token": tokens[0], "end_token": tokens[1], "start_char": chars[0], "end_char": chars[1]}
    return {"index": index, "embedding": vector, **where}


def embedding_dtypes(kinds: Sequence[EmbeddingType]) -> tuple[OutputDtype, ...]:
    """The number formats that these types of embeddings need, each once."""
    return tuple(dict.fromkeys(map(_dtype, kinds)))


def embeddings_by_type(kinds: Sequence[EmbeddingType], columns: Columns) -> dict[str, list[Any]]:
    """The vectors of each type. `base64` has float32 in little endian."""
    return {
        kind: encode_rows(
            list(columns[_dtype(kind)]), "base64" if kind == "base64" else "float", _dtype(kind), "little"
        )
        for kind in kinds
    }


def _dtype(kind: EmbeddingType) -> OutputDtype:
    return OutputDtype.FLOAT32 if kind in ("float", "base64") else OutputDtype(kind)
