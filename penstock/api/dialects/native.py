"""Penstock's own routes: any task, classification, sparse weights, and the tokenizer."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import orjson

from penstock.api.endpoint import Call, Reply
from penstock.api.fields import ChunkFields, InputFields, agreed
from penstock.api.longtext import answer_chunked, run_chunked
from penstock.api.multi_task import answer_several
from penstock.api.work import check_rows, head_of, json_reply, note_phases, run_task, sparse_terms
from penstock.errors import BadValue
from penstock.inputs.multi_task import refuse_generation
from penstock.outputs.sparse import check_min_weight
from penstock.types import PoolingParams, Task


class PoolingRequest(ChunkFields, kw_only=True):
    """Body of `POST /pooling`: any task that the model has, or several; its first if none is named."""

    task: Task | list[Task] | None = None
    top_k: int | None = None
    min_weight: float | None = None


class SparseRequest(InputFields, kw_only=True):
    """Body of `POST /v1/sparse`."""

    top_k: int | None = None
    min_weight: float = 0.0


class ClassifyRequest(InputFields, kw_only=True):
    """Body of `POST /classify`."""

    use_activation: bool | None = None
    normalize: bool | None = None


async def pooling(call: Call, body: PoolingRequest) -> Reply:
    """The values of any task: a row for each text, or a matrix with a row for each token."""
    if isinstance(body.task, list):
        if body.min_weight is not None:
            check_min_weight(body.min_weight)
        return await answer_several(call, body, body.task, body.top_k, body.min_weight or 0.0)
    task = body.task or call.state.model(body.model).spec.tasks[0]
    params = msgspec.structs.replace(body.params(task), top_k=body.top_k)
    refuse_generation(task)
    if task is Task.SPARSE:
        if body.chunking != "none":
            raise BadValue("chunking is for task 'embed'; task 'sparse' has none", param="chunking")
        if body.encoding_format != "float":
            raise BadValue("task 'sparse' answers as float only", param="encoding_format")
        return await _sparse_reply(call, body, params, body.min_weight or 0.0, "pooling", "data")
    if task is Task.SCORE:
        raise BadValue("task 'score' is of pairs; use /score or /rerank", param="task")
    if body.min_weight is not None:
        raise BadValue(f"min_weight means nothing to task {task.value!r}", param="min_weight")
    result = await run_chunked(call, body, params)
    return answer_chunked(call, body, result, prefix="pool", item=_pooling_items)


def _pooling_items(rows: list[Any]) -> list[dict[str, Any]]:
    return [{"index": i, "object": "pooling", "data": row} for i, row in enumerate(rows)]


async def sparse(call: Call, body: SparseRequest) -> Reply:
    """The tokens that matter to each text and their weights, heaviest first."""
    params = PoolingParams(Task.SPARSE, top_k=body.top_k)
    return await _sparse_reply(call, body, params, body.min_weight, "sparse", "sparse")


async def _sparse_reply(
    call: Call, body: InputFields, params: PoolingParams, min_weight: float, kind: str, field: str
) -> Reply:
    """`kind` names the rows' objects, `field` where their terms stand."""
    check_min_weight(min_weight)
    result = await run_task(call, body, params)
    began = time.monotonic()
    rows = sparse_terms(result, params.top_k, min_weight)
    data = [{"object": kind, "index": index, field: terms} for index, terms in enumerate(rows)]
    head = head_of(body, result, "pool" if kind == "pooling" else kind)
    reply = json_reply({"object": "list", **head, "data": data, "usage": result.usage})
    note_phases(call, began)
    return reply


async def classify(call: Call, body: ClassifyRequest) -> Reply:
    """The likeliest label of each text, and the probabilities of all."""
    params = PoolingParams(Task.CLASSIFY, normalize=agreed(body.normalize, body.use_activation))
    result = await run_task(call, body, params)
    began = time.monotonic()
    labels, values = result.model.spec.labels, result.answer.values
    best = values.argmax(axis=1).tolist()
    data = [
        {"index": i, "label": labels[best[i]], "probs": row, "num_classes": len(labels)}
        for i, row in enumerate(values)
    ]
    head = head_of(body, result, "classify")
    reply = json_reply({"object": "list", **head, "data": data, "usage": result.usage})
    note_phases(call, began)
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
    """The token ids that the model would see."""
    model = call.state.model(body.model)
    if (body.prompt is None) == (body.input is None):
        raise BadValue("give either prompt or input", param="prompt")
    given = body.prompt if body.prompt is not None else body.input
    texts = [given] if isinstance(given, str) else list(given or [])
    check_rows(call, texts)
    if not texts:
        raise BadValue("input is empty; give at least one text", param="input")
    rows = await model.tokenizer.encode(texts, body.add_special_tokens)
    tokenizer = model.tokenizer.tokenizer
    answers = []
    for row in rows:
        answer = {"count": len(row), "max_model_len": model.spec.max_model_len, "tokens": row}
        if body.return_token_strs:
            answer["token_strs"] = tokenizer.token_strings(row.tolist())
        answers.append(answer)
    one = isinstance(given, str)
    content = answers[0] if one else {"data": answers, "count": sum(len(row) for row in rows)}
    return Reply(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


async def detokenize(call: Call, body: DetokenizeRequest) -> Reply:
    """The text that token ids stand for."""
    model = call.state.model(body.model)
    rows = body.tokens if body.tokens and isinstance(body.tokens[0], list) else [body.tokens]
    checked: list[list[int]] = []
    for index, row in enumerate(rows):
        if not isinstance(row, list) or not all(isinstance(i, int) for i in row):
            raise BadValue(f"tokens {index} is not a list of token ids", param="tokens")
        ids = [int(i) for i in row if isinstance(i, int)]
        if any(not 0 <= i < model.tokenizer.tokenizer.vocab_size for i in ids):
            raise BadValue(f"tokens {index} holds an id that the tokenizer does not know", param="tokens")
        checked.append(ids)
    texts = [model.tokenizer.tokenizer.decode(ids, body.skip_special_tokens) for ids in checked]
    content = (
        {"prompt": texts[0]} if rows[0] is body.tokens else {"data": [{"prompt": text} for text in texts]}
    )
    return Reply(orjson.dumps(content))
