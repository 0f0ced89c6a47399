"""Long texts: rows beyond the model's limit split into rows that fit, and rows divided into chunks that
are pooled apart (late chunking). Where chunks lie is settled here; `outputs.chunks` combines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.errors import BadValue, NotPossible
from penstock.inputs.offsets import text_offsets
from penstock.inputs.processor import InputOptions, InputProcessor
from penstock.inputs.tokenizer import EncodedText
from penstock.types import Chunks, Ints, PoolingParams, Request, Task

Chunking = Literal["none", "mean", "late"]
DEFAULT_CHUNK_SIZE = 256  # tokens of a late chunk, unless told


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """How texts are chunked; the names are those of the server's fields."""

    chunking: str = "none"
    chunk_size: int | None = None  # tokens of a late chunk
    chunk_spans: Sequence[Sequence[tuple[int, int]]] | None = None  # late chunks of each text, in characters

    def check(self) -> None:
        if self.chunking not in ("none", "mean", "late"):
            raise BadValue(f"chunking {self.chunking!r} is unknown; use none, mean or late", param="chunking")
        for name in ("chunk_size", "chunk_spans"):
            if getattr(self, name) is not None and self.chunking != "late":
                raise BadValue(f"{name} goes with chunking 'late'", param=name)
        if self.chunk_size is not None and self.chunk_spans is not None:
            raise BadValue("chunk_size and chunk_spans exclude each other; give one", param="chunk_spans")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise BadValue(f"chunk_size is {self.chunk_size}; it must be at least 1", param="chunk_size")


class Chunker:
    """Makes requests of long texts: `mean` for one vector a text, `late` for one a chunk."""

    def __init__(self, processor: InputProcessor) -> None:
        self.processor = processor
        self.spec = processor.spec
        self.tokenizer = processor.tokenizer

    def check(self, params: PoolingParams, options: InputOptions, how: ChunkOptions) -> None:
        """Refuse what cannot be chunked, before any work is spent on it."""
        how.check()
        if how.chunking == "none":
            return
        if params.task is not Task.EMBED:
            raise BadValue(
                f"chunking is for task 'embed'; task {params.task.value!r} has none", param="chunking"
            )
        self.processor.check(params)
        if how.chunking == "mean" and options.truncate_prompt_tokens is not None:
            raise BadValue(
                "chunking 'mean' reads the whole text; leave truncate_prompt_tokens out",
                param="truncate_prompt_tokens",
            )
        if how.chunking == "late" and (reason := self._why_not_late()):
            raise NotPossible(
                f"chunking 'late' is not possible for {self.spec.name}: {reason}", param="chunking"
            )

    def mean(
        self,
        request_id: str,
        rows: list[Ints],
        params: PoolingParams,
        options: InputOptions,
        *,
        from_text: bool,
    ) -> tuple[Request, Chunks | None]:
        """Rows that fit, each with the special tokens and the prompt of its text around it."""
        if all(len(row) <= self.spec.max_model_len for row in rows):
            return self.processor.join(request_id, rows, params, options, from_text=from_text), None
        framed = from_text and options.add_special_tokens
        prompt = self._prompt_tokens(options) if from_text else None
        pieces, weights, counts = [], [], []
        for row in rows:
            head = _common_prefix(row, prompt) if prompt is not None else 0
            head = max(head, self.tokenizer.prefix if framed else 0)
            parts, sizes = split_row(
                row, self.spec.max_model_len, head, self.tokenizer.suffix if framed else 0
            )
            pieces += parts
            weights += sizes
            counts.append(len(parts))
        whole = PoolingParams(Task.EMBED, normalize=params.normalize)  # cut and cast after the mean
        request = self.processor.join(request_id, pieces, whole, options, from_text=from_text)
        return request, Chunks(
            counts=np.array(counts, dtype=np.int32), weights=np.array(weights, dtype=np.int32)
        )

    def late(
        self,
        request_id: str,
        texts: list[str],
        located: list[EncodedText],
        options: InputOptions,
        how: ChunkOptions,
    ) -> tuple[Request, Chunks]:
        """A row a text, whose token vectors are wanted, and the places of its chunks."""
        request = self._whole(request_id, [row.ids for row in located], options, from_text=True)
        offsets = text_offsets(self.processor, [row.offsets for row in located], options)
        bodies = [body_of(*row) for row in zip(offsets, _skips(request), strict=True)]
        if how.chunk_spans is not None:
            wanted = check_spans(texts, how.chunk_spans)
            rows = zip(wanted, offsets, _skips(request), bodies, request.lengths.tolist(), strict=True)
            spans = [find_tokens(index, *row) for index, row in enumerate(rows)]
            return request, _late_chunks(request, spans, np.concatenate(wanted))
        spans = _divided(request, bodies, how.chunk_size)
        ends = [_ends(*places) for places in zip(spans, bodies, offsets, strict=True)]
        return request, _late_chunks(request, spans, np.maximum(np.concatenate(ends), 0))

    def late_from_ids(
        self, request_id: str, rows: list[Ints], options: InputOptions, how: ChunkOptions
    ) -> tuple[Request, Chunks]:
        """The same for token ids, which lie in no text."""
        if how.chunk_spans is not None:
            raise BadValue("chunk_spans are places in a text; token ids have none", param="chunk_spans")
        request = self._whole(request_id, rows, options, from_text=False)
        bodies = list(zip(_skips(request), request.lengths.tolist(), strict=True))
        return request, _late_chunks(request, _divided(request, bodies, how.chunk_size), None)

    def _whole(self, request_id: str, rows: list[Ints], options: InputOptions, *, from_text: bool) -> Request:
        params = PoolingParams(Task.TOKEN_EMBED, normalize=False)
        return self.processor.join(request_id, rows, params, options, from_text=from_text)

    def _why_not_late(self) -> str | None:
        pooling = self.spec.pooling
        if pooling.methods != ("mean",):
            return f"it pools by {' + '.join(pooling.methods)}, and late chunks are means of token vectors"
        if pooling.dense:
            return "it has Dense modules after the pooling"
        return None if Task.TOKEN_EMBED in self.spec.tasks else "it has no task 'token_embed'"

    def _prompt_tokens(self, options: InputOptions) -> Ints | None:
        """The prompt as it begins a row, leading special tokens included."""
        prompt = self.processor.prompt(options)
        if not prompt:
            return None
        (row,) = self.tokenizer.encode([prompt], options.add_special_tokens)
        return row[: len(row) - self.tokenizer.suffix] if options.add_special_tokens else row


def split_row(row: Ints, limit: int, head: int, tail: int) -> tuple[list[Ints], list[int]]:
    """Rows of at most `limit` tokens and the tokens of the text in each: even parts of the body, every one
    between the `head` first and the `tail` last tokens of the row."""
    body = row[head : len(row) - tail]
    if len(row) <= limit:
        return [row], [len(body)]
    room = limit - head - tail
    if room < 1:
        raise BadValue(
            f"special tokens and prompt take {head + tail} tokens, and the model takes at most {limit}; "
            "there is no room for the text",
            param="input",
        )
    parts = np.array_split(body, -(-len(body) // room))
    before, after = row[:head], row[len(row) - tail :]
    return [np.concatenate([before, part, after]) for part in parts], [len(part) for part in parts]


def divide(pooled: int, first: int, end: int, length: int, size: int) -> Ints:
    """Chunks of `size` tokens from `first` to `end`, [chunks, 2]. What is pooled before and after (special
    tokens, a prompt) goes to the first and the last, so that the chunks make up the whole row."""
    size = min(size, length)
    inner = np.arange(first + size, end, size, dtype=np.int32)
    edges = np.concatenate([[pooled], inner, [length]]).astype(np.int32)
    return np.stack([edges[:-1], edges[1:]], axis=1)


def check_spans(texts: list[str], spans: Sequence[Sequence[tuple[int, int]]]) -> list[Ints]:
    """The caller's chunks of each text, [chunks, 2]: ascending, within the text, at least one."""
    if len(spans) != len(texts):
        raise BadValue(
            f"chunk_spans has {len(spans)} lists for {len(texts)} texts; give one a text", param="chunk_spans"
        )
    checked = []
    for index, (text, row) in enumerate(zip(texts, spans, strict=True)):
        edges = [edge for span in row for edge in span]
        empty = any(begin >= end for begin, end in row)
        if not edges or empty or edges != sorted(edges) or edges[0] < 0 or edges[-1] > len(text):
            raise BadValue(
                f"chunk_spans {index} must hold at least one [begin, end), ascending, without overlap, "
                f"from 0 to {len(text)}",
                param="chunk_spans",
            )
        checked.append(np.array(row, dtype=np.int32).reshape(-1, 2))
    return checked


def find_tokens(
    index: int, wanted: Ints, chars: Ints, pooled: int, body: tuple[int, int], length: int
) -> Ints:
    """The tokens that end in each wanted span, [chunks, 2]. As with `divide`, a chunk with the first or the
    last token of the text takes what is pooled before or after."""
    first, end = body
    lasts = chars[first:end, 1] - 1
    spans = first + np.searchsorted(lasts, wanted).astype(np.int32)
    empty = np.flatnonzero(spans[:, 0] == spans[:, 1])
    if len(empty):
        begin, until = wanted[empty[0]].tolist()
        raise BadValue(f"chunk_spans {index}: no token ends from {begin} to {until}", param="chunk_spans")
    spans[0, 0] = pooled if spans[0, 0] == first else spans[0, 0]
    spans[-1, 1] = length if spans[-1, 1] == end else spans[-1, 1]
    return spans


def body_of(offsets: Ints, pooled: int) -> tuple[int, int]:
    """The first and one past the last token of the text itself; what is not of it ends at 0 or before."""
    inside = np.flatnonzero(offsets[:, 1] > 0)
    if not len(inside) or inside[-1] < pooled:
        return pooled, pooled
    return max(int(inside[0]), pooled), int(inside[-1]) + 1


def _skips(request: Request) -> list[int]:
    return [0] * request.num_rows if request.skip is None else request.skip.tolist()


def _divided(request: Request, bodies: list[tuple[int, int]], chunk_size: int | None) -> list[Ints]:
    size = DEFAULT_CHUNK_SIZE if chunk_size is None else chunk_size
    rows = zip(_skips(request), bodies, request.lengths.tolist(), strict=True)
    return [divide(pooled, *body, length, size) for pooled, body, length in rows]


def _ends(spans: Ints, body: tuple[int, int], offsets: Ints) -> Ints:
    """Where the text's tokens of each chunk begin and end, [chunks, 2] in characters."""
    first, end = body
    if first == end:
        return np.zeros((len(spans), 2), dtype=np.int32)
    begins = offsets[np.maximum(spans[:, 0], first), 0]
    return np.stack([begins, offsets[np.minimum(spans[:, 1], end) - 1, 1]], axis=1)


def _late_chunks(request: Request, spans: list[Ints], chars: Ints | None) -> Chunks:
    counts = np.array([len(row) for row in spans], dtype=np.int32)
    flat = np.concatenate(spans)
    run = flat + np.repeat(request.starts, counts)[:, None]
    return Chunks(counts, flat[:, 1] - flat[:, 0], flat, run, chars)


def _common_prefix(row: Ints, other: Ints) -> int:
    shared = min(len(row), len(other))
    same = row[:shared] == other[:shared]
    return shared if same.all() else int(np.argmin(same))
