"""The dialect of vLLM's pooling routes, on texts or messages: any task, classification, the tokenizer."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, cast

import msgspec
import numpy as np
import orjson

from penstock.api.answers import ListAnswer, SparseTerm
from penstock.api.call import Call, Reply
from penstock.api.classify import classifier_task
from penstock.api.conversations import (
    Conversations,
    Message,
    are_conversations,
    conversation_rows,
    is_plain,
    listed_conversations,
    plain_inputs,
)
from penstock.api.embeddings import EmbeddingsAnswer, embedding_items, vectors
from penstock.api.fields import ChunkFields, InputFields, MediaOptions, agreed
from penstock.api.images import message_images
from penstock.api.replies import list_reply, sparse_terms
from penstock.api.routes import RouteSpec, Variant, VariantTable
from penstock.api.run import check_num_rows, run
from penstock.api.sparse import sparse_reply
from penstock.api.state import ServedModel
from penstock.api.tokens import decode_ids
from penstock.errors import BadValue
from penstock.outputs.encoders import encode_rows
from penstock.tasks.multi_task import MultiTask
from penstock.types import Content, Ints, PoolingParams, PreparedImage, Task

_MAX_LOOP_IDS = 1 << 15  # fewer are encoded as JSON on the event loop


class PoolingRequest(ChunkFields, kw_only=True):
    """Body of `POST /pooling`: one or several of the model's tasks; by default its first."""

    task: Task | list[Task] | None = None
    top_k: int | None = None
    min_weight: float | None = None
    mm_processor_kwargs: MediaOptions = None


class ClassifyRequest(InputFields, kw_only=True):
    """Body of `POST /classify`: texts, token ids, or pairs of texts that the model reads together."""

    input: str | list[str | int | list[int | str]]  # type: ignore[assignment]
    use_activation: bool | None = None
    normalize: bool | None = None
    mm_processor_kwargs: MediaOptions = None


class ChatEmbeddingsRequest(ChunkFields, kw_only=True):
    """Body of `POST /v1/embeddings` with a conversation, or a list of them, in place of texts."""

    input: Conversations | None = None  # type: ignore[assignment]
    messages: Conversations | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool = False  # templates write them out
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: MediaOptions = None
    mm_processor_kwargs: MediaOptions = None


class ChatPoolingRequest(ChatEmbeddingsRequest, kw_only=True):
    """Body of `POST /pooling` with a conversation, or a list of them, in place of texts."""

    task: Task | list[Task] | None = None
    top_k: int | None = None
    min_weight: float | None = None


class ChatClassifyRequest(InputFields, kw_only=True):
    """Body of `POST /classify` with a conversation, or a list of them, in place of texts."""

    input: Conversations | None = None  # type: ignore[assignment]
    messages: Conversations | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool = False  # templates write them out
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: MediaOptions = None
    mm_processor_kwargs: MediaOptions = None


PoolingBody = PoolingRequest | ChatPoolingRequest
ChatBody = ChatEmbeddingsRequest | ChatPoolingRequest | ChatClassifyRequest
_PROMPTS = ("prompt_name", "prompt", "instruction", "input_type")


async def chat_embeddings(call: Call, body: ChatEmbeddingsRequest) -> Reply:
    """Embed conversations, rendered by the model's chat template."""
    await _take_conversations(call, body)
    model = call.model(body)
    return await vectors(call, body, model, body.params(Task.EMBED), prefix="embd", items=embedding_items)


async def chat_pooling(call: Call, body: ChatPoolingRequest) -> Reply:
    """Run any task on conversations, rendered by the model's chat template."""
    await _take_conversations(call, body)
    return await pooling(call, body)


async def chat_classify(call: Call, body: ChatClassifyRequest) -> Reply:
    """Classify conversations, rendered by the model's chat template."""
    await _take_conversations(call, body)
    return await classify(call, body)


async def _take_conversations(call: Call, body: ChatBody) -> None:
    """Set the conversations as the inputs of the body: as token ids, or as contents with images."""
    model = call.model(body)
    if (given := next((name for name in _PROMPTS if getattr(body, name) is not None), None)) is not None:
        raise BadValue(f"{given} does not apply to messages; write it into a message", param=given)
    conversations = listed_conversations(body.messages, body.input)
    check_num_rows(call, len(conversations), "messages")
    if is_plain(model, body):
        body.add_special_tokens = True  # no template writes them
        body.input = await plain_inputs(call, model, conversations)
        return
    may_be_long = isinstance(body, ChunkFields) and (body.wants_chunks or model.default_chunking != "none")
    options = body.options()
    limit = None if may_be_long else model.text.processor.row_limit(PoolingParams(), options)
    rows = await conversation_rows(call, model, body, conversations, limit)
    images = Content | PreparedImage
    inputs: list[Any] = [row if isinstance(row, images) else row.tolist() for row in rows]
    body.input = inputs


async def pooling(call: Call, body: PoolingBody) -> Reply:
    """Run any task: a row of values for each text, or a matrix with a row for each token."""
    model = call.model(body)
    if isinstance(body.task, list):
        return await _multi_task(call, body, model, body.task)
    task = body.task or model.spec.default_task or model.spec.tasks[0]
    params = msgspec.structs.replace(body.params(task), top_k=body.top_k)
    if task is Task.SPARSE:
        _refuse_for_sparse(body)
        return await sparse_reply(call, body, params, body.min_weight or 0.0, "pooling", "data")
    if body.min_weight is not None:
        raise BadValue(f"min_weight means nothing to task {task.value!r}", param="min_weight")
    return await vectors(call, body, model, params, prefix="pool", items=_pooling_items)


def _refuse_for_sparse(body: PoolingBody) -> None:
    if body.is_chunked:
        raise BadValue("chunking is for task 'embed'; task 'sparse' has none", param="chunking")
    if body.encoding_format != "float":
        raise BadValue("task 'sparse' answers as float only", param="encoding_format")


def _pooling_items(rows: list[Any]) -> list[dict[str, Any]]:
    return [{"index": i, "object": "pooling", "data": row} for i, row in enumerate(rows)]


async def _multi_task(call: Call, body: PoolingBody, model: ServedModel, tasks: list[Task]) -> Reply:
    """Several outputs of one forward pass: each row's data is an object with a field for each task."""
    if not tasks:
        raise BadValue("task is an empty list; name at least one", param="task")
    if body.is_chunked:
        raise BadValue("chunking is for task 'embed' alone", param="chunking")
    if body.wants_bytes:
        raise BadValue("several tasks answer as float or base64, not as bytes", param="encoding_format")
    first, *more = [_task_params(body, task) for task in tasks]
    task = MultiTask(
        inputs=cast(Any, body.input),
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


def _task_params(body: PoolingBody, task: Task) -> PoolingParams:
    """The parameters of one task, from those fields of the body that apply to it."""
    params = body.params(task)
    if task not in (Task.EMBED, Task.TOKEN_EMBED):
        params = msgspec.structs.replace(params, dimensions=None, dtype=PoolingParams().dtype)
    if task is Task.SPARSE:
        return msgspec.structs.replace(params, top_k=body.top_k, normalize=None)
    return params


async def classify(call: Call, body: ClassifyRequest | ChatClassifyRequest) -> Reply:
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


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /tokenize`: one text as `prompt`, or several as `input`."""

    prompt: str | None = None
    input: str | list[str] | None = None
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /tokenize` with a conversation in place of a text."""

    messages: list[Message]
    model: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # templates write them out
    return_token_strs: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    media_io_kwargs: MediaOptions = None
    mm_processor_kwargs: MediaOptions = None


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
    return await _tokenized(model, rows, body.return_token_strs, one=isinstance(given, str))


async def tokenize_chat(call: Call, body: TokenizeChatRequest) -> Reply:
    """Tokenise a conversation as the model does, after its chat template."""
    model = call.model(body)
    if body.tools:
        body.chat_template_kwargs = {"tools": body.tools, **(body.chat_template_kwargs or {})}
    if message_images(body.messages):
        raise BadValue("messages with images are not tokenised here; send texts", param="messages")
    rows = await conversation_rows(call, model, body, [body.messages])
    return await _tokenized(model, rows, body.return_token_strs, one=True)


async def _tokenized(model: ServedModel, rows: list[Ints], with_strings: bool, *, one: bool) -> Reply:
    make = partial(_tokenize_reply, model, rows, with_strings, one=one)
    num_tokens = sum(map(len, rows))
    return make() if num_tokens <= _MAX_LOOP_IDS else await model.text.batcher.call(make, num_tokens)


def _tokenize_reply(model: ServedModel, rows: list[Ints], with_strings: bool, *, one: bool) -> Reply:
    answers = []
    for row in rows:
        tokens = row if len(row) <= _MAX_LOOP_IDS else orjson.Fragment(_long_json(row))
        answer: dict[str, Any] = {
            "count": len(row),
            "max_model_len": model.spec.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        if with_strings:
            ids, inverse = np.unique(row, return_inverse=True)
            strings = model.text.tokenizer.token_strings(ids.tolist())
            answer["token_strs"] = [strings[index] for index in inverse.tolist()]
        answers.append(answer)
    content = answers[0] if one else {"data": answers, "count": sum(len(row) for row in rows)}
    return Reply(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


def _long_json(row: Ints) -> bytes:
    """Encode a long list of token ids in parts, so that other threads wait for one part at most."""
    parts = np.array_split(row, -(-len(row) // _MAX_LOOP_IDS))
    return b"[%b]" % b",".join(orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] for part in parts)


async def detokenize(call: Call, body: DetokenizeRequest) -> Reply:
    """Decode token ids to text."""
    model = call.model(body)
    is_one = not (body.tokens and isinstance(body.tokens[0], list))
    rows: list[Any] = [body.tokens] if is_one else body.tokens
    check_num_rows(call, len(rows), "tokens")
    texts = await decode_ids(model, rows, skip_special_tokens=body.skip_special_tokens)
    return Reply(
        orjson.dumps({"prompt": texts[0]} if is_one else {"data": [{"prompt": text} for text in texts]})
    )


PooledRow = str | list[float | list[float] | SparseTerm]


class PoolingEntry(msgspec.Struct, kw_only=True):
    """The values of one input: a row of numbers, a row for each token, terms of a sparse vector, one of these
    under the name of each task, or base64."""

    index: int
    object: Literal["pooling"]
    data: PooledRow | dict[str, PooledRow]


class PoolingAnswer(ListAnswer, kw_only=True):
    data: list[PoolingEntry]


class ClassifyEntry(msgspec.Struct, kw_only=True):
    index: int
    label: str  # the likeliest
    probs: list[float]  # of all labels; raw scores with use_activation: false
    num_classes: int


class ClassifyAnswer(ListAnswer, kw_only=True):
    data: list[ClassifyEntry]


class TokenizedText(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The tokens of one text, or under `data` those of several."""

    count: int
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    tokens: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_strs: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    data: list[TokenizedText] | msgspec.UnsetType = msgspec.UNSET


class DetokenizedText(msgspec.Struct, kw_only=True):
    prompt: str


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """One text, or several under `data`."""

    prompt: str | msgspec.UnsetType = msgspec.UNSET
    data: list[DetokenizedText] | msgspec.UnsetType = msgspec.UNSET


_TALK = {"messages": [{"role": "user", "content": "What is a penstock?"}]}
ROUTES = (
    RouteSpec(
        "/pooling",
        PoolingRequest,
        pooling,
        "vLLM",
        PoolingAnswer,
        example={"input": ["Water finds its level."]},
    ),
    RouteSpec(
        "/classify", ClassifyRequest, classify, "vLLM", ClassifyAnswer, example={"input": ["I love this."]}
    ),
    RouteSpec(
        "/tokenize",
        TokenizeRequest,
        tokenize,
        "vLLM",
        TokenizeAnswer,
        example={"prompt": "Water finds its level."},
    ),
    RouteSpec(
        "/detokenize",
        DetokenizeRequest,
        detokenize,
        "vLLM",
        DetokenizeAnswer,
        example={"tokens": [1, 2, 3]},
    ),
)
_MARKER = ("messages",)
VARIANTS: VariantTable = (
    (
        "/v1/embeddings",
        Variant(
            _MARKER,
            ChatEmbeddingsRequest,
            chat_embeddings,
            "vLLM",
            answer=EmbeddingsAnswer,
            example=_TALK,
            claims=are_conversations,
        ),
    ),
    (
        "/pooling",
        Variant(
            _MARKER,
            ChatPoolingRequest,
            chat_pooling,
            "vLLM",
            answer=PoolingAnswer,
            example=_TALK,
            claims=are_conversations,
        ),
    ),
    (
        "/classify",
        Variant(
            _MARKER,
            ChatClassifyRequest,
            chat_classify,
            "vLLM",
            answer=ClassifyAnswer,
            example=_TALK,
            claims=are_conversations,
        ),
    ),
    (
        "/tokenize",
        Variant(
            _MARKER,
            TokenizeChatRequest,
            tokenize_chat,
            "vLLM",
            answer=TokenizedText,
            example=_TALK,
            claims=are_conversations,
        ),
    ),
)
