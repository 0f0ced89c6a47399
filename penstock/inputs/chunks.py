"""Chunking of long texts. `mean` splits rows that exceed the model's limit into rows that fit. `late` pools
the token vectors of a row chunk by chunk. `outputs.chunks` combines the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.errors import BadValue, NotPossible
from penstock.inputs.long_texts import MAX_REQUEST_TOKENS, RowLimit, check_request_tokens
from penstock.inputs.offsets import text_offsets
from penstock.inputs.processor import InputOptions, InputProcessor
from penstock.inputs.tokenizer import EncodedText
from penstock.types import Chunks, Ints, PoolingParams, Request, Task

Chunking = Literal["none", "mean", "late"]
DEFAULT_CHUNK_SIZE = 256  # tokens of a late chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """How to chunk texts. The names are those of the HTTP fields."""

    chunking: str = "none"
    chunk_size: int | None = None  # tokens of a late chunk
    chunk_spans: Sequence[Sequence[tuple[int, int]]] | None = None  # late chunks of each text, in characters

    def check(self) -> None:
        if self.chunking not in ("none", "mean", "late"):
            raise BadValue(f"chunking {self.chunking!r} is unknown; use none, mean or late", param="chunking")
        for name in ("chunk_size", "chunk_spans"):
            if getattr(self, name) is not None and self.chunking != "late":
                raise BadValue(f"{name} needs chunking 'late'", param=name)
        if self.chunk_size is not None and self.chunk_spans is not None:
            raise BadValue(
                "chunk_size and chunk_spans exclude each other; give only one", param="chunk_spans"
            )
        if self.chunk_size is not None and self.chunk_size < 1:
            raise BadValue(f"chunk_size is {self.chunk_size}; it must be at least 1", param="chunk_size")


class Chunker:
    """Builds the requests of long texts: `mean` for one vector per text, `late` for one vector per chunk."""

    def __init__(self, processor: InputProcessor) -> None:
        self.processor = processor
        self.spec = processor.spec
        self.tokenizer = processor.tokenizer

    def check(self, params: PoolingParams, options: InputOptions, chunking: ChunkOptions) -> None:
        """Reject unsupported requests before any text is tokenised."""
        chunking.check()
        if chunking.chunking == "none":
            return
        if params.task is not Task.EMBED:
            raise BadValue(f"chunking needs task 'embed', not {params.task.value!r}", param="chunking")
        self.processor.check(params)
        if chunking.chunking == "mean" and options.truncate_prompt_tokens is not None:
            raise BadValue(
                "chunking 'mean' embeds the whole text; leave truncate_prompt_tokens out",
                param="truncate_prompt_tokens",
            )
        if self.spec.text_end or self.spec.query_end:
            raise NotPossible(
                f"chunking is not possible for {self.spec.name}: a token has to end each of its texts",
                param="chunking",
            )
        if chunking.chunking == "late" and (reason := self._why_not_late()):
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
        """Split rows into rows that fit, each with the special tokens and the prompt of its text."""
        if all(len(row) <= self.spec.max_model_len for row in rows):
            return self.processor.join(request_id, rows, params, options, from_text=from_text), None
        has_special_tokens = from_text and options.add_special_tokens
        prompt = self._prompt_tokens(options) if from_text else None
        pieces, weights, counts = [], [], []
        num_repeated = 0  # prompt and special tokens, which each piece repeats
        for row in rows:
            head = _common_prefix(row, prompt) if prompt is not None else 0
            head = max(head, self.tokenizer.prefix if has_special_tokens else 0)
            tail = self.tokenizer.suffix if has_special_tokens else 0
            num_repeated += (head + tail) * (len(row) // max(1, self.spec.max_model_len - head - tail))
            check_request_tokens(num_repeated, MAX_REQUEST_TOKENS, "prompt")
            parts, sizes = split_row(row, self.spec.max_model_len, head, tail)
            pieces += parts
            weights += sizes
            counts.append(len(parts))
        # Dimensions and dtype are applied after the mean.
        chunk_params = PoolingParams(Task.EMBED, normalize=params.normalize)
        request = self.processor.join(request_id, pieces, chunk_params, options, from_text=from_text)
        return request, Chunks(
            counts=np.array(counts, dtype=np.int32), weights=np.array(weights, dtype=np.int32)
        )

    def late(
        self,
        request_id: str,
        texts: list[str],
        encoded: list[EncodedText],
        options: InputOptions,
        chunking: ChunkOptions,
    ) -> tuple[Request, Chunks]:
        """A token-embedding request with one row per text, and the spans of its chunks."""
        request = self._token_request(request_id, [row.ids for row in encoded], options, from_text=True)
        offsets = text_offsets(self.processor, [row.offsets for row in encoded], options)
        bodies = [text_body(*row) for row in zip(offsets, _skips(request), strict=True)]
        if chunking.chunk_spans is not None:
            char_spans = check_spans(texts, chunking.chunk_spans)
            rows = zip(char_spans, offsets, _skips(request), bodies, request.lengths.tolist(), strict=True)
            spans = [token_spans(index, *row) for index, row in enumerate(rows)]
            return request, _late_chunks(request, spans, np.concatenate(char_spans))
        spans = _even_spans(request, bodies, chunking.chunk_size)
        chars = [_char_spans(*row) for row in zip(spans, bodies, offsets, strict=True)]
        return request, _late_chunks(request, spans, np.maximum(np.concatenate(chars), 0))

    def late_from_ids(
        self, request_id: str, rows: list[Ints], options: InputOptions, chunking: ChunkOptions
    ) -> tuple[Request, Chunks]:
        """Like `late`, for token ids, whose chunks have no character spans."""
        if chunking.chunk_spans is not None:
            raise BadValue(
                "chunk_spans are character offsets in a text; use chunk_size with token ids",
                param="chunk_spans",
            )
        request = self._token_request(request_id, rows, options, from_text=False)
        bodies = list(zip(_skips(request), request.lengths.tolist(), strict=True))
        return request, _late_chunks(request, _even_spans(request, bodies, chunking.chunk_size), None)

    def _token_request(
        self, request_id: str, rows: list[Ints], options: InputOptions, *, from_text: bool
    ) -> Request:
        params = PoolingParams(Task.TOKEN_EMBED, normalize=False)
        return self.processor.join(request_id, rows, params, options, from_text=from_text)

    def _why_not_late(self) -> str | None:
        pooling = self.spec.pooling
        if pooling.methods != ("mean",):
            return f"it pools by {' + '.join(pooling.methods)}, and late chunks are means of token vectors"
        if pooling.modules:
            return "it has Dense or LayerNorm modules after the pooling"
        if pooling.quantizes:
            return "it quantises vectors after the pooling"
        return None if Task.TOKEN_EMBED in self.spec.tasks else "it has no task 'token_embed'"

    def _prompt_tokens(self, options: InputOptions) -> Ints | None:
        """The tokens of the prompt at the start of a row, leading special tokens included."""
        prompt = self.processor.prompt(options)
        if not prompt:
            return None
        limit = RowLimit(self.spec.max_model_len, name="prompt", param="prompt")
        (row,) = self.tokenizer.encode([prompt], options.add_special_tokens, limit)
        return row[: len(row) - self.tokenizer.suffix] if options.add_special_tokens else row


def split_row(row: Ints, limit: int, head: int, tail: int) -> tuple[list[Ints], list[int]]:
    """Split a row into rows of at most `limit` tokens, and count the text's tokens in each.

    The body is split into even parts. Each part gets the row's first `head` and last `tail` tokens.
    """
    body = row[head : len(row) - tail]
    if len(row) <= limit:
        return [row], [len(body)]
    room = limit - head - tail
    if room < 1:
        raise BadValue(
            f"special tokens and prompt take {head + tail} tokens, but the model takes at most {limit}; "
            "shorten the prompt",
            param="input",
        )
    parts = np.array_split(body, -(-len(body) // room))
    before, after = row[:head], row[len(row) - tail :]
    return [np.concatenate([before, part, after]) for part in parts], [len(part) for part in parts]


def divide(pooled: int, first: int, end: int, length: int, size: int) -> Ints:
    """Spans of `size` tokens from `first` to `end`, [chunks, 2].

    The first and the last chunk include pooled tokens before and after the text (special tokens, a prompt),
    so that the chunks cover the whole row.
    """
    size = min(size, length)
    inner = np.arange(first + size, end, size, dtype=np.int32)
    edges = np.concatenate([[pooled], inner, [length]]).astype(np.int32)
    return np.stack([edges[:-1], edges[1:]], axis=1)


def check_spans(texts: list[str], spans: Sequence[Sequence[tuple[int, int]]]) -> list[Ints]:
    """Check the caller's spans of each text, [chunks, 2]: at least one, ascending, within the text."""
    if len(spans) != len(texts):
        raise BadValue(
            f"chunk_spans has {len(spans)} lists for {len(texts)} texts; give one list for each text",
            param="chunk_spans",
        )
    checked = []
    for index, (text, row) in enumerate(zip(texts, spans, strict=True)):
        edges = [edge for span in row for edge in span]
        has_empty = any(begin >= end for begin, end in row)
        if not edges or has_empty or edges != sorted(edges) or edges[0] < 0 or edges[-1] > len(text):
            raise BadValue(
                f"chunk_spans[{index}] must have at least one [begin, end), ascending, without overlap, "
                f"from 0 to {len(text)}",
                param="chunk_spans",
            )
        checked.append(np.array(row, dtype=np.int32).reshape(-1, 2))
    return checked


def token_spans(
    index: int, char_spans: Ints, offsets: Ints, pooled: int, body: tuple[int, int], length: int
) -> Ints:
    """The tokens that end in each character span, [chunks, 2].

    As in `divide`, a chunk with the first or the last token of the text includes pooled tokens before or
    after the text.
    """
    first, end = body
    lasts = offsets[first:end, 1] - 1
    spans = first + np.searchsorted(lasts, char_spans).astype(np.int32)
    empty = np.flatnonzero(spans[:, 0] == spans[:, 1])
    if len(empty):
        begin, until = char_spans[empty[0]].tolist()
        raise BadValue(
            f"chunk_spans[{index}]: no token ends from {begin} to {until}; use a longer span",
            param="chunk_spans",
        )
    spans[0, 0] = pooled if spans[0, 0] == first else spans[0, 0]
    spans[-1, 1] = length if spans[-1, 1] == end else spans[-1, 1]
    return spans


def text_body(offsets: Ints, pooled: int) -> tuple[int, int]:
    """The range [first, end) of the text's own tokens. The offsets of other tokens end at 0 or below."""
    inside = np.flatnonzero(offsets[:, 1] > 0)
    if not len(inside) or inside[-1] < pooled:
        return pooled, pooled
    return max(int(inside[0]), pooled), int(inside[-1]) + 1


def _skips(request: Request) -> list[int]:
    return [0] * request.num_rows if request.skip is None else request.skip.tolist()


def _even_spans(request: Request, bodies: list[tuple[int, int]], chunk_size: int | None) -> list[Ints]:
    size = DEFAULT_CHUNK_SIZE if chunk_size is None else chunk_size
    rows = zip(_skips(request), bodies, request.lengths.tolist(), strict=True)
    return [divide(pooled, *body, length, size) for pooled, body, length in rows]


def _char_spans(spans: Ints, body: tuple[int, int], offsets: Ints) -> Ints:
    """The characters that the text's tokens of each chunk cover, [chunks, 2]."""
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
    equal = row[:shared] == other[:shared]
    return shared if equal.all() else int(np.argmin(equal))
