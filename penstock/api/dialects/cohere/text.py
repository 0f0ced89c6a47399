"""The dialect of Cohere: classification, the tokenizer, and the check of a key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.api.call import Call, Reply
from penstock.api.dialects.cohere.shared import (
    CohereMeta,
    Truncate,
    cohere_errors,
    meta,
    refusing_longer,
    truncating,
)
from penstock.api.fields import Refused, RequestFields
from penstock.api.replies import json_reply, record_phases
from penstock.api.routes import RouteSpec
from penstock.api.run import run
from penstock.api.tokens import MAX_INLINE_IDS, decode_ids
from penstock.checkpoint.spec import ModelSpec
from penstock.errors import BadValue
from penstock.tasks.classify import Classify
from penstock.types import PoolingParams, Task

MAX_TOKENIZED_CHARS = 65_536  # Cohere's limit
MAX_DETOKENIZED_IDS = 65_536
_MAX_LOOP_VALUES = 1024  # answers with up to this many are made on the event loop
MIN_CONFIDENCE = 0.5  # of predicted labels, if a text may have several


class CohereClassifyRequest(RequestFields, kw_only=True):
    """Body of `POST /v1/classify`, for models with labels of their own."""

    inputs: list[str]
    truncate: Truncate = "END"
    examples: Annotated[
        list[dict[str, Any]] | None,
        Refused(
            "a model is not trained on examples; serve a classifier, which has labels of its own, and leave "
            "examples out",
            accepts=(None, []),
        ),
    ] = None
    preset: Annotated[str | None, Refused("this server keeps no presets")] = None


async def cohere_classify(call: Call, body: CohereClassifyRequest) -> Reply:
    """Classify texts by the model's own labels, in the shape of Cohere's v1 API."""
    if not body.inputs:
        raise BadValue("inputs is empty; give at least one text", param="inputs")
    model = call.model(body)
    limit = model.spec.max_model_len
    task = Classify(
        inputs=body.inputs,
        params=PoolingParams(Task.CLASSIFY),
        options=truncating(body.truncate, limit),
        allows_empty_text=False,
        check_lengths=refusing_longer(limit, "inputs") if body.truncate == "NONE" else None,
    )
    result = await run(call, body, model, task, rows_name="inputs")
    began = time.monotonic()
    name = result.head(body, "classify")["id"]

    def make() -> Reply:
        item = _several_labels if _may_have_several(model.spec) else _one_label
        items = [
            {"id": f"{name}-{at}", "input": text, **item(model.spec.labels, values)}
            for at, (text, values) in enumerate(zip(body.inputs, result.value, strict=True))
        ]
        units = meta("1", classifications=len(items))
        return json_reply({"id": name, "classifications": items, "meta": units})

    is_small = result.value.size <= _MAX_LOOP_VALUES
    reply = make() if is_small else await asyncio.to_thread(make)
    record_phases(call, began)
    return reply


def _may_have_several(spec: ModelSpec) -> bool:
    """Whether each label has a probability of its own, so that a text may have several or none."""
    return len(spec.labels) == 1 or spec.config.get("problem_type") == "multi_label_classification"


def _one_label(labels: Sequence[str], values: NDArray[Any]) -> dict[str, Any]:
    best = int(np.argmax(values))
    return {
        "prediction": labels[best],
        "predictions": [labels[best]],
        "confidence": values[best],
        "confidences": [values[best]],
        "labels": _confidences(labels, values),
        "classification_type": "single-label",
    }


def _several_labels(labels: Sequence[str], values: NDArray[Any]) -> dict[str, Any]:
    likely = [at for at in np.argsort(-values, kind="stable").tolist() if values[at] >= MIN_CONFIDENCE]
    return {
        "predictions": [labels[at] for at in likely],
        "confidences": [values[at] for at in likely],
        "labels": _confidences(labels, values),
        "classification_type": "multi-label",
    }


def _confidences(labels: Sequence[str], values: NDArray[Any]) -> dict[str, Any]:
    return {label: {"confidence": value} for label, value in zip(labels, values, strict=True)}


# --- tokens -------------------------------------------------------------------------------------------------


class CohereTokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/tokenize`."""

    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOKENIZED_CHARS)]
    model: str | None = None


class CohereDetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/detokenize`."""

    tokens: Annotated[list[int], msgspec.Meta(max_length=MAX_DETOKENIZED_IDS)]
    model: str | None = None


async def cohere_tokenize(call: Call, body: CohereTokenizeRequest) -> Reply:
    """Tokenise a text without special tokens, in the shape of Cohere's API."""
    text = call.model(body).text
    (row,) = await text.batcher.encode([body.text], False)
    ids = row.tolist()
    find = partial(text.tokenizer.token_strings, ids)
    strings = find() if len(ids) <= MAX_INLINE_IDS else await text.batcher.call(find, len(ids))
    return json_reply({"tokens": ids, "token_strings": strings, "meta": _TOKENS_META})


async def cohere_detokenize(call: Call, body: CohereDetokenizeRequest) -> Reply:
    """Decode token ids to text without special tokens, in the shape of Cohere's API."""
    (text,) = await decode_ids(call.model(body), [body.tokens], skip_special_tokens=True)
    return json_reply({"text": text, "meta": _TOKENS_META})


async def check_api_key(call: Call) -> Reply:
    """Check the API key, as Cohere's clients do: a wrong one answers 401."""
    return json_reply({"valid": True})


_TOKENS_META = {"api_version": {"version": "1"}}


# --- answers -----------------------------------------------------------------------------------------------


class LabelConfidence(msgspec.Struct, kw_only=True):
    confidence: float


class Classification(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    input: str
    prediction: str | msgspec.UnsetType = msgspec.UNSET  # of single-label models
    predictions: list[str]
    confidence: float | msgspec.UnsetType = msgspec.UNSET
    confidences: list[float]
    labels: dict[str, LabelConfidence]
    classification_type: Literal["single-label", "multi-label"]


class CohereClassifyAnswer(msgspec.Struct, kw_only=True):
    id: str
    classifications: list[Classification]
    meta: CohereMeta


class CohereTokenizeAnswer(msgspec.Struct, kw_only=True):
    tokens: list[int]
    token_strings: list[str]
    meta: CohereMeta


class CohereDetokenizeAnswer(msgspec.Struct, kw_only=True):
    text: str
    meta: CohereMeta


class CheckApiKeyAnswer(msgspec.Struct, kw_only=True):
    valid: bool


ERRORS = cohere_errors()
CLASSIFY_ERRORS = cohere_errors({"input": "inputs"})
ROUTES = (
    RouteSpec(
        "/v1/classify",
        CohereClassifyRequest,
        cohere_classify,
        "Cohere",
        CohereClassifyAnswer,
        CLASSIFY_ERRORS,
        {"inputs": ["Water finds its level."]},
    ),
    RouteSpec(
        "/v1/tokenize",
        CohereTokenizeRequest,
        cohere_tokenize,
        "Cohere",
        CohereTokenizeAnswer,
        ERRORS,
        {"text": "Water finds its level."},
    ),
    RouteSpec(
        "/v1/detokenize",
        CohereDetokenizeRequest,
        cohere_detokenize,
        "Cohere",
        CohereDetokenizeAnswer,
        ERRORS,
        {"tokens": [5, 6, 7]},
    ),
    RouteSpec(
        "/v1/check-api-key",
        None,
        check_api_key,
        "Cohere",
        CheckApiKeyAnswer,
        ERRORS,
        methods=("POST",),
    ),
)
