"""Pairs of queries and documents of which some are or have images, as the rows of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from penstock.errors import BadValue, NotPossible
from penstock.inputs.images.content import content_items, images_of
from penstock.inputs.images.rows import has_images, refuse_images
from penstock.inputs.pair_options import PairOptions
from penstock.inputs.pairs import check_pairs, fill_template, join_pairs, pair_input_options, template_values
from penstock.inputs.processor import InputOptions, InputProcessor
from penstock.types import Content, Ints, PoolingParams, PreparedImage, Request, Task

Item = str | PreparedImage | Content  # one side of a pair
ContentPair = tuple[Item, Item]


def prepare_content_pairs(
    processor: InputProcessor,
    request_id: str,
    pairs: Sequence[ContentPair],
    params: PoolingParams,
    options: PairOptions,
) -> Request:
    """Tokenise the pairs and join them into one request. Blocking."""
    kind = check_pairs(processor, params, options)
    if options.max_tokens_per_query is not None or options.max_tokens_per_doc is not None:
        raise BadValue(
            "max_tokens_per_query and max_tokens_per_doc cut texts; leave them out where there are images",
            param="max_tokens_per_doc",
        )
    if kind == "cross":
        return _joint_request(processor, request_id, pairs, params, options)
    if kind == "list":
        raise NotPossible(f"model {processor.spec.name} ranks lists of texts, not images", param="documents")
    queries, query_of = _distinct([query for query, _ in pairs])
    documents = [document for _, document in pairs]
    query_options, document_options = pair_input_options(processor.spec, options, is_late=kind == "late")
    own = PoolingParams(Task.TOKEN_EMBED) if kind == "late" else params
    params = msgspec.structs.replace(params, normalize=None, late=kind == "late")
    return join_pairs(
        _side(processor, request_id, queries, own, query_options),
        _side(processor, request_id, documents, own, document_options),
        query_of,
        params,
    )


def _distinct(items: Sequence[Item]) -> tuple[list[Item], Ints]:
    """Each distinct item once, and which of them stands in each place."""
    index_of: dict[Any, int] = {}
    distinct: list[Item] = []
    places = []
    for item in items:
        key = item if isinstance(item, str) else id(item)
        if key not in index_of:
            index_of[key] = len(distinct)
            distinct.append(item)
        places.append(index_of[key])
    return distinct, np.array(places, dtype=np.int32)


def _side(
    processor: InputProcessor,
    request_id: str,
    items: Sequence[Item],
    params: PoolingParams,
    options: InputOptions,
) -> Request:
    """Rows as `embed` or `token_embed` makes them."""
    if not has_images(list(items)):
        return processor.prepare(request_id, [str(item) for item in items], params, options)
    if processor.content is not None:
        contents = content_items(items)
        texts = processor.content_texts(contents, options)
        rows = [
            processor.tokenizer.encode([text], processor.content.adds_special_tokens(content))[0]
            for text, content in zip(texts, contents, strict=True)
        ]
        return processor.join_content(request_id, rows, contents, params, options)
    if processor.dual is None:
        raise refuse_images(processor.spec.name)
    texts_only, images = processor.dual.split(items)
    made = processor.prepare(request_id, texts_only, params, options) if texts_only else None
    return processor.join_images(made, images, request_id, params, options)


def _joint_request(
    processor: InputProcessor,
    request_id: str,
    pairs: Sequence[ContentPair],
    params: PoolingParams,
    options: PairOptions,
) -> Request:
    """Each pair as one row, in the model's own prompt."""
    score, content = processor.spec.score, processor.content
    if score is None or not score.template or content is None:
        raise refuse_images(processor.spec.name)
    values = template_values(score, options.instruction)
    rows: list[Ints] = []
    contents: list[Content] = []
    for query, document in pairs:
        sides = content_items([query, document])
        images = [image for side in sides for image in images_of(side)]
        texts = [content.prompts.text(side.parts, inline_only=True) for side in sides]
        filled = values | {"query": texts[0], "document": texts[1]}
        parts = [fill_template(part, filled) for part in score.template]
        opening, closing = processor.tokenizer.frame
        tokens = processor.tokenizer.encode(parts, False)
        rows.append(
            np.concatenate(
                [opening[: None if score.opened else 0], *tokens, closing[: None if score.closed else 0]]
            )
        )
        contents.append(Content(tuple(images)))
    request = Request(
        request_id,
        np.zeros(0, dtype=np.int32),
        np.zeros(0, dtype=np.int32),
        params,
        reuse_prefix=processor.reads_last_token_only(params),
        cache_salt=options.cache_salt,
    )

    def make(tokens: list[Ints]) -> Request:
        lengths = np.array([len(row) for row in tokens], dtype=np.int32)
        if int(lengths.max()) > processor.spec.max_model_len:
            raise BadValue(
                f"a query and a document have {int(lengths.max())} tokens together, but the model takes at "
                f"most {processor.spec.max_model_len}; shorten them or send smaller images",
                param="documents",
            )
        return replace(request, token_ids=np.concatenate(tokens), lengths=lengths)

    return content.join(rows, contents, None, make)
