"""Query-document pairs to score, as rows of one `Request`, in the layout that the model was trained with.

For a cross-encoder, each pair is one row. For an embedder, query rows come before document rows, and
`Request.pairs` gives the query of each document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from penstock.checkpoint.score import ScoreSpec
from penstock.checkpoint.spec import ModelSpec
from penstock.errors import BadValue, NotPossible, shown
from penstock.inputs.images.pairs import joint_request, joint_rows
from penstock.inputs.images.rows import has_images, pairs_have_images, refuse_images
from penstock.inputs.lists import list_scores, prepare_lists
from penstock.inputs.long_texts import (
    ExpandedTexts,
    RowLimit,
    check_expanded,
    check_request_tokens,
)
from penstock.inputs.pair_options import DEFAULT_PAIR_OPTIONS, Pair, PairNames, PairOptions
from penstock.inputs.processor import InputOptions, InputProcessor
from penstock.inputs.tokenizer import Tokenizer
from penstock.inputs.truncation import Side, truncation_limit
from penstock.types import Ints, PooledOutput, PoolingParams, Request, RequestImages, Task, runs

Kind = Literal["cross", "list", "late", "bi"]
_PLACEHOLDER = re.compile(r"\{(instruction|query|document)\}")


class _Rows(NamedTuple):
    token_ids: Ints
    lengths: Ints
    type_ids: Ints | None = None
    num_truncated: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _PairTexts:
    """The texts of all pairs, with each distinct query once."""

    queries: list[str]
    documents: list[str]
    query_of: Ints  # [documents], index into `queries`

    def stripped(self) -> _PairTexts:
        queries, documents = ([text.strip() for text in side] for side in (self.queries, self.documents))
        return _PairTexts(queries, documents, self.query_of)


def score_kind(spec: ModelSpec) -> Kind:
    """How this model scores: cross-encoder, listwise, late interaction, or a comparison of row vectors."""
    if (kind := spec.score_kind) is not None:
        return kind
    why = f": {spec.why_not_score}" if spec.why_not_score is not None else ""
    raise NotPossible(
        f"model {spec.name} cannot score pairs; its tasks are: "
        + ", ".join(task.value for task in spec.tasks)
        + why,
        param="model",
    )


def prepare_pairs(
    processor: InputProcessor,
    request_id: str,
    pairs: Sequence[Pair],
    params: PoolingParams,
    options: PairOptions = DEFAULT_PAIR_OPTIONS,
) -> Request:
    """Check, truncate and tokenise the pairs and join them into one request. Blocking.

    `params.task` must be `score`. Pass the output of the request to `finish_pairs`.
    """
    kind = check_pairs(processor, params, options)
    if processor.spec.images is None and pairs_have_images(pairs):
        raise refuse_images(processor.spec.name)
    if options.instruction is not None:
        check_expanded(len(options.instruction) * len(pairs), "instruction")
    if kind == "list":
        return prepare_lists(processor, request_id, pairs, params, options)
    if kind == "cross" and pairs_have_images(pairs):
        return _joint_content_request(processor, request_id, pairs, params, options)
    texts = _pair_texts(processor, pairs, options)
    if kind != "cross":  # vectors are compared without an activation
        params = msgspec.structs.replace(params, normalize=None)
    if kind == "bi":
        return _bi_encoder_request(processor, request_id, texts, params, options)
    if kind == "late":
        return _late_request(processor, request_id, texts, params, options)
    return _joint_request(processor, request_id, texts, params, options)


def prepare_classified_pairs(
    processor: InputProcessor,
    request_id: str,
    pairs: Sequence[Pair],
    params: PoolingParams,
    options: PairOptions,
) -> Request:
    """Prepare one row per pair, for a classifier that reads two texts together. Blocking."""
    processor.check(params)
    truncation_limit(options.truncate_prompt_tokens, processor.spec.max_model_len)
    texts = _pair_texts(processor, pairs, options)
    return _joint_request(processor, request_id, texts, params, options)


def _joint_request(
    processor: InputProcessor,
    request_id: str,
    texts: _PairTexts,
    params: PoolingParams,
    options: PairOptions,
) -> Request:
    """One row per pair, in the model's own prompt or in the tokenizer's pair template."""
    score = processor.spec.score
    if score is not None and score.strips:
        texts = texts.stripped()
    if score is not None and score.template:
        rows = _templated_rows(processor, score, texts, options)
    else:
        rows = _pair_rows(processor, texts, options)
    if not rows.lengths.all():
        names = options.names
        raise BadValue(
            f"{names.second} {int(np.argmin(rows.lengths))} and its {names.first} have no tokens; give texts "
            "that are not empty",
            param=names.second_param,
        )
    return Request(
        request_id,
        rows.token_ids,
        rows.lengths,
        params,
        type_ids=rows.type_ids,
        reuse_prefix=processor.reads_last_token_only(params),
        cache_salt=options.cache_salt,
        num_truncated=rows.num_truncated,
    )


def _joint_content_request(
    processor: InputProcessor,
    request_id: str,
    pairs: Sequence[Pair],
    params: PoolingParams,
    options: PairOptions,
) -> Request:
    """One row per pair, with texts and images in the model's own prompt."""
    score, content = processor.spec.score, processor.content
    if score is None or not score.template or content is None:
        raise refuse_images(processor.spec.name)
    if options.max_tokens_per_query is not None or options.max_tokens_per_doc is not None:
        raise BadValue(
            "max_tokens_per_query and max_tokens_per_doc cut texts; leave them out where there are images",
            param="max_tokens_per_doc",
        )
    template, values = score.template, {"instruction": _instruction(score, options.instruction)}

    def fill(query: str, document: str) -> list[str]:
        return [_fill(part, values | {"query": query, "document": document}) for part in template]

    rows, images = joint_rows(processor.tokenizer, content, score, pairs, fill)
    none = np.zeros(0, dtype=np.int32)
    empty = Request(
        request_id,
        none,
        none,
        params,
        reuse_prefix=processor.reads_last_token_only(params),
        cache_salt=options.cache_salt,
    )
    return joint_request(empty, content, rows, images)


def finish_pairs(
    spec: ModelSpec, pairs: Sequence[Pair], request: Request, output: PooledOutput
) -> PooledOutput:
    """The output with one score per pair, [pairs, 1]."""
    if spec.score is None or not spec.score.marks:
        return output
    sizes = [len(list(group)) for _, group in groupby(pairs, key=lambda pair: pair[0])]
    scores = list_scores(request, output.values, spec.score.marks, sizes)
    return PooledOutput(output.id, scores, output.timings)


def check_pairs(processor: InputProcessor, params: PoolingParams, options: PairOptions) -> Kind:
    """Reject unsupported parameters and options before any text is tokenised."""
    kind = score_kind(processor.spec)
    processor.check(params)
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise BadValue(f"{name} is {shown(value)}; it must be at least 1", param=name)
    truncation_limit(options.truncate_prompt_tokens, processor.spec.max_model_len)
    score = processor.spec.score
    accepts_instruction = (
        kind in ("list", "bi") or score is None or any("{instruction}" in part for part in score.template)
    )
    if options.instruction is not None and not accepts_instruction:
        raise _no_instruction(processor.spec)
    return kind


def _no_instruction(spec: ModelSpec) -> NotPossible:
    return NotPossible(
        f"model {spec.name} takes no instruction with its pairs; leave instruction out", param="instruction"
    )


def _pair_texts(processor: InputProcessor, pairs: Sequence[Pair], options: PairOptions) -> _PairTexts:
    """The texts of all pairs, queries deduplicated, each truncated to its own limit."""
    index_of: dict[str, int] = {}
    query_of = [index_of.setdefault(query, len(index_of)) for query, _ in pairs]
    queries, documents = list(index_of), [document for _, document in pairs]
    if options.max_tokens_per_query is not None:
        queries = _truncated(processor, queries, options.max_tokens_per_query, "max_tokens_per_query")
    if options.max_tokens_per_doc is not None:
        documents = _truncated(processor, documents, options.max_tokens_per_doc, "max_tokens_per_doc")
    return _PairTexts(queries, documents, np.array(query_of, dtype=np.int32))


def _truncated(processor: InputProcessor, texts: list[str], max_tokens: int, name: str) -> list[str]:
    if has_images(texts):
        raise BadValue(f"{name} cuts texts, and there are images among them; leave it out", param=name)
    return processor.tokenizer.truncate(texts, max_tokens)


def _bi_encoder_request(
    processor: InputProcessor,
    request_id: str,
    texts: _PairTexts,
    params: PoolingParams,
    options: PairOptions,
) -> Request:
    """The same rows as for `embed`; queries and documents have their own prompts."""
    base = InputOptions(
        truncate_prompt_tokens=options.truncate_prompt_tokens,
        truncation_side=options.truncation_side,
        cache_salt=options.cache_salt,
    )
    if options.is_symmetric:
        query_options = document_options = replace(base, prompt_name=options.prompt_name)
    else:
        document_options = replace(base, input_type="document")
        if options.instruction is not None:
            query_options = replace(base, instruction=options.instruction)
        else:
            query_options = replace(base, input_type="query")
    queries = processor.prepare(request_id, texts.queries, params, query_options)
    documents = processor.prepare(request_id, texts.documents, params, document_options)
    return _join(queries, documents, texts.query_of, params)


def _late_request(
    processor: InputProcessor,
    request_id: str,
    texts: _PairTexts,
    params: PoolingParams,
    options: PairOptions,
) -> Request:
    """The same rows as for `token_embed`. The engine scores their token vectors."""
    if options.instruction is not None:
        raise _no_instruction(processor.spec)
    tokens = PoolingParams(Task.TOKEN_EMBED)
    base = InputOptions(truncation_side=options.truncation_side, cache_salt=options.cache_salt)
    query_options = replace(base, input_type="query")
    document_options = replace(
        base, input_type="document", truncate_prompt_tokens=options.truncate_prompt_tokens
    )
    queries = processor.prepare(request_id, texts.queries, tokens, query_options)
    documents = processor.prepare(request_id, texts.documents, tokens, document_options)
    return _join(queries, documents, texts.query_of, msgspec.structs.replace(params, late=True))


def _join(queries: Request, documents: Request, query_of: Ints, params: PoolingParams) -> Request:
    """Join query rows and document rows into one request.

    If only one of the two has an optional array, the other gets neutral values.
    """
    halves = (queries, documents)

    def concat(name: str, neutral: Callable[[Request], Ints]) -> Ints | None:
        parts = [getattr(half, name) for half in halves]
        if all(part is None for part in parts):
            return None
        filled = [neutral(h) if p is None else p for h, p in zip(halves, parts, strict=True)]
        return np.concatenate(filled)

    return Request(
        queries.id,
        np.concatenate([half.token_ids for half in halves]),
        np.concatenate([half.lengths for half in halves]),
        params,
        skip=concat("skip", lambda half: np.zeros(half.num_rows, dtype=np.int32)),
        key_limits=concat("key_limits", lambda half: half.lengths),
        token_mask=concat("token_mask", lambda half: np.ones(half.num_tokens, dtype=np.int32)),
        adapters=concat("adapters", lambda half: np.full(half.num_rows, -1, dtype=np.int32)),
        images=RequestImages.join([half.images for half in halves], [0, queries.num_rows]),
        rope_positions=concat("rope_positions", _plain_positions),
        pairs=query_of,
        reuse_prefix=queries.reuse_prefix,
        cache_salt=queries.cache_salt,
        num_truncated=queries.num_truncated + documents.num_truncated,
    )


def _plain_positions(request: Request) -> Ints:
    """The positions of tokens without images, [tokens · 3]."""
    return np.repeat(runs(np.zeros_like(request.lengths), request.lengths), 3)


def _pair_rows(processor: InputProcessor, texts: _PairTexts, options: PairOptions) -> _Rows:
    """One row per pair, in the tokenizer's pair template. In long rows, the longer text is truncated."""
    frame, query_of = processor.tokenizer.pair_frame, texts.query_of
    query_limit, document_limit = _text_limits(processor, options)
    queries = processor.tokenizer.encode(texts.queries, False, query_limit)
    documents = processor.tokenizer.encode(texts.documents, False, document_limit)
    query_sizes, document_sizes = _sizes(queries)[query_of], _sizes(documents)
    whole_sizes = query_sizes + document_sizes
    limit = _row_limit(processor, query_sizes + document_sizes + frame.size, options)
    if options.cuts_first_only:
        query_sizes = _only_first(query_sizes, document_sizes, limit - frame.size, options)
    else:
        _check_longest(texts, query_sizes, document_sizes, document_limit, options.names)
        query_sizes, document_sizes = _longest_first(query_sizes, document_sizes, limit - frame.size)
    _check_tokens(query_sizes + document_sizes + frame.size, options)
    side, parts = options.truncation_side, []
    for query, document, query_size, document_size in zip(
        query_of.tolist(), documents, query_sizes, document_sizes, strict=True
    ):
        parts += [frame.before, _truncate(queries[query], query_size, side), frame.between]
        parts += [_truncate(document, document_size, side), frame.after]
    lengths = (query_sizes + document_sizes + frame.size).astype(np.int32)
    num_truncated = int(np.count_nonzero(query_sizes + document_sizes < whole_sizes))
    type_ids = _type_ids(processor, query_sizes, document_sizes)
    return _Rows(np.concatenate(parts), lengths, type_ids, num_truncated)


def _text_limits(processor: InputProcessor, options: PairOptions) -> tuple[RowLimit, RowLimit]:
    """The limits of queries and documents: neither can be longer than a row."""
    limit = processor.spec.max_model_len
    cut_at = truncation_limit(options.truncate_prompt_tokens, limit)
    document = RowLimit(
        limit if cut_at is None else cut_at,
        cut_at is not None,
        options.truncation_side,
        name=options.names.second,
        param=options.names.second_param,
    )
    return replace(document, name=options.names.first, param=options.names.first_param), document


def _check_longest(
    texts: _PairTexts, query_sizes: Ints, document_sizes: Ints, limit: RowLimit, names: PairNames
) -> None:
    """Refuse pairs for which the longer text is unknown, because a text was only partly tokenised.

    If both texts are too long, truncation has to know which one is longer.
    """
    queries, documents = (
        np.array([len(text) > limit.max_whole_chars for text in side], dtype=bool)
        for side in (texts.queries, texts.documents)
    )
    query_in_part = queries[texts.query_of] & (query_sizes > limit.max_tokens)
    document_in_part = documents & (document_sizes > limit.max_tokens)
    unknown = query_in_part & (document_sizes >= query_sizes)
    unknown |= document_in_part & (query_sizes >= document_sizes)
    if unknown.any():
        raise BadValue(
            f"{names.second} {int(np.argmax(unknown))} and its {names.first} are both far longer than the "
            f"{limit.max_tokens} tokens of a row; shorten the {names.first} or set max_tokens_per_query",
            param=names.first_param,
        )


def _check_tokens(lengths: Ints, options: PairOptions) -> None:
    """Refuse a request whose rows have too many tokens once the query is repeated in each of them."""
    check_request_tokens(
        int(lengths.sum(dtype=np.int64)), options.max_request_tokens, options.names.second_param
    )


def _type_ids(processor: InputProcessor, query_sizes: Ints, document_sizes: Ints) -> Ints | None:
    """The segment id of each token; None if the model or its tokenizer has only one segment."""
    frame = processor.tokenizer.pair_frame
    if processor.spec.num_segments < 2 or not frame.segments.any():
        return None
    counts = np.ones((len(query_sizes), len(frame.segments)), dtype=np.int32)
    counts[:, len(frame.before)] = query_sizes
    counts[:, len(frame.before) + 1 + len(frame.between)] = document_sizes
    return np.repeat(np.tile(frame.segments, len(counts)), counts.ravel())


def _longest_first(first: Ints, second: Ints, room: int) -> tuple[Ints, Ints]:
    """Number of tokens of each text that fit into `room`, by the `longest_first` rule of tokenizers.

    The shorter text is not truncated if it takes at most half of the room.
    """
    short, long = np.minimum(first, second), np.maximum(first, second)
    both_cut = short > room // 2
    cut_short = np.where(both_cut, room // 2, short)
    cut_long = np.where(both_cut, room - room // 2, room - short)
    fits = first + second <= room
    short, long = np.where(fits, short, cut_short), np.where(fits, long, cut_long)
    return np.where(first > second, long, short), np.where(first > second, short, long)


def _only_first(first: Ints, second: Ints, room: int, options: PairOptions) -> Ints:
    """Number of tokens of the first text that fit beside the whole second text."""
    if (second >= room).any() and (first + second > room)[second >= room].any():
        index = int(np.argmax((second >= room) & (first + second > room)))
        raise BadValue(
            f"{options.names.second} {index} has {int(second[index])} tokens and leaves no room for the "
            f"{options.names.first}; shorten it",
            param=options.names.second_param,
        )
    return np.minimum(first, room - second).astype(np.int32)


def _templated_rows(
    processor: InputProcessor, score: ScoreSpec, texts: _PairTexts, options: PairOptions
) -> _Rows:
    """One row per pair, in the model's prompt. If a row is too long, its document is truncated.

    The tokens before and after the document are the same in all rows of a query, so they are computed once.
    """
    tokenizer, query_of = processor.tokenizer, texts.query_of
    values = {"instruction": _instruction(score, options.instruction)}
    at = next(index for index, part in enumerate(score.template) if "{document}" in part)
    opening, closing = tokenizer.frame
    opening, closing = opening[: None if score.opened else 0], closing[: None if score.closed else 0]

    query_limit, document_limit = _text_limits(processor, options)
    query_limit = replace(query_limit, truncates=False)  # a query is never truncated here

    def encode_for_queries(parts: Sequence[str]) -> list[list[Ints]]:
        def fill(index: int) -> str:
            query, part = divmod(index, len(parts))
            return _fill(parts[part], values | {"query": texts.queries[query]})

        sizes = [_max_filled(part, values, len(query)) for query in texts.queries for part in parts]
        check_expanded(sum(sizes), "query")
        rows = iter(tokenizer.encode(ExpandedTexts(fill, sizes), False, query_limit))
        return [[next(rows) for _ in parts] for _ in texts.queries]

    def fill_document(index: int) -> str:
        query, document = texts.queries[query_of[index]], texts.documents[index]
        return _fill(score.template[at], values | {"query": query, "document": document})

    heads = [np.concatenate([opening, *rows]) for rows in encode_for_queries(score.template[:at])]
    tails = [np.concatenate([*rows, closing]) for rows in encode_for_queries(score.template[at + 1 :])]
    sizes = [_max_filled(score.template[at], values, len(texts.queries[query])) for query in query_of]
    check_expanded(sum(sizes), "query")
    sizes = [size + len(document) for size, document in zip(sizes, texts.documents, strict=True)]
    documents = tokenizer.encode(ExpandedTexts(fill_document, sizes), False, document_limit)
    fixed = (_sizes(heads) + _sizes(tails))[query_of]
    limit = _row_limit(processor, fixed + _sizes(documents), options)
    if (fixed >= limit).any():
        raise BadValue(
            f"a query takes {int(fixed.max())} of {limit} tokens and leaves no room for a document; shorten "
            "it or set max_tokens_per_query",
            param="query",
        )
    whole_sizes = _sizes(documents)
    if not score.template[at].endswith("{document}"):
        _keep_suffixes(
            documents, limit - fixed, tokenizer, document_limit, _split_part(score, at, values, texts)
        )
    lengths = np.minimum(_sizes(documents), limit - fixed).astype(np.int32)
    _check_tokens(fixed + lengths, options)
    parts = []
    for query, document, size in zip(query_of.tolist(), documents, lengths, strict=True):
        parts += [heads[query], _truncate(document, size, options.truncation_side), tails[query]]
    num_truncated = int(np.count_nonzero(lengths < whole_sizes))
    return _Rows(np.concatenate(parts), (fixed + lengths).astype(np.int32), None, num_truncated)


def _split_part(
    score: ScoreSpec, at: int, values: dict[str, str], texts: _PairTexts
) -> Callable[[int], tuple[str, str]]:
    """Return a function that splits a pair's document part of the prompt at the end of the document."""
    before, _, after = score.template[at].partition("{document}")

    def split(index: int) -> tuple[str, str]:
        filled = values | {"query": texts.queries[texts.query_of[index]]}
        return _fill(before, filled) + texts.documents[index], _fill(after, filled)

    return split


def _keep_suffixes(
    rows: list[Ints],
    room: Ints,
    tokenizer: Tokenizer,
    limit: RowLimit,
    split: Callable[[int], tuple[str, str]],
) -> None:
    """Truncate rows that are too long at the end of the document, and keep the prompt's text after it."""
    for index in np.flatnonzero(_sizes(rows) > room).tolist():
        begin, end = split(index)
        (suffix,) = tokenizer.encode([end], False)
        if len(suffix) >= room[index]:
            raise BadValue(
                f"the query of document {index} takes {len(suffix)} of {int(room[index])} tokens and leaves "
                "no room for a document; shorten it or set max_tokens_per_query",
                param="query",
            )
        (kept,) = tokenizer.encode([begin], False, limit)
        kept = _truncate(kept, int(room[index]) - len(suffix), limit.side)
        rows[index] = np.concatenate([kept, suffix])


def _instruction(score: ScoreSpec, given: str | None) -> str:
    """The text that replaces {instruction} in the prompt."""
    if given is None:
        return score.instruction
    return score.wording.replace("{instruction}", given) if given else ""


def _max_filled(part: str, values: dict[str, str], query_chars: int) -> int:
    """Characters of a template part with its instruction and query, but without its document."""
    instruction_chars = len(values["instruction"])
    return len(part) + part.count("{instruction}") * instruction_chars + part.count("{query}") * query_chars


def _fill(part: str, values: dict[str, str]) -> str:
    """Fill all placeholders in one pass, so that a text may contain the name of a placeholder."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]], part)


def _row_limit(processor: InputProcessor, lengths: Ints, options: PairOptions) -> int:
    """The length that rows are truncated to. Rejects rows beyond the model's limit if truncation is off."""
    limit = processor.spec.max_model_len
    cut_at = truncation_limit(options.truncate_prompt_tokens, limit)
    if cut_at is None and (lengths > limit).any():
        index, names = int(np.argmax(lengths > limit)), options.names
        raise BadValue(
            f"{names.second} {index} with its {names.first} has {int(lengths[index])} tokens, but the model "
            f"takes at most {limit}; shorten it or set truncate_prompt_tokens to -1",
            param=names.second_param,
        )
    frame = processor.tokenizer.pair_frame.size
    if cut_at is not None and cut_at <= frame:
        raise BadValue(
            f"truncate_prompt_tokens is {cut_at}, but the special tokens alone take {frame}; use at least "
            f"{frame + 1}",
            param="truncate_prompt_tokens",
        )
    return limit if cut_at is None else cut_at


def _sizes(rows: Sequence[Ints]) -> Ints:
    return np.array([len(row) for row in rows], dtype=np.int32)


def _truncate(row: Ints, size: int, side: Side) -> Ints:
    if len(row) <= size:
        return row
    return row[:size] if side == "right" else row[len(row) - size :]
