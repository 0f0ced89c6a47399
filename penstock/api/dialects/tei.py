"""The dialect of Text Embeddings Inference: its body on `/rerank`, and `/similarity`."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from penstock.api.classify import classifier_task
from penstock.api.endpoint import Call, Reply
from penstock.api.error_styles import ErrorStyle
from penstock.api.fields import User
from penstock.api.ranking import run_pairs
from penstock.api.replies import json_reply, record_phases
from penstock.api.routes import RouteSpec, Variant, VariantTable
from penstock.api.run import check_num_rows, run
from penstock.errors import BadValue, EngineUnavailable, NotPossible, PenstockError, QueueFull
from penstock.inputs.pair_options import PairOptions, make_pairs
from penstock.inputs.pairs import score_kind
from penstock.inputs.processor import InputOptions
from penstock.inputs.truncation import Side
from penstock.outputs.ranking import top_indices
from penstock.types import PoolingParams, Task

Direction = Literal["left", "right", "Left", "Right"]


class TeiFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Scheduling fields. TEI has none, but they mean the same on every route."""

    model: str | None = None
    priority: int = 0
    timeout: float | None = None
    request_id: str | None = None
    user: User = None


class TeiRerankRequest(TeiFields, kw_only=True):
    """Body of `POST /rerank` in TEI's dialect, recognised by its field `texts`."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool = False
    truncation_direction: Direction = "right"


class PredictRequest(TeiFields, kw_only=True):
    """Body of `POST /predict`: a text, a pair of texts, or a list of such."""

    inputs: str | list[str | list[str]]
    raw_scores: bool = False
    truncate: bool = False
    truncation_direction: Direction = "right"


class SimilarityInput(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    truncate: bool = False
    truncation_direction: Direction = "right"
    prompt_name: str | None = None


class SimilarityRequest(TeiFields, kw_only=True):
    """Body of `POST /similarity`."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


async def tei_rerank(call: Call, body: TeiRerankRequest) -> Reply:
    """Rank texts from best to worst, in TEI's shape."""
    if not body.query.strip():
        raise BadValue("query is an empty text", param="query")
    if not body.texts:
        raise BadValue("texts is empty; give at least one text", param="texts")
    check_num_rows(call, len(body.texts), "texts")
    options = _options(body.truncate, body.truncation_direction)
    activate = False if body.raw_scores else None
    result = await run_pairs(call, body, make_pairs(body.query, body.texts), options, activate=activate)
    began, scores = time.monotonic(), result.value
    rows: list[dict[str, Any]] = [{"index": index, "score": scores[index]} for index in top_indices(scores)]
    if body.return_text:
        rows = [{**row, "text": body.texts[row["index"]]} for row in rows]
    reply = json_reply(rows)
    record_phases(call, began)
    return reply


async def predict(call: Call, body: PredictRequest) -> Reply:
    """Classify a text, a pair of texts or several of these: all labels with their scores, best first."""
    inputs, is_one = _predicted(body.inputs)
    options = InputOptions(
        truncate_prompt_tokens=-1 if body.truncate else None, truncation_side=_side(body.truncation_direction)
    )
    params = PoolingParams(Task.CLASSIFY, normalize=False if body.raw_scores else None)
    model = call.model(body)
    result = await run(call, body, model, classifier_task(inputs, params, options), rows_name="inputs")
    began, labels = time.monotonic(), model.spec.labels
    rows = [
        [{"score": row[index], "label": labels[index]} for index in top_indices(row)] for row in result.value
    ]
    reply = json_reply(rows[0] if is_one else rows)
    record_phases(call, began)
    return reply


def _predicted(inputs: Any) -> tuple[list[str] | list[list[str]], bool]:
    """The texts or pairs of a body, and whether it has only one. Two texts in a flat list are a pair."""
    if isinstance(inputs, str):
        return [inputs], True
    is_one = bool(inputs) and isinstance(inputs[0], str)
    rows = [inputs] if is_one else inputs
    sizes = {len(row) if isinstance(row, list) else 0 for row in rows}
    if not all(isinstance(text, str) for row in rows for text in row) or sizes not in ({1}, {2}):
        raise BadValue(
            "inputs must be a text, a pair of texts, a list of lists with one text each, or a list of pairs",
            param="inputs",
        )
    return (rows, is_one) if sizes == {2} else ([row[0] for row in rows], is_one)


async def similarity(call: Call, body: SimilarityRequest) -> Reply:
    """Compare a sentence with others by the vectors of an embedding model."""
    model, parameters = call.model(body), body.parameters or SimilarityParameters()
    if score_kind(model.spec) != "bi":
        raise NotPossible(
            f"model {model.spec.name} has no sentence embeddings to compare; use /rerank", param="model"
        )
    if not body.inputs.source_sentence.strip():
        raise BadValue("source_sentence is an empty text", param="inputs")
    if not body.inputs.sentences:
        raise BadValue("sentences is empty; give at least one text", param="inputs")
    check_num_rows(call, len(body.inputs.sentences), "sentences")
    options = _options(
        parameters.truncate, parameters.truncation_direction, parameters.prompt_name, symmetric=True
    )
    pairs = make_pairs(body.inputs.source_sentence, body.inputs.sentences)
    result = await run_pairs(call, body, pairs, options, activate=None)
    began = time.monotonic()
    reply = json_reply(result.value)
    record_phases(call, began)
    return reply


def _options(
    truncate: bool, direction: Direction, prompt_name: str | None = None, *, symmetric: bool = False
) -> PairOptions:
    return PairOptions(
        truncate_prompt_tokens=-1 if truncate else None,
        truncation_side=_side(direction),
        is_symmetric=symmetric,
        prompt_name=prompt_name,
    )


def _side(direction: Direction) -> Side:
    return "left" if direction.lower() == "left" else "right"


def tei_error(error: PenstockError) -> dict[str, Any]:
    kind = "Validation" if error.status < 500 else "Backend"
    if isinstance(error, QueueFull):
        kind = "Overloaded"
    elif isinstance(error, EngineUnavailable):
        kind = "Unhealthy"
    return {"error": error.message, "error_type": kind}


TEI_ERRORS = ErrorStyle(tei_error)
ROUTES = (
    RouteSpec("/predict", PredictRequest, predict, "TEI", errors=TEI_ERRORS),
    RouteSpec("/similarity", SimilarityRequest, similarity, "TEI", errors=TEI_ERRORS),
)
VARIANTS: VariantTable = (("/rerank", Variant(("texts",), TeiRerankRequest, tei_rerank, "TEI", TEI_ERRORS)),)
