"""Queries and documents to be scored: rows of one `Request`, made as the model was trained to read them.

A cross-encoder reads each pair as one row; of embedders the queries stand before the documents, and
`pairs` says which belong together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from penstock.checkpoint.score import ScoreSpec
from penstock.checkpoint.spec import ModelSpec
from penstock.errors import BadValue, NotPossible
from penstock.inputs.lists import list_scores, prepare_lists
from penstock.inputs.pair_options import DEFAULT_PAIR_OPTIONS, Pair, PairOptions
from penstock.inputs.processor import InputOptions, InputProcessor
from penstock.inputs.truncation import Side, truncation_limit
from penstock.types import Ints, PooledOutput, PoolingParams, Request, Task

Kind = Literal["cross", "list", "late", "bi"]
_FIELD = re.compile(r"\{(instruction|query|document)\}")


class _Rows(NamedTuple):
    token_ids: Ints
    lengths: Ints
    type_ids: Ints | None = None


def score_kind(spec: ModelSpec) -> Kind:
    """How this model scores: pairs or whole lists read together, token vectors compared, or whole vectors."""
    if (kind := spec.score_kind) is not None:
        return kind
    raise NotPossible(
        f"model {spec.name} cannot score pairs; it has: " + ", ".join(task.value for task in spec.tasks),
        param="model",
    )


def prepare_pairs(
    processor: InputProcessor,
    request_id: str,
    pairs: Sequence[Pair],
    params: PoolingParams,
    options: PairOptions = DEFAULT_PAIR_OPTIONS,
) -> Request:
    """Everything at once, blocking: check, cut, tokenise, join. `params.task` is `score`.

    The answer's values go through `finish_pairs`.
    """
    kind = check_pairs(processor, params, options)
    if kind == "list":
        return prepare_lists(processor, request_id, pairs, params, options)
    queries, which = _distinct([query for query, _ in pairs])
    documents = [document for _, document in pairs]
    tokenizer = processor.tokenizer
    if options.max_tokens_per_query is not None:
        queries = tokenizer.cut(queries, options.max_tokens_per_query)
    if options.max_tokens_per_doc is not None:
        documents = tokenizer.cut(documents, options.max_tokens_per_doc)
    if kind != "cross":  # vectors are compared as the model makes them; there is nothing to activate
        params = msgspec.structs.replace(params, normalize=None)
    if kind == "bi":
        return _apart(processor, request_id, queries, documents, which, params, options)
    if kind == "late":
        return _late(processor, request_id, queries, documents, which, params, options)
    score = processor.spec.score
    assert score is not None
    make = _templated if score.template else _paired
    rows = make(processor, score, queries, documents, which, options)
    if not rows.lengths.all():
        raise BadValue(
            f"document {int(np.argmin(rows.lengths))} makes a row without tokens", param="documents"
        )
    return Request(
        request_id,
        rows.token_ids,
        rows.lengths,
        params,
        type_ids=rows.type_ids,
        reuse_prefix=processor.reads_last_token_only(params),
        cache_salt=options.cache_salt,
    )


def finish_pairs(
    spec: ModelSpec, pairs: Sequence[Pair], request: Request, answer: PooledOutput
) -> PooledOutput:
    """An answer with a score for each pair, [pairs, 1]."""
    if spec.score is None or not spec.score.marks:
        return answer
    sizes = [len(list(same)) for _, same in groupby(pairs, key=lambda pair: pair[0])]
    scores = list_scores(request, answer.values, spec.score.marks, sizes)
    return PooledOutput(answer.id, scores, answer.timings)


def check_pairs(processor: InputProcessor, params: PoolingParams, options: PairOptions) -> Kind:
    """Refuse what the model cannot do, before any work is spent on it."""
    kind = score_kind(processor.spec)
    processor.check(params)
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise BadValue(f"{name} is {value}; it must be at least 1", param=name)
    truncation_limit(options.truncate_prompt_tokens, processor.spec.max_model_len)
    score = processor.spec.score
    takes = kind in ("list", "bi") or score is None or any("{instruction}" in part for part in score.template)
    if options.instruction is not None and not takes:
        raise NotPossible(
            f"model {processor.spec.name} has no place for an instruction in what it reads",
            param="instruction",
        )
    return kind


def _distinct(queries: list[str]) -> tuple[list[str], Ints]:
    """Each query once, and for each pair which it is."""
    number: dict[str, int] = {}
    which = [number.setdefault(query, len(number)) for query in queries]
    return list(number), np.array(which, dtype=np.int32)


def _apart(
    processor: InputProcessor,
    request_id: str,
    queries: list[str],
    documents: list[str],
    which: Ints,
    params: PoolingParams,
    options: PairOptions,
) -> Request:
    """Rows as `embed` makes them, queries and documents each behind their own prompt."""
    plain = InputOptions(
        truncate_prompt_tokens=options.truncate_prompt_tokens,
        truncation_side=options.truncation_side,
        cache_salt=options.cache_salt,
    )
    if options.is_symmetric:
        both = replace(plain, prompt_name=options.prompt_name)
        sides = [(queries, both), (documents, both)]
    else:
        told = options.instruction is not None
        for_query = (
            replace(plain, instruction=options.instruction) if told else replace(plain, input_type="query")
        )
        sides = [(queries, for_query), (documents, replace(plain, input_type="document"))]
    halves = [processor.prepare(request_id, texts, params, how) for texts, how in sides]
    return _joined(halves, which, params)


def _late(
    processor: InputProcessor,
    request_id: str,
    queries: list[str],
    documents: list[str],
    which: Ints,
    params: PoolingParams,
    options: PairOptions,
) -> Request:
    """Rows as `token_embed` makes them, of queries and of documents; the engine compares their tokens."""
    if options.instruction is not None:
        raise NotPossible(
            f"model {processor.spec.name} has no place for an instruction in what it reads",
            param="instruction",
        )
    tokens = PoolingParams(Task.TOKEN_EMBED)
    side = InputOptions(truncation_side=options.truncation_side, cache_salt=options.cache_salt)
    of_query = replace(side, input_type="query")
    of_document = replace(side, input_type="document", truncate_prompt_tokens=options.truncate_prompt_tokens)
    halves = [
        processor.prepare(request_id, texts, tokens, how)
        for texts, how in ((queries, of_query), (documents, of_document))
    ]
    return _joined(halves, which, msgspec.structs.replace(params, late=True))


def _joined(halves: list[Request], which: Ints, params: PoolingParams) -> Request:
    """Queries, then documents. What only one half has is nothing special for the other."""
    first = halves[0]

    def both(name: str, otherwise: Callable[[Request], Ints]) -> Ints | None:
        parts = [getattr(half, name) for half in halves]
        if all(part is None for part in parts):
            return None
        filled = [otherwise(h) if p is None else p for h, p in zip(halves, parts, strict=True)]
        return np.concatenate(filled)

    return Request(
        first.id,
        np.concatenate([half.token_ids for half in halves]),
        np.concatenate([half.lengths for half in halves]),
        params,
        skip=both("skip", lambda half: np.zeros(half.num_rows, dtype=np.int32)),
        key_limits=both("key_limits", lambda half: half.lengths),
        token_mask=both("token_mask", lambda half: np.ones(half.num_tokens, dtype=np.int32)),
        adapters=both("adapters", lambda half: np.full(half.num_rows, -1, dtype=np.int32)),
        pairs=which,
        reuse_prefix=first.reuse_prefix,
        cache_salt=first.cache_salt,
    )


def _paired(
    processor: InputProcessor,
    score: ScoreSpec,
    queries: list[str],
    documents: list[str],
    which: Ints,
    options: PairOptions,
) -> _Rows:
    """The tokenizer's own template around each pair; of a row that is too long, the longer text is cut."""
    frame = processor.tokenizer.pair_frame
    firsts = processor.tokenizer.encode(queries, add_special_tokens=False)
    seconds = processor.tokenizer.encode(documents, add_special_tokens=False)
    limit = _limit(processor, _sizes(firsts)[which] + _sizes(seconds) + frame.size, options)
    sizes = _longest_first(_sizes(firsts)[which], _sizes(seconds), limit - frame.size)
    side, parts = options.truncation_side, []
    for query, second, first_size, second_size in zip(which.tolist(), seconds, *sizes, strict=True):
        first = _cut(firsts[query], first_size, side)
        parts += [frame.before, first, frame.between, _cut(second, second_size, side), frame.after]
    lengths = (sizes[0] + sizes[1] + frame.size).astype(np.int32)
    return _Rows(np.concatenate(parts), lengths, _type_ids(processor, sizes))


def _type_ids(processor: InputProcessor, sizes: tuple[Ints, Ints]) -> Ints | None:
    """Which of the two texts each token belongs to, where the model was told."""
    frame = processor.tokenizer.pair_frame
    if processor.spec.num_segments < 2 or not frame.segments.any():
        return None
    counts = np.ones((len(sizes[0]), len(frame.segments)), dtype=np.int32)
    counts[:, len(frame.before)] = sizes[0]
    counts[:, len(frame.before) + 1 + len(frame.between)] = sizes[1]
    return np.repeat(np.tile(frame.segments, len(counts)), counts.ravel())


def _longest_first(first: Ints, second: Ints, room: int) -> tuple[Ints, Ints]:
    """How much of each text stays, as the tokenizers library has it: the shorter one stays whole while it
    takes no more than half."""
    short, long = np.minimum(first, second), np.maximum(first, second)
    halved = short > room // 2
    cut = (np.where(halved, room // 2, short), np.where(halved, room - room // 2, room - short))
    fits = first + second <= room
    short, long = np.where(fits, short, cut[0]), np.where(fits, long, cut[1])
    return np.where(first > second, long, short), np.where(first > second, short, long)


def _templated(
    processor: InputProcessor,
    score: ScoreSpec,
    queries: list[str],
    documents: list[str],
    which: Ints,
    options: PairOptions,
) -> _Rows:
    """The model's prompt around each pair. What is before and after the document is tokenised once for a
    query, and is equal in all its rows; of a row that is too long, the document is cut."""
    tokenizer, told = processor.tokenizer, options.instruction
    told = score.instruction if told is None else told
    words = {"instruction": score.wording.replace("{instruction}", told) if told else ""}
    at = next(place for place, part in enumerate(score.template) if "{document}" in part)
    opening, closing = tokenizer.frame
    closing = closing if score.closed else closing[:0]

    def around(parts: Sequence[str]) -> list[list[Ints]]:
        texts = [_fill(part, words | {"query": query}) for query in queries for part in parts]
        rows = iter(tokenizer.encode(texts, add_special_tokens=False))
        return [[next(rows) for _ in parts] for _ in queries]

    heads = [np.concatenate([opening, *rows]) for rows in around(score.template[:at])]
    tails = [np.concatenate([*rows, closing]) for rows in around(score.template[at + 1 :])]
    filled = [
        _fill(score.template[at], words | {"query": queries[query], "document": document})
        for query, document in zip(which.tolist(), documents, strict=True)
    ]
    middles = tokenizer.encode(filled, add_special_tokens=False)
    fixed = (_sizes(heads) + _sizes(tails))[which]
    limit = _limit(processor, fixed + _sizes(middles), options)
    if (fixed >= limit).any():
        raise BadValue(
            f"a query takes {int(fixed.max())} of {limit} tokens and leaves no room for a document; shorten "
            "it or set max_tokens_per_query",
            param="query",
        )
    sizes = np.minimum(_sizes(middles), limit - fixed).astype(np.int32)
    parts = []
    for query, middle, size in zip(which.tolist(), middles, sizes, strict=True):
        parts += [heads[query], _cut(middle, size, options.truncation_side), tails[query]]
    return _Rows(np.concatenate(parts), (fixed + sizes).astype(np.int32))


def _fill(part: str, words: dict[str, str]) -> str:
    """In one pass, so that a text may hold what looks like a field."""
    return _FIELD.sub(lambda found: words[found[1]], part)


def _limit(processor: InputProcessor, lengths: Ints, options: PairOptions) -> int:
    """Where rows are cut; without a word about cutting, rows beyond the model's limit are refused."""
    limit = processor.spec.max_model_len
    cut_at = truncation_limit(options.truncate_prompt_tokens, limit)
    if cut_at is None and (lengths > limit).any():
        index = int(np.argmax(lengths > limit))
        raise BadValue(
            f"document {index} with its query has {int(lengths[index])} tokens, but the model takes at most "
            f"{limit}; shorten it or set truncate_prompt_tokens to -1",
            param="documents",
        )
    frame = processor.tokenizer.pair_frame.size
    if cut_at is not None and cut_at <= frame:
        raise BadValue(
            f"truncate_prompt_tokens is {cut_at}, and the special tokens alone take {frame}",
            param="truncate_prompt_tokens",
        )
    return limit if cut_at is None else cut_at


def _sizes(rows: Sequence[Ints]) -> Ints:
    return np.array([len(row) for row in rows], dtype=np.int32)


def _cut(row: Ints, size: int, side: Side) -> Ints:
    if len(row) <= size:
        return row
    return row[:size] if side == "right" else row[len(row) - size :]
