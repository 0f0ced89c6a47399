"""Long texts: rows beyond the model's limit split into rows that fit, and rows divided into chunks that
are pooled apart (late chunking). Where chunks lie is settled here; `outputs.chunks` combines them.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from penstock.core import Chunks, Ints, PoolingParams, Request, Task
from penstock.errors import BadValue, NotPossible
from penstock.inputs.places import in_text, text_offsets
from penstock.inputs.processor import InputOptions, InputProcessor, Inputs, split_inputs
from penstock.inputs.tokenizer import Located

Chunking = Literal["none", "mean", "late"]
CHUNK_SIZE = 256  # tokens of a late chunk, unless told


class Chunker:
    """Makes requests of long texts: `mean` for one vector a text, `late` for one a chunk."""

    def __init__(self, processor: InputProcessor) -> None:
        self.processor = processor
        self.spec = processor.spec
        self.tokenizer = processor.tokenizer

    def check(
        self, params: PoolingParams, options: InputOptions, chunking: str, chunk_size: int | None
    ) -> None:
        """Refuse what cannot be chunked, before any work is spent on it."""
        if chunking not in ("none", "mean", "late"):
            raise BadValue(f"chunking {chunking!r} is unknown; use none, mean or late", param="chunking")
        if chunk_size is not None and chunking != "late":
            raise BadValue("chunk_size goes with chunking 'late'", param="chunk_size")
        if chunk_size is not None and chunk_size < 1:
            raise BadValue(f"chunk_size is {chunk_size}; it must be at least 1", param="chunk_size")
        if chunking == "none":
            return
        if params.task is not Task.EMBED:
            raise BadValue(
                f"chunking is for task 'embed'; task {params.task.value!r} has none", param="chunking"
            )
        self.processor.check(params)
        if chunking == "mean" and options.truncate_prompt_tokens is not None:
            raise BadValue(
                "chunking 'mean' reads the whole text; leave truncate_prompt_tokens out",
                param="truncate_prompt_tokens",
            )
        if chunking == "late" and (reason := self._why_not_late()):
            raise NotPossible(
                f"chunking 'late' is not possible for {self.spec.name}: {reason}", param="chunking"
            )

    def prepare(
        self,
        request_id: str,
        inputs: Inputs,
        params: PoolingParams,
        options: InputOptions,
        chunking: str,
        chunk_size: int | None = None,
    ) -> tuple[Request, Chunks | None]:
        """Everything at once, blocking; None for chunks where every text is one row as it is."""
        self.check(params, options, chunking, chunk_size)
        texts, rows = split_inputs(inputs)
        if chunking == "none":
            return self.processor.prepare(request_id, inputs, params, options), None
        special = options.add_special_tokens
        prompted = self.processor.with_prompt(texts or [], options)
        if chunking == "late":
            if texts is None:
                return self.late_ids(request_id, rows, options, chunk_size)
            return self.late(request_id, texts, self.tokenizer.locate(prompted, special), options, chunk_size)
        if texts is not None:
            rows = self.tokenizer.encode(prompted, special)
        return self.mean(request_id, rows, params, options, from_text=texts is not None)

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
        if all(len(row) <= self.spec.limit for row in rows):
            return self.processor.join(request_id, rows, params, options, from_text=from_text), None
        framed = from_text and options.add_special_tokens
        prompt = self._prompt_tokens(options) if from_text else None
        pieces, weights, counts = [], [], []
        for row in rows:
            head = _common_prefix(row, prompt) if prompt is not None else 0
            head = max(head, self.tokenizer.prefix if framed else 0)
            parts, sizes = split_row(row, self.spec.limit, head, self.tokenizer.suffix if framed else 0)
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
        located: list[Located],
        options: InputOptions,
        chunk_size: int | None,
    ) -> tuple[Request, Chunks]:
        """A row a text, whose token vectors are wanted, and the places of its chunks."""
        request = self._whole(request_id, [row.ids for row in located], options, from_text=True)
        offsets = text_offsets(self.processor, [row.offsets for row in located], options)
        bodies = [body_of(*row) for row in zip(offsets, _skips(request), strict=True)]
        spans = _divided(request, bodies, chunk_size)
        ends = [_ends(*places) for places in zip(spans, bodies, offsets, strict=True)]
        chars = [in_text(self.processor, *row) for row in zip(texts, ends, strict=True)]
        return request, _late_chunks(request, spans, np.concatenate(chars))

    def late_ids(
        self, request_id: str, rows: list[Ints], options: InputOptions, chunk_size: int | None
    ) -> tuple[Request, Chunks]:
        """The same for token ids, which lie in no text."""
        request = self._whole(request_id, rows, options, from_text=False)
        bodies = list(zip(_skips(request), request.lengths.tolist(), strict=True))
        return request, _late_chunks(request, _divided(request, bodies, chunk_size), None)

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
        seen = prompt.lower() if self.spec.lower_case else prompt
        (row,) = self.tokenizer.encode([seen], options.add_special_tokens)
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
    inner = np.arange(first + size, end, size, dtype=np.int32)
    edges = np.concatenate([[pooled], inner, [length]]).astype(np.int32)
    return np.stack([edges[:-1], edges[1:]], axis=1)


def body_of(offsets: Ints, pooled: int) -> tuple[int, int]:
    """The first and one past the last token of the text itself; what is not of it ends at 0 or before."""
    inside = np.flatnonzero(offsets[:, 1] > 0)
    if not len(inside) or inside[-1] < pooled:
        return pooled, pooled
    return max(int(inside[0]), pooled), int(inside[-1]) + 1


def _skips(request: Request) -> list[int]:
    return [0] * request.num_rows if request.skip is None else request.skip.tolist()


def _divided(request: Request, bodies: list[tuple[int, int]], chunk_size: int | None) -> list[Ints]:
    size = CHUNK_SIZE if chunk_size is None else chunk_size
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
    return Chunks(counts, flat[:, 1] - flat[:, 0], flat, chars, request.starts)


def _common_prefix(row: Ints, other: Ints) -> int:
    shared = min(len(row), len(other))
    same = row[:shared] == other[:shared]
    return shared if same.all() else int(np.argmin(same))
