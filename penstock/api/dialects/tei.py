"""The dialect of Text Embeddings Inference."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Annotated, Any

import msgspec
import orjson

from penstock import __version__
from penstock.api import pipelines
from penstock.api.call import Call, Reply
from penstock.api.fields import User
from penstock.api.pipelines import (
    TEI_ERRORS,
    Direction,
    PredictInputs,
    TextInputs,
    TextOptions,
    check_not_empty,
    joined,
)
from penstock.api.replies import json_reply
from penstock.api.routes import RouteSpec, Variant, VariantTable
from penstock.api.run import check_num_rows
from penstock.api.state import ServedModel
from penstock.api.tokens import decode_ids
from penstock.config import available_cpus
from penstock.errors import EmptyInput, EngineUnavailable, MalformedBody
from penstock.inputs.processor import InputOptions
from penstock.inputs.tokenizer import EncodedText
from penstock.types import Task

_MAX_LOOP_TOKENS = 1 << 12  # up to this many, the answer is made on the event loop
_COMMIT = re.compile(r"[0-9a-f]{40}")


class TeiFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Scheduling fields, which TEI does not have. They mean the same as on every other route."""

    model: str | None = None
    adapter: str | None = None
    priority: int = 0
    timeout: float | None = None
    request_id: str | None = None
    user: User = None


class TeiTruncation(TeiFields, kw_only=True):
    truncate: bool | None = None
    truncation_direction: Direction = "right"

    def options(self) -> TextOptions:
        return TextOptions(truncate=self.truncate, direction=self.truncation_direction)


class TeiTexts(TeiTruncation, kw_only=True):
    """Texts to embed, and the prompt before them."""

    inputs: TextInputs
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    input_type: str | None = None

    def options(self) -> TextOptions:
        return TextOptions(
            truncate=self.truncate,
            direction=self.truncation_direction,
            prompt_name=self.prompt_name,
            prompt=self.prompt,
            instruction=self.instruction,
            input_type=self.input_type,
        )


class TeiEmbedRequest(TeiTexts, kw_only=True):
    """Body of `POST /embed`."""

    normalize: bool = True
    dimensions: int | None = None


class TeiEmbedAllRequest(TeiTexts, kw_only=True):
    """Body of `POST /embed_all`."""


class TeiEmbedSparseRequest(TeiTexts, kw_only=True):
    """Body of `POST /embed_sparse`."""


class TeiRerankRequest(TeiTruncation, kw_only=True):
    """Body of `POST /rerank` in TEI's dialect, recognised by its field `texts`."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False


class PredictRequest(TeiTruncation, kw_only=True):
    """Body of `POST /predict`: a text, a pair of texts, or a list of these."""

    inputs: PredictInputs
    raw_scores: bool = False


class SimilarityInput(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None


class SimilarityRequest(TeiFields, kw_only=True):
    """Body of `POST /similarity`."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class TeiTokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /tokenize` in TEI's dialect, recognised by its field `inputs`."""

    inputs: str | list[str]
    model: str | None = None
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /decode`: the ids of one text, or of several."""

    ids: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool = True


class VertexRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /vertex`: bodies of `/embed`, `/embed_sparse`, `/predict` or `/rerank`."""

    instances: list[dict[str, Any]]
    model: str | None = None


Number = Annotated[float, msgspec.Meta(description="a number of 32 bits")]
Vectors = list[list[Number]]


class SparseValue(msgspec.Struct, kw_only=True):
    index: int
    value: Number


class Prediction(msgspec.Struct, kw_only=True):
    score: Number
    label: str


class Rank(msgspec.Struct, kw_only=True):
    index: int
    text: str | msgspec.UnsetType = msgspec.UNSET  # with return_text
    score: Number


class SimpleToken(msgspec.Struct, kw_only=True):
    id: int
    text: str
    special: bool
    start: int | None  # characters within the prompt and the text; None for special tokens
    stop: int | None


class VertexAnswer(msgspec.Struct, kw_only=True):
    predictions: list[Any]


class EmbeddingModel(msgspec.Struct, kw_only=True):
    pooling: str


class ClassifierModel(msgspec.Struct, kw_only=True):
    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelType(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of these."""

    embedding: EmbeddingModel | msgspec.UnsetType = msgspec.UNSET
    classifier: ClassifierModel | msgspec.UnsetType = msgspec.UNSET
    reranker: ClassifierModel | msgspec.UnsetType = msgspec.UNSET


class Info(msgspec.Struct, kw_only=True):
    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: ModelType
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None = None
    docker_label: str | None = None


async def tei_embed(call: Call, body: TeiEmbedRequest) -> Reply:
    """Embed texts or token ids: a list of vectors."""
    model = call.model(body)  # before `body.options()`: the name may choose a prompt
    return await pipelines.embed(
        call, body, model, body.inputs, body.options(), normalize=body.normalize, dimensions=body.dimensions
    )


async def embed_all(call: Call, body: TeiEmbedAllRequest) -> Reply:
    """Give the model's state for each token, before pooling."""
    model = call.model(body)
    return await pipelines.embed_all(call, body, model, body.inputs, body.options())


async def embed_sparse(call: Call, body: TeiEmbedSparseRequest) -> Reply:
    """Weigh the terms of each text, by token id."""
    model = call.model(body)
    return await pipelines.embed_sparse(call, body, model, body.inputs, body.options())


async def tei_rerank(call: Call, body: TeiRerankRequest) -> Reply:
    """Rank texts from best to worst, in TEI's shape."""
    return await pipelines.rank(
        call,
        body,
        body.query,
        body.texts,
        body.options(),
        raw_scores=body.raw_scores,
        return_text=body.return_text,
    )


async def predict(call: Call, body: PredictRequest) -> Reply:
    """Classify a text, a pair of texts or several of these: all labels with their scores, best first."""
    return await pipelines.predict_reply(call, body, body.inputs, body.options(), raw_scores=body.raw_scores)


async def similarity(call: Call, body: SimilarityRequest) -> Reply:
    """Compare a sentence with others by the vectors of an embedding model."""
    given, parameters = body.inputs, body.parameters or SimilarityParameters()
    options = TextOptions(
        truncate=parameters.truncate,
        direction=parameters.truncation_direction,
        prompt_name=parameters.prompt_name,
    )
    return await pipelines.similarity(call, body, given.source_sentence, given.sentences, options)


async def tei_tokenize(call: Call, body: TeiTokenizeRequest) -> Reply:
    """Tokenise texts, with the characters that each token stands for."""
    check_not_empty(body.inputs)  # type: ignore[arg-type]
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    check_num_rows(call, len(texts), "inputs")
    model = call.model(body)
    options = InputOptions(prompt_name=body.prompt_name, add_special_tokens=body.add_special_tokens)
    prompted = list(model.text.processor.with_prompt(texts, options))
    rows = await model.text.batcher.encode_with_offsets(prompted, body.add_special_tokens)
    make = partial(_token_rows, model, prompted, rows)
    num_tokens = sum(len(row.ids) for row in rows)
    if num_tokens <= _MAX_LOOP_TOKENS:
        return Reply(make())
    return Reply(await model.text.batcher.call(make, num_tokens))


def _token_rows(model: ServedModel, texts: list[str], rows: list[EncodedText]) -> bytes:
    out = []
    for text, row in zip(texts, rows, strict=True):
        names = model.text.tokenizer.token_strings(row.ids.tolist())
        out.append(
            [
                _token(token_id, name, text, *place)
                for token_id, name, place in zip(
                    row.ids.tolist(),
                    names,
                    zip(row.words.tolist(), *row.offsets.T.tolist(), strict=True),
                    strict=True,
                )
            ]
        )
    return orjson.dumps(out)


def _token(token_id: int, name: str | None, text: str, word: int, start: int, stop: int) -> dict[str, Any]:
    is_special = word < 0
    return {
        "id": token_id,
        "text": (name or "") if is_special else text[start:stop],
        "special": is_special,
        "start": None if is_special else start,
        "stop": None if is_special else stop,
    }


async def decode(call: Call, body: DecodeRequest) -> Reply:
    """Decode token ids to texts."""
    if not body.ids or not all(row for row in body.ids if isinstance(row, list)):
        raise EmptyInput("ids is empty; give at least one token id for each text", param="ids")
    kinds = set(map(type, body.ids))
    if len(kinds) > 1:
        raise MalformedBody("ids has both ids and lists of ids; give one kind", param="ids")
    rows: list[Any] = [body.ids] if kinds == {int} else body.ids
    check_num_rows(call, len(rows), "ids")
    model = call.model(body)
    texts = await decode_ids(model, rows, name="ids", skip_special_tokens=body.skip_special_tokens)
    return json_reply(texts)


async def vertex(call: Call, body: VertexRequest) -> Reply:
    """Run instances, each a body of the route that fits it and the model."""
    if not body.instances:
        raise EmptyInput("instances is empty; give at least one", param="instances")
    check_num_rows(call, len(body.instances), "instances")
    model = call.model(body)
    work = [asyncio.ensure_future(_instance(call, model, instance)) for instance in body.instances]
    try:
        replies = await asyncio.gather(*work)
    finally:
        for each in work:
            each.cancel()
    return Reply(joined([reply.body for reply in replies], b'{"predictions":[', b"]}"))


async def _instance(call: Call, model: ServedModel, instance: dict[str, Any]) -> Reply:
    kind, handler = _instance_route(model, instance)
    try:
        given = msgspec.convert(instance, kind)
    except msgspec.ValidationError as error:
        raise MalformedBody(f"an instance is no {kind.__name__}: {error}", param="instances") from None
    if getattr(given, "model", None) is None:
        given.model = model.full_name
    reply: Reply = await handler(call, given)
    return reply


def _instance_route(model: ServedModel, instance: dict[str, Any]) -> tuple[type[Any], Any]:
    if "texts" in instance:
        return TeiRerankRequest, tei_rerank
    first = model.spec.tasks[0]
    if first is Task.CLASSIFY:
        return PredictRequest, predict
    return (TeiEmbedSparseRequest, embed_sparse) if first is Task.SPARSE else (TeiEmbedRequest, tei_embed)


async def info(call: Call) -> Reply:
    """Describe the model and the limits of this server."""
    model = call.find(None)
    if not model.engine.ready:
        raise EngineUnavailable(model.engine.unavailable_reason)
    settings = getattr(model.engine, "engine_settings", {})
    spec, config = model.spec, call.state.config
    commit = next((part for part in reversed(spec.root_path.parts) if _COMMIT.fullmatch(part)), None)
    answer = Info(
        model_id=spec.name,
        model_sha=commit,
        model_dtype=settings.get("dtype", "float32"),
        served_model_name=spec.name,
        model_type=_model_type(model),
        max_concurrent_requests=config.max_concurrent_requests,
        max_input_length=spec.max_model_len,
        max_batch_tokens=settings.get("max_num_batched_tokens", spec.max_model_len),
        max_batch_requests=settings.get("max_num_seqs"),
        max_client_batch_size=config.max_rows,
        auto_truncate=model.auto_truncate is not False,
        tokenization_workers=available_cpus(),
        version=__version__,
    )
    return Reply(msgspec.json.encode(answer))


def _model_type(model: ServedModel) -> ModelType:
    spec = model.spec
    if Task.CLASSIFY in spec.tasks:
        labels = {str(index): label for index, label in enumerate(spec.labels)}
        known = ClassifierModel(id2label=labels, label2id={label: int(at) for at, label in labels.items()})
        return ModelType(reranker=known) if len(labels) == 1 else ModelType(classifier=known)
    if spec.tasks[0] is Task.SPARSE:
        return ModelType(embedding=EmbeddingModel(pooling="splade"))
    names = {"last": "last_token"}
    return ModelType(
        embedding=EmbeddingModel(pooling="+".join(names.get(each, each) for each in spec.pooling.methods))
    )


_TEXTS: dict[str, Any] = {"inputs": ["Water finds its level."]}
_PAIR = {"query": "What drives a turbine?", "texts": ["Water does.", "A letter came."]}
ROUTES = (
    RouteSpec("/embed", TeiEmbedRequest, tei_embed, "TEI", Vectors, TEI_ERRORS, _TEXTS),
    RouteSpec("/embed_all", TeiEmbedAllRequest, embed_all, "TEI", list[Vectors], TEI_ERRORS, _TEXTS),
    RouteSpec(
        "/embed_sparse",
        TeiEmbedSparseRequest,
        embed_sparse,
        "TEI",
        list[list[SparseValue]],
        TEI_ERRORS,
        _TEXTS,
    ),
    RouteSpec(
        "/predict",
        PredictRequest,
        predict,
        "TEI",
        list[Prediction | list[Prediction]],
        TEI_ERRORS,
        {"inputs": "Water finds its level."},
    ),
    RouteSpec(
        "/similarity",
        SimilarityRequest,
        similarity,
        "TEI",
        list[Number],
        TEI_ERRORS,
        {"inputs": {"source_sentence": "Water", "sentences": ["A river", "A letter"]}},
    ),
    RouteSpec("/decode", DecodeRequest, decode, "TEI", list[str], TEI_ERRORS, {"ids": [5, 6, 7]}),
    RouteSpec("/vertex", VertexRequest, vertex, "TEI", VertexAnswer, TEI_ERRORS, {"instances": [_TEXTS]}),
    RouteSpec("/info", None, info, "TEI", Info, TEI_ERRORS),
)
VARIANTS: VariantTable = (
    (
        "/rerank",
        Variant(("texts",), TeiRerankRequest, tei_rerank, "TEI", TEI_ERRORS, list[Rank], _PAIR),
    ),
    (
        "/tokenize",
        Variant(
            ("inputs",), TeiTokenizeRequest, tei_tokenize, "TEI", TEI_ERRORS, list[list[SimpleToken]], _TEXTS
        ),
    ),
)
