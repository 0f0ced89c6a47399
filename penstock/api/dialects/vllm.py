"""The dialect of vLLM's pooling routes: any task, classification, scores, rankings, and the tokenizer."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
import numpy as np
import orjson

from penstock.api.classify import classifier_task
from penstock.api.embeddings import vectors
from penstock.api.endpoint import Call, Reply
from penstock.api.fields import ChunkFields, InputFields, agreed
from penstock.api.ranking import (
    RankFields,
    RerankRequest,
    Side,
    check_query,
    document_texts,
    listed,
    ranked_rows,
    returned_documents,
    run_pairs,
    run_ranking,
    search_units,
)
from penstock.api.replies import json_reply, list_reply, record_phases, sparse_terms
from penstock.api.routes import RouteSpec
from penstock.api.run import check_num_rows, run
from penstock.api.sparse import sparse_reply
from penstock.api.state import ServedModel
from penstock.errors import BadValue, BodyTooLarge
from penstock.inputs.pair_options import make_pairs
from penstock.outputs.encoders import encode_rows
from penstock.tasks.multi_task import MultiTask
from penstock.types import Ints, PoolingParams, Task

MAX_DETOKENIZED_IDS = 1 << 20
MAX_INLINE_IDS = 1024  # fewer are decoded on the event loop
_MAX_LOOP_IDS = 1 << 15  # fewer are encoded as JSON on the event loop


class PoolingRequest(ChunkFields, kw_only=True):
    """Body of `POST /pooling`: one or several of the model's tasks; by default its first."""

    task: Task | list[Task] | None = None
    top_k: int | None = None
    min_weight: float | None = None


class ClassifyRequest(InputFields, kw_only=True):
    """Body of `POST /classify`: texts, token ids, or pairs of texts that the model reads together."""

    input: str | list[str | int | list[int | str]]  # type: ignore[assignment]
    use_activation: bool | None = None
    normalize: bool | None = None


async def pooling(call: Call, body: PoolingRequest) -> Reply:
    """Run any task: a row of values for each text, or a matrix with a row for each token."""
    model = call.model(body)
    if isinstance(body.task, list):
        return await _multi_task(call, body, model, body.task)
    task = body.task or model.spec.tasks[0]
    params = msgspec.structs.replace(body.params(task), top_k=body.top_k)
    if task is Task.SPARSE:
        _refuse_for_sparse(body)
        return await sparse_reply(call, body, params, body.min_weight or 0.0, "pooling", "data")
    if body.min_weight is not None:
        raise BadValue(f"min_weight means nothing to task {task.value!r}", param="min_weight")
    return await vectors(call, body, model, params, prefix="pool", items=_pooling_items)


def _refuse_for_sparse(body: PoolingRequest) -> None:
    if body.is_chunked:
        raise BadValue("chunking is for task 'embed'; task 'sparse' has none", param="chunking")
    if body.encoding_format != "float":
        raise BadValue("task 'sparse' answers as float only", param="encoding_format")


def _pooling_items(rows: list[Any]) -> list[dict[str, Any]]:
    return [{"index": i, "object": "pooling", "data": row} for i, row in enumerate(rows)]


async def _multi_task(call: Call, body: PoolingRequest, model: ServedModel, tasks: list[Task]) -> Reply:
    """Several outputs of one forward pass: each row's data is an object with a field for each task."""
    if not tasks:
        raise BadValue("task is an empty list; name at least one", param="task")
    if body.is_chunked:
        raise BadValue("chunking is for task 'embed' alone", param="chunking")
    if body.encoding_format == "bytes":
        raise BadValue("several tasks answer as float or base64, not as bytes", param="encoding_format")
    first, *more = [_task_params(body, task) for task in tasks]
    task = MultiTask(
        inputs=body.input,
        params=first,
        options=body.options(),
        more=tuple(more),
        min_weight=body.min_weight or 0.0,
    )
    result = await run(call, body, model, task)

    def data() -> list[dict[str, Any]]:
        columns = [
            sparse_terms(model.text, column)
            if params.task is Task.SPARSE
            else encode_rows(list(column), body.encoding_format, params.dtype, body.endianness)
            for params, column in zip(task.all_params, result.value, strict=True)
        ]
        names = [each.value for each in tasks]
        return [
            {"index": i, "object": "pooling", "data": dict(zip(names, row, strict=True))}
            for i, row in enumerate(zip(*columns, strict=True))
        ]

    return await list_reply(call, body, result, "pool", data)


def _task_params(body: PoolingRequest, task: Task) -> PoolingParams:
    """The body's fields as far as the task has them."""
    params = body.params(task)
    if task not in (Task.EMBED, Task.TOKEN_EMBED):
        params = msgspec.structs.replace(params, dimensions=None, dtype=PoolingParams().dtype)
    if task is Task.SPARSE:
        return msgspec.structs.replace(params, top_k=body.top_k, normalize=None)
    return params


async def classify(call: Call, body: ClassifyRequest) -> Reply:
    """Classify each text or pair of texts: its most likely label, and the probabilities of all labels."""
    model = call.model(body)
    params = PoolingParams(Task.CLASSIFY, normalize=agreed(body.normalize, body.use_activation))
    result = await run(call, body, model, classifier_task(body.input, params, body.options()))

    def data() -> list[dict[str, Any]]:
        labels, values = model.spec.labels, result.value
        best = values.argmax(axis=1).tolist()
        return [
            {"index": i, "label": labels[best[i]], "probs": row, "num_classes": len(labels)}
            for i, row in enumerate(values)
        ]

    return await list_reply(call, body, result, "classify", data)


class ScoreRequest(RankFields, kw_only=True):
    """Body of `POST /score`: two sides under any of their names, one to one, one to many, or many to many."""

    queries: Side | None = None
    documents: Side | None = None
    items: Side | None = None
    text_1: Side | None = None
    text_2: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None

    def sides(self) -> tuple[Side, Side]:
        kinds = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
        given = [name for name in dict.fromkeys(sum(kinds, ())) if getattr(self, name) is not None]
        for first, second in kinds:
            if given == [first, second]:
                return getattr(self, first), getattr(self, second)
        known = ", ".join(f"{first} and {second}" for first, second in kinds)
        have = f"not {' and '.join(given)}" if given else "and no other"
        raise BadValue(f"give one of {known}, {have}", param=given[0] if given else "queries")


async def score(call: Call, body: ScoreRequest) -> Reply:
    """Score how well each document answers its query."""
    first, second = (listed(side) for side in body.sides())
    check_num_rows(call, max(len(first), len(second)), "documents")
    queries, documents = document_texts(first, "queries"), document_texts(second, "documents")
    for index, query in enumerate(queries):
        check_query(query, f"query {index}", "queries")
    pairs = make_pairs(queries, documents)
    result = await run_pairs(call, body, pairs, body.options(), activate=body.use_activation)

    def data() -> list[dict[str, Any]]:
        return [
            {"index": index, "object": "score", "score": value} for index, value in enumerate(result.value)
        ]

    return await list_reply(call, body, result, "score", data)


async def rerank(call: Call, body: RerankRequest) -> Reply:
    """Rank documents from best to worst."""
    documents = returned_documents(body)
    result = await run_ranking(call, body)
    began = time.monotonic()
    head = result.head(body, "rerank")
    meta = {"billed_units": {"search_units": search_units(body)}}
    reply = json_reply(
        {**head, "results": ranked_rows(body, result.value, documents), "usage": result.usage, "meta": meta}
    )
    record_phases(call, began)
    return reply


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /tokenize`: one text as `prompt`, or several as `input`."""

    prompt: str | None = None
    input: str | list[str] | None = None
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /detokenize`: ids of one text, or of several."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool = False


async def tokenize(call: Call, body: TokenizeRequest) -> Reply:
    """Tokenise texts as the model does."""
    model = call.model(body)
    if (body.prompt is None) == (body.input is None):
        raise BadValue("give either prompt or input", param="prompt")
    given = body.prompt if body.prompt is not None else body.input
    texts = [given] if isinstance(given, str) else list(given or [])
    check_num_rows(call, len(texts))
    if not texts:
        raise BadValue("input is empty; give at least one text", param="input")
    rows = await model.text.batcher.encode(texts, body.add_special_tokens)
    make = partial(_tokenize_reply, model, body, rows, one=isinstance(given, str))
    num_tokens = sum(map(len, rows))
    return make() if num_tokens <= _MAX_LOOP_IDS else await model.text.batcher.call(make, num_tokens)


def _tokenize_reply(model: ServedModel, body: TokenizeRequest, rows: list[Ints], *, one: bool) -> Reply:
    answers = []
    for row in rows:
        tokens = row if len(row) <= _MAX_LOOP_IDS else orjson.Fragment(_long_json(row))
        answer: dict[str, Any] = {
            "count": len(row),
            "max_model_len": model.spec.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            ids, places = np.unique(row, return_inverse=True)
            strings = model.text.tokenizer.token_strings(ids.tolist())
            answer["token_strs"] = [strings[place] for place in places.tolist()]
        answers.append(answer)
    content = answers[0] if one else {"data": answers, "count": sum(len(row) for row in rows)}
    return Reply(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


def _long_json(row: Ints) -> bytes:
    """A long list of token ids, encoded in parts: other threads wait for each of them."""
    parts = np.array_split(row, -(-len(row) // _MAX_LOOP_IDS))
    return b"[%b]" % b",".join(orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] for part in parts)


async def detokenize(call: Call, body: DetokenizeRequest) -> Reply:
    """Decode token ids to text."""
    model = call.model(body)
    is_one = not (body.tokens and isinstance(body.tokens[0], list))
    rows: list[Any] = [body.tokens] if is_one else body.tokens
    check_num_rows(call, len(rows), "tokens")
    num_ids = sum(len(row) for row in rows if isinstance(row, list))
    if num_ids > MAX_DETOKENIZED_IDS:
        raise BodyTooLarge(
            f"tokens has {num_ids} ids; one request takes at most {MAX_DETOKENIZED_IDS}", param="tokens"
        )
    decode = partial(_decoded, model, rows, body.skip_special_tokens)
    texts = decode() if num_ids <= MAX_INLINE_IDS else await model.text.batcher.call(decode, num_ids)
    return Reply(
        orjson.dumps({"prompt": texts[0]} if is_one else {"data": [{"prompt": text} for text in texts]})
    )


def _decoded(model: ServedModel, rows: list[Any], skip_special_tokens: bool) -> list[str]:
    for index, row in enumerate(rows):
        if not isinstance(row, list) or not set(map(type, row)) <= {int}:
            raise BadValue(f"tokens {index} is not a list of token ids", param="tokens")
        if row and (min(row) < 0 or max(row) >= model.text.tokenizer.vocab_size):
            raise BadValue(f"tokens {index} holds an id that the tokenizer does not know", param="tokens")
    return model.text.tokenizer.decode_rows(rows, skip_special_tokens)


ROUTES = (
    RouteSpec("/pooling", PoolingRequest, pooling, "vLLM"),
    RouteSpec("/classify", ClassifyRequest, classify, "vLLM"),
    RouteSpec("/score", ScoreRequest, score, "vLLM"),
    RouteSpec("/v1/score", ScoreRequest, score, "vLLM"),
    RouteSpec("/rerank", RerankRequest, rerank, "vLLM"),
    RouteSpec("/v1/rerank", RerankRequest, rerank, "vLLM"),
    RouteSpec("/tokenize", TokenizeRequest, tokenize, "vLLM"),
    RouteSpec("/detokenize", DetokenizeRequest, detokenize, "vLLM"),
)
