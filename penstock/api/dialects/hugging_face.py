"""The dialect of the Hugging Face Inference API, as `huggingface_hub.InferenceClient` speaks it.

The client posts to the root path, where TEI has a route as well. So one type of body serves both: the model's
task and the fields of the body decide which task runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.api import pipelines
from penstock.api.call import Call, Reply, Streamed
from penstock.api.decoding import refused_fields
from penstock.api.fields import NoEffect, Refused, User
from penstock.api.images import image_source, with_images
from penstock.api.pipelines import (
    INFERENCE_ERRORS,
    Direction,
    TextOptions,
    label_rows,
    labels_reply,
    num_chars,
)
from penstock.api.replies import json_reply, record_phases
from penstock.api.routes import RouteSpec
from penstock.api.run import Result, run
from penstock.api.state import ServedModel
from penstock.api.text_generation import GeneratedText, GenerateParameters, generate_text
from penstock.errors import BadValue, MalformedBody, NotPossible
from penstock.inputs.long_texts import MAX_REQUEST_TOKENS
from penstock.inputs.offsets import require_texts
from penstock.inputs.tokenizer import EncodedText
from penstock.outputs.entities import OUTSIDE, Aggregation, Entity
from penstock.tasks.entities import FindEntities
from penstock.tasks.zero_shot import DEFAULT_HYPOTHESIS, LabelScores, ZeroShotOptions, zero_shot_task
from penstock.types import Task

FEATURES, SIMILARITY = "feature-extraction", "sentence-similarity"
LABELS, ENTITIES = "text-classification", "token-classification"
ZERO_SHOT, ZERO_SHOT_IMAGES = "zero-shot-classification", "zero-shot-image-classification"
GENERATION, RANKING = "text-generation", "text-ranking"
TASKS = (FEATURES, SIMILARITY, LABELS, ENTITIES, ZERO_SHOT, ZERO_SHOT_IMAGES, GENERATION, RANKING)


class InferenceParameters(GenerateParameters, kw_only=True):
    """The parameters of all tasks. Those of another task than the one that runs are refused."""

    truncate: bool | int | None = None
    truncation_direction: Direction | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    aggregation_strategy: Aggregation | None = None
    ignore_labels: list[str] | None = None
    stride: Annotated[
        int | None, Refused("a text is not read in overlapping parts; cut it, or send its parts")
    ] = None
    candidate_labels: list[str] | str | None = None
    hypothesis_template: str | None = None
    multi_label: bool | None = None
    targets: Annotated[list[str] | None, Refused("fill-mask is not served here")] = None


_REFUSED = refused_fields(InferenceParameters)
_CUTS = {"truncate", "truncation_direction"}
_GENERATION = set(GenerateParameters.__struct_fields__)
_FIELDS: dict[str, set[str]] = {  # fields of `parameters` that each task accepts
    FEATURES: {*_CUTS, "normalize", "prompt_name", "dimensions"},
    SIMILARITY: {*_CUTS, "prompt_name"},
    LABELS: {*_CUTS, "function_to_apply", "top_k"},
    ENTITIES: {*_CUTS, "aggregation_strategy", "ignore_labels", "stride"},
    ZERO_SHOT: {*_CUTS, "candidate_labels", "hypothesis_template", "multi_label"},
    ZERO_SHOT_IMAGES: {"candidate_labels", "hypothesis_template"},
    GENERATION: _GENERATION,
    RANKING: _CUTS,
}
_EMBEDS = ("normalize", "prompt_name", "prompt", "instruction", "input_type", "dimensions")


class InferenceRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /`: `inputs` with the `parameters` of the model's task, or a body of TEI's."""

    inputs: str | list[str | int | list[int | str]] | dict[str, Any] | None = None
    parameters: InferenceParameters | None = None
    options: Annotated[
        dict[str, Any] | None, NoEffect("the model is loaded, and no answer is kept for a later request")
    ] = None
    stream: bool | None = None
    query: str | None = None
    texts: list[str] | None = None
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    input_type: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    encoding_format: Annotated[
        str, Refused("this answer is a list of numbers; /v1/embeddings has base64", accepts=(None, "float"))
    ] = "float"
    model: str | None = None
    adapter: str | None = None
    priority: int = 0
    timeout: float | None = None
    request_id: str | None = None
    user: User = None

    def text_options(self) -> TextOptions:
        """The options for truncation and prompts, from the body or from its `parameters`."""
        given = self.parameters or InferenceParameters()
        truncate = self.truncate if self.truncate is not None else given.truncate
        if not isinstance(truncate, bool | None):
            raise MalformedBody("truncate is a number; use true or false for this task", param="parameters")
        return TextOptions(
            truncate=truncate,
            direction=self.truncation_direction or given.truncation_direction or "right",
            prompt_name=self.prompt_name if self.prompt_name is not None else given.prompt_name,
            prompt=self.prompt,
            instruction=self.instruction,
            input_type=self.input_type,
        )


async def inference(call: Call, body: InferenceRequest) -> Reply | Streamed:
    """Run the model's task: embed, compare, classify, find entities, rank or generate."""
    return await _run(call, body, None)


async def inference_of_model(call: Call, body: InferenceRequest) -> Reply | Streamed:
    """Run a task of the model that the path names: `/models/NAME`, or `/models/NAME/pipeline/TASK`."""
    name, found, task = call.path_value.rpartition("/pipeline/")
    body.model = name if found else call.path_value
    return await _run(call, body, task if found else None)


async def inference_of_task(call: Call, body: InferenceRequest) -> Reply | Streamed:
    """Run the task that the path names: `/pipeline/TASK`, or `/pipeline/TASK/NAME`."""
    task, _, name = call.path_value.partition("/")
    body.model = name or body.model
    return await _run(call, body, task)


async def _run(call: Call, body: InferenceRequest, named: str | None) -> Reply | Streamed:
    model = call.model(body, may_truncate=False)
    body.model = model.full_name  # without a prompt in the name
    task = _task(body, model, named)
    _check_parameters(body.parameters, task)
    if task == RANKING:
        if body.query is None or body.texts is None:
            raise MalformedBody("a ranking needs query and texts", param="query")
        return await pipelines.rank(
            call,
            body,
            body.query,
            body.texts,
            body.text_options(),
            raw_scores=body.raw_scores,
            return_text=body.return_text,
        )
    if body.inputs is None:
        raise MalformedBody("the body has no `inputs`", param="inputs")
    return await _HANDLERS[task](call, body, model)


def _task(body: InferenceRequest, model: ServedModel, named: str | None) -> str:
    """The task, chosen by the path, the fields of the body or the model."""
    parameters, given = body.parameters or InferenceParameters(), body.inputs
    if named is not None:
        if named not in TASKS:
            raise NotPossible(f"task {named} is not served here; this server has: {', '.join(TASKS)}")
        return named
    if body.texts is not None or body.query is not None:
        return RANKING
    if parameters.candidate_labels is not None:
        return ZERO_SHOT if model.spec.dual is None else ZERO_SHOT_IMAGES
    if isinstance(given, dict):
        return _object_task(given)
    spec = model.spec
    embeds = any(getattr(body, name) is not None for name in _EMBEDS)
    if spec.generates and not embeds:
        return GENERATION
    if body.stream:
        raise NotPossible(f"model {spec.name} does not generate text, so there is nothing to stream")
    first = spec.tasks[0]
    if first is Task.ZERO_SHOT:
        raise NotPossible(f"model {spec.name} needs parameters.candidate_labels", param="parameters")
    if first is Task.ENTITIES:
        raise NotPossible(f"model {spec.name} finds entities of labels; use /v1/entities", param="inputs")
    by_model = {Task.CLASSIFY: LABELS, Task.TOKEN_CLASSIFY: ENTITIES}
    return FEATURES if embeds else by_model.get(first, FEATURES)


def _object_task(given: dict[str, Any]) -> str:
    if "source_sentence" in given:
        return SIMILARITY
    if "text" in given:
        return LABELS
    if "question" in given or "query" in given:
        raise NotPossible("question answering is not served here", param="inputs")
    raise MalformedBody(
        "inputs must be a text, a list, or an object with source_sentence and sentences", param="inputs"
    )


def _check_parameters(parameters: InferenceParameters | None, task: str) -> None:
    if parameters is None:
        return
    if _REFUSED is not None:
        _REFUSED.check(parameters)
    for name in parameters.__struct_fields__:
        if name not in _FIELDS[task] and getattr(parameters, name) is not None:
            raise BadValue(f"parameters.{name} does not apply to {task}; leave it out", param="parameters")


async def _features(call: Call, body: InferenceRequest, model: ServedModel) -> Reply:
    parameters, options = body.parameters or InferenceParameters(), body.text_options()
    inputs: Any = body.inputs
    if isinstance(inputs, dict) or (isinstance(inputs, list) and any(map(_has_texts, inputs))):
        raise MalformedBody("inputs must be a text, a list of texts, or token ids", param="inputs")
    if Task.EMBED not in model.spec.tasks and Task.TOKEN_EMBED in model.spec.tasks:
        return await pipelines.embed_all(call, body, model, inputs, options)
    if model.spec.tasks[0] is Task.SPARSE and body.normalize is None and body.dimensions is None:
        return await pipelines.embed_sparse(call, body, model, inputs, options)
    normalize = body.normalize if body.normalize is not None else parameters.normalize
    return await pipelines.embed(
        call,
        body,
        model,
        inputs,
        options,
        normalize=normalize is not False,
        dimensions=body.dimensions if body.dimensions is not None else parameters.dimensions,
    )


def _has_texts(item: Any) -> bool:
    return isinstance(item, list) and any(isinstance(each, str) for each in item)


async def _similarity(call: Call, body: InferenceRequest, model: ServedModel) -> Reply:
    given = body.inputs if isinstance(body.inputs, dict) else {}
    source, sentences = given.get("source_sentence"), given.get("sentences")
    if not isinstance(source, str) or not _are_texts(sentences):
        raise MalformedBody(
            "inputs must be an object with source_sentence (a text) and sentences (a list of texts)",
            param="inputs",
        )
    return await pipelines.similarity(call, body, source, sentences, body.text_options())


def _are_texts(given: Any) -> TypeGuard[list[str]]:
    return isinstance(given, list) and all(isinstance(each, str) for each in given)


async def _labels(call: Call, body: InferenceRequest, model: ServedModel) -> Reply:
    """With `parameters` the answer is a list per text, even for one text; without them it is TEI's."""
    parameters, inputs, options = body.parameters, _classified(body), body.text_options()
    if parameters is None:
        return await pipelines.predict_reply(call, body, inputs, options, raw_scores=body.raw_scores)
    if parameters.top_k is not None and parameters.top_k < 1:
        raise BadValue(f"top_k is {parameters.top_k}; it must be at least 1", param="parameters")
    if isinstance(inputs, list) and _are_texts(inputs):
        inputs = [[text] for text in inputs]  # TEI would read two texts as a pair
    function = parameters.function_to_apply
    predicted = await pipelines.predict(
        call, body, inputs, options, raw_scores=body.raw_scores or function is not None
    )
    scores = [_applied(function, row.astype(np.float32)) for row in predicted.scores]
    return labels_reply(call, predicted, label_rows(scores, predicted.labels, parameters.top_k))


def _classified(body: InferenceRequest) -> Any:
    given = body.inputs
    if not isinstance(given, dict):
        return given
    texts = [given[name] for name in ("text", "text_pair") if name in given]
    if len(texts) != len(given) or not texts or not _are_texts(texts):
        raise MalformedBody("inputs must have text, and text_pair for a pair", param="inputs")
    return [texts]


def _applied(function: str | None, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    if function == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-logits)), dtype=np.float32)
    if function == "softmax":
        powers = np.exp(logits - logits.max())
        return np.asarray(powers / powers.sum(), dtype=np.float32)
    return logits


async def _zero_shot(call: Call, body: InferenceRequest, model: ServedModel) -> Reply:
    parameters = body.parameters or InferenceParameters()
    labels, texts = _candidates(parameters.candidate_labels), _texts(body)
    options = ZeroShotOptions(
        hypothesis_template=parameters.hypothesis_template or DEFAULT_HYPOTHESIS,
        multi_label=bool(parameters.multi_label),
        truncate_prompt_tokens=body.text_options().limit(model),
        max_request_tokens=MAX_REQUEST_TOKENS,
    )
    result = await run(call, body, model, zero_shot_task(model.text, texts, labels, options))
    return _answer(call, body, result, [_scored(row) for row in result.value])


async def _zero_shot_images(call: Call, body: InferenceRequest, model: ServedModel) -> Reply:
    """Score labels for an image, or for each of several: base64, data URIs or allowed URLs."""
    parameters, given = body.parameters or InferenceParameters(), body.inputs
    labels, sources = _candidates(parameters.candidate_labels), given if isinstance(given, list) else [given]
    images = await with_images(call, model, [(image_source(each, "inputs"),) for each in sources], "inputs")
    options = ZeroShotOptions(hypothesis_template=parameters.hypothesis_template or DEFAULT_HYPOTHESIS)
    result = await run(call, body, model, zero_shot_task(model.text, images, labels, options))
    rows = [_scored(row) for row in result.value]
    reply = json_reply(rows if isinstance(given, list) else rows[0])
    record_phases(call, call.began_s)
    return reply


def _scored(row: LabelScores) -> list[dict[str, Any]]:
    return [{"label": label, "score": score} for label, score in zip(row.labels, row.scores, strict=True)]


def _candidates(given: list[str] | str | None) -> list[str]:
    if isinstance(given, str):
        return [label.strip() for label in given.split(",") if label.strip()]
    return given or []


async def _entities(call: Call, body: InferenceRequest, model: ServedModel) -> Reply:
    parameters, texts = body.parameters or InferenceParameters(), _texts(body)
    aggregation = parameters.aggregation_strategy or "simple"
    ignored = OUTSIDE if parameters.ignore_labels is None else parameters.ignore_labels
    task = FindEntities(
        inputs=texts, options=body.text_options().inputs(model), aggregation=aggregation, ignored=ignored
    )
    result = await run(call, body, model, task, rows_name="inputs")
    encoded = await model.text.batcher.encode_with_offsets(texts)
    shape = _token_entity if aggregation == "none" else _entity_group
    rows = [
        [shape(model, entity, row) for entity in found]
        for found, row in zip(result.value, encoded, strict=True)
    ]
    return _answer(call, body, result, rows)


def _tokens_within(entity: Entity, row: EncodedText) -> list[int]:
    """Indices of the tokens that the entity consists of."""
    inside = (row.offsets[:, 0] >= entity.start) & (row.offsets[:, 1] <= entity.end) & (row.words >= 0)
    found: list[int] = np.flatnonzero(inside).tolist()
    return found


def _token_entity(model: ServedModel, entity: Entity, row: EncodedText) -> dict[str, Any]:
    index = _tokens_within(entity, row)[0]
    (word,) = model.text.tokenizer.token_strings([int(row.ids[index])])
    place = {"start": entity.start, "end": entity.end}
    return {"entity": entity.label, "score": entity.score, "index": index, "word": word, **place}


def _entity_group(model: ServedModel, entity: Entity, row: EncodedText) -> dict[str, Any]:
    word = model.text.tokenizer.decode(row.ids[_tokens_within(entity, row)].tolist())
    place = {"start": entity.start, "end": entity.end}
    return {"entity_group": entity.label, "score": entity.score, "word": word, **place}


def _texts(body: InferenceRequest) -> list[str]:
    if isinstance(body.inputs, dict) or (isinstance(body.inputs, list) and not _are_texts(body.inputs)):
        raise MalformedBody("inputs must be a text or a list of texts", param="inputs")
    return require_texts(body.inputs)


def _answer(call: Call, body: InferenceRequest, result: Result[Any], rows: list[Any]) -> Reply:
    """The row itself for one text, otherwise a list of rows."""
    began, texts = call.began_s, _texts(body)
    reply = json_reply(rows[0] if isinstance(body.inputs, str) else rows)
    record_phases(call, began)
    reply.headers += pipelines.compute_headers(call, [result], num_chars(texts))
    return reply


async def _generation(call: Call, body: InferenceRequest, model: ServedModel) -> Reply | Streamed:
    if not isinstance(body.inputs, str):
        raise MalformedBody("inputs must be one text to continue", param="inputs")
    parameters = body.parameters or InferenceParameters()
    if isinstance(parameters.truncate, bool):
        raise MalformedBody("truncate must be a number of tokens for text-generation", param="parameters")
    return await generate_text(call, body, body.inputs, parameters, streams=bool(body.stream), is_listed=True)


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /generate` and `POST /generate_stream`."""

    inputs: str
    parameters: GenerateParameters | None = None
    stream: bool | None = None
    model: str | None = None
    adapter: str | None = None
    priority: int = 0
    timeout: float | None = None
    request_id: str | None = None
    user: User = None


_REFUSED_OF_GENERATION = refused_fields(GenerateParameters)


async def generate(call: Call, body: GenerateRequest) -> Reply | Streamed:
    """Continue a text."""
    return await _generate(call, body, streams=bool(body.stream))


async def generate_stream(call: Call, body: GenerateRequest) -> Reply | Streamed:
    """Continue a text; every token is an event."""
    return await _generate(call, body, streams=body.stream is not False)


async def _generate(call: Call, body: GenerateRequest, *, streams: bool) -> Reply | Streamed:
    parameters = body.parameters or GenerateParameters()
    if _REFUSED_OF_GENERATION is not None:
        _REFUSED_OF_GENERATION.check(parameters)
    return await generate_text(call, body, body.inputs, parameters, streams=streams)


_HANDLERS: dict[str, Callable[[Call, InferenceRequest, ServedModel], Awaitable[Reply | Streamed]]] = {
    FEATURES: _features,
    SIMILARITY: _similarity,
    LABELS: _labels,
    ENTITIES: _entities,
    ZERO_SHOT: _zero_shot,
    ZERO_SHOT_IMAGES: _zero_shot_images,
    GENERATION: _generation,
}
_EXAMPLE = {"inputs": "Water finds its level."}
_HF = "Hugging Face"
ROUTES = (
    RouteSpec("/", InferenceRequest, inference, _HF, list[Any], INFERENCE_ERRORS, _EXAMPLE),
    RouteSpec(
        "/models/{model}", InferenceRequest, inference_of_model, _HF, list[Any], INFERENCE_ERRORS, _EXAMPLE
    ),
    RouteSpec(
        "/pipeline/{task}",
        InferenceRequest,
        inference_of_task,
        _HF,
        list[Any],
        INFERENCE_ERRORS,
        _EXAMPLE,
        path_example="feature-extraction",
    ),
    RouteSpec("/generate", GenerateRequest, generate, _HF, GeneratedText, INFERENCE_ERRORS, _EXAMPLE),
    RouteSpec(
        "/generate_stream", GenerateRequest, generate_stream, _HF, GeneratedText, INFERENCE_ERRORS, _EXAMPLE
    ),
)
