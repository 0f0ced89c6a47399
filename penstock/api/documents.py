"""Documents that come in chunks: each chunk is embedded with its whole document as context."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.api.call import Call
from penstock.api.run import Result, Scheduled, check_num_rows, run
from penstock.api.state import ServedModel
from penstock.errors import BadValue
from penstock.inputs.chunks import ChunkOptions
from penstock.inputs.processor import InputOptions
from penstock.tasks.embed import EmbedInChunks, TextChunks
from penstock.types import PoolingParams

Span = tuple[int, int]  # characters: [begin, end)


def joined(chunks: Sequence[str], name: str) -> tuple[str, list[Span]]:
    """Join chunks to a document, and return the span of each. Adds a space between chunks without white
    space."""
    text, spans = "", []
    for index, chunk in enumerate(chunks):
        if not chunk.strip():
            raise BadValue(
                f"{name} has an empty chunk at index {index}; each chunk needs some text", param=name
            )
        if text and not text[-1].isspace() and not chunk[0].isspace():
            text += " "
        spans.append((len(text), len(text) + len(chunk)))
        text += chunk
    return text, spans


async def embed_documents(
    call: Call,
    body: Scheduled,
    model: ServedModel,
    documents: Sequence[Sequence[str]],
    params: PoolingParams,
    options: InputOptions,
    *,
    name: str,
) -> Result[list[NDArray[np.generic]]]:
    """For each document the vectors of its chunks, [chunks, dimensions]. A document is never truncated,
    because a chunk beyond the model's limit would have no vector."""
    check_num_rows(call, sum(map(len, documents)), name)
    made = [joined(chunks, name) for chunks in documents]
    chunking = ChunkOptions(chunking="late", chunk_spans=[spans for _, spans in made])
    try:
        found = await run_late(call, body, model, [text for text, _ in made], params, options, chunking)
    except BadValue as error:
        if error.param != "chunk_spans":
            raise
        raise BadValue(f"a chunk of {name} has no tokens; each chunk needs some text", param=name) from None
    return Result(found.model, found.request, found.output, [each.vectors for each in found.value])


async def run_late(
    call: Call,
    body: Scheduled,
    model: ServedModel,
    texts: list[str],
    params: PoolingParams,
    options: InputOptions,
    chunking: ChunkOptions,
) -> Result[list[TextChunks]]:
    """Embed texts with late chunking."""
    task = EmbedInChunks(inputs=texts, params=params, options=options, chunking=chunking)
    result = await run(call, body, model, task)
    (embeddings,) = result.value
    return Result(result.model, result.request, result.output, embeddings.by_text())
