"""Tasks as TEI and the Hugging Face Inference API answer them: bare lists, and errors with a type.

The dialects share a path, so their common code is here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.api.body import Body
from penstock.api.call import Call, Reply
from penstock.api.classify import classifier_task
from penstock.api.embeddings import is_chunked_by_default
from penstock.api.error_styles import ErrorStyle, with_remedy
from penstock.api.ranking import run_pairs
from penstock.api.replies import json_reply, record_phases
from penstock.api.run import Result, Scheduled, check_num_rows, run
from penstock.api.state import ServedModel
from penstock.errors import (
    BadValue,
    BodyTooLarge,
    DeadlineExceeded,
    EmptyInput,
    EngineUnavailable,
    MalformedBody,
    NotPossible,
    PenstockError,
    QueueFull,
    ServerFull,
)
from penstock.inputs.chunks import ChunkOptions
from penstock.inputs.pair_options import PairOptions, make_pairs
from penstock.inputs.pairs import score_kind
from penstock.inputs.processor import InputOptions
from penstock.inputs.truncation import Side
from penstock.outputs.encoders import LargeRow, encode_rows
from penstock.outputs.ranking import top_indices
from penstock.tasks.embed import Embed, EmbedInChunks
from penstock.tasks.sparse import Sparse
from penstock.tasks.token_embed import TokenEmbed
from penstock.types import MAX_TOP_K, OutputDtype, PoolingParams, Task

Direction = Literal["left", "right", "Left", "Right"]
TextInputs = str | list[str | int | list[int]]
PredictInputs = str | list[str | list[str]]


class NamedBody(Scheduled, Protocol):
    model: str | None


class TypedError(msgspec.Struct, kw_only=True):
    """An error as TEI's clients read it."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class InferenceError(msgspec.Struct, kw_only=True):
    """An error as clients of the Hugging Face API read it: as TEI or Text Generation Inference gives it."""

    error: str
    error_type: Literal[
        "Unhealthy",
        "Backend",
        "Overloaded",
        "Validation",
        "Tokenizer",
        "Empty",
        "generation",
        "overloaded",
        "healthcheck",
        "validation",
    ]


def error_type(error: PenstockError) -> str:
    if isinstance(error, EmptyInput):
        return "Empty"
    if isinstance(error, QueueFull | ServerFull | DeadlineExceeded):
        return "Overloaded"
    if isinstance(error, EngineUnavailable):
        return "Unhealthy"
    if isinstance(error, NotPossible) or error.status >= 500:
        return "Backend"
    return "Validation"


def own_words(message: str) -> str:
    """A message with the remedy for long texts in the words of these dialects."""
    return with_remedy(message, "set truncate to true")


def _typed_error(error: PenstockError) -> dict[str, Any]:
    return {"error": own_words(error.message), "error_type": error_type(error)}


def _typed_status(error: PenstockError) -> int:
    """TEI's statuses. Errors that TEI does not have, such as 401 and 404, keep their own."""
    if isinstance(error, MalformedBody):
        return 422
    if isinstance(error, BadValue) and not isinstance(error, EmptyInput):
        return BodyTooLarge.status
    if isinstance(error, NotPossible) or error.status == PenstockError.status:
        return 424
    return error.status


TEI_ERRORS = ErrorStyle(_typed_error, _typed_status, TypedError)
INFERENCE_ERRORS = ErrorStyle(_typed_error, _typed_status, InferenceError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """A body's options for its texts. `truncate` is None if the body leaves it to the server."""

    truncate: bool | None = None
    direction: Direction = "right"
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    input_type: str | None = None

    @property
    def side(self) -> Side:
        return "left" if self.direction.lower() == "left" else "right"

    def limit(self, model: ServedModel) -> int | None:
        """The value of `truncate_prompt_tokens`: long texts are truncated by default."""
        given = self.truncate if self.truncate is not None else model.auto_truncate
        return None if given is False else -1

    def inputs(self, model: ServedModel) -> InputOptions:
        return InputOptions(
            truncate_prompt_tokens=self.limit(model),
            truncation_side=self.side,
            prompt_name=self.prompt_name,
            prompt=self.prompt,
            instruction=self.instruction,
            input_type=self.input_type,
        )

    def pairs(self, model: ServedModel, *, is_symmetric: bool = False) -> PairOptions:
        return PairOptions(
            truncate_prompt_tokens=self.limit(model),
            truncation_side=self.side,
            is_symmetric=is_symmetric,
            prompt_name=self.prompt_name if is_symmetric else None,
        )


DEFAULT_TEXT_OPTIONS = TextOptions()


def check_not_empty(inputs: TextInputs, name: str = "inputs") -> None:
    """Refuse an empty list of inputs, and inputs without a character or a token."""
    if not inputs:
        raise EmptyInput(f"{name} is empty; give at least one text", param=name)
    if isinstance(inputs, str) or isinstance(inputs[0], int):
        return
    for index, each in enumerate(inputs):
        if isinstance(each, str | list) and not each:
            raise EmptyInput(f"{name} {index} is empty; give at least one character", param=name)


async def embed(
    call: Call,
    body: NamedBody,
    model: ServedModel,
    inputs: TextInputs,
    options: TextOptions,
    *,
    normalize: bool = True,
    dimensions: int | None = None,
) -> Reply:
    """One vector per text, as a list of lists of numbers."""
    check_not_empty(inputs)
    params = PoolingParams(Task.EMBED, dimensions, normalize)
    result = await _run_embed(call, body, model, inputs, params, options)
    return vectors_reply(call, result, num_chars(inputs))


async def _run_embed(
    call: Call,
    body: NamedBody,
    model: ServedModel,
    inputs: TextInputs,
    params: PoolingParams,
    options: TextOptions,
) -> Result[NDArray[Any]]:
    """The vectors. Long texts are embedded in chunks if `--default-chunking` says so and the body does not
    set `truncate`."""
    own = options.inputs(model)
    if options.truncate is None and is_chunked_by_default(inputs, model):
        task = EmbedInChunks(
            inputs=inputs,
            params=params,
            options=replace(own, truncate_prompt_tokens=None),
            chunking=ChunkOptions(chunking="mean"),
        )
        chunked = await run(call, body, model, task, rows_name="inputs")
        (embeddings,) = chunked.value
        return Result(chunked.model, chunked.request, chunked.output, embeddings.vectors)
    return await run(call, body, model, Embed(inputs=inputs, params=params, options=own), rows_name="inputs")


async def embed_all(
    call: Call, body: NamedBody, model: ServedModel, inputs: TextInputs, options: TextOptions
) -> Reply:
    """The model's state for each token: a list of matrices."""
    check_not_empty(inputs)
    task = TokenEmbed(
        inputs=inputs,
        params=PoolingParams(Task.TOKEN_EMBED, normalize=False),
        options=options.inputs(model),
    )
    result = await run(call, body, model, task, rows_name="inputs")
    return vectors_reply(call, result, num_chars(inputs))


async def embed_sparse(
    call: Call, body: NamedBody, model: ServedModel, inputs: TextInputs, options: TextOptions
) -> Reply:
    """The weights of each text's terms, by ascending token id."""
    check_not_empty(inputs)
    task = Sparse(
        inputs=inputs,
        params=PoolingParams(Task.SPARSE, top_k=MAX_TOP_K),
        options=options.inputs(model),
    )
    result = await run(call, body, model, task, rows_name="inputs")
    began = time.monotonic()
    rows = [
        [{"index": row.ids[at], "value": row.weights[at]} for at in np.argsort(row.ids)]
        for row in result.value
    ]
    return bare_reply(call, result, rows, num_chars(inputs), began)


async def rank(
    call: Call,
    body: NamedBody,
    query: str,
    texts: list[str],
    options: TextOptions,
    *,
    raw_scores: bool = False,
    return_text: bool = False,
) -> Reply:
    """Rank texts by how well they answer the query, the best first."""
    if not texts:
        raise EmptyInput("texts is empty; give at least one text", param="texts")
    check_num_rows(call, len(texts), "texts")
    if not query and not all(texts):
        raise EmptyInput("query and a text are empty; give at least one character", param="texts")
    activate = False if raw_scores else None
    model, pairs = call.model(body), make_pairs(query, texts)
    result = await run_pairs(call, body, model, pairs, options.pairs(model), activate=activate)
    began, scores = time.monotonic(), result.value
    rows: list[dict[str, Any]] = [{"index": index, "score": scores[index]} for index in top_indices(scores)]
    if return_text:
        rows = [{"index": row["index"], "text": texts[row["index"]], "score": row["score"]} for row in rows]
    return bare_reply(call, result, rows, len(query) * len(texts) + num_chars(texts), began)


async def similarity(
    call: Call, body: NamedBody, source: str, sentences: list[str], options: TextOptions
) -> Reply:
    """How similar each sentence is to the source, by the vectors of an embedding model."""
    model = call.model(body)
    if score_kind(model.spec) != "bi":
        raise NotPossible(
            f"model {model.spec.name} has no sentence embeddings to compare; use /rerank", param="model"
        )
    if not sentences:
        raise EmptyInput("inputs.sentences is empty; give at least one text", param="inputs")
    if not source or not all(sentences):
        raise EmptyInput("inputs has an empty text; give at least one character for each", param="inputs")
    check_num_rows(call, len(sentences), "sentences")
    pairs = make_pairs(source, sentences)
    symmetric = options.pairs(model, is_symmetric=True)
    result = await run_pairs(call, body, model, pairs, symmetric, activate=None)
    return bare_reply(call, result, result.value, len(source) + num_chars(sentences), time.monotonic())


@dataclass(slots=True, eq=False)
class Predicted:
    """The scores of each input's labels, and the results that they come from."""

    scores: list[NDArray[Any]]
    results: list[Result[NDArray[Any]]]
    is_one: bool  # the body has one input, not a list of them
    num_chars: int

    @property
    def labels(self) -> Sequence[str]:
        return self.results[0].model.spec.labels


async def predict(
    call: Call, body: NamedBody, inputs: PredictInputs, options: TextOptions, *, raw_scores: bool
) -> Predicted:
    """The scores of all labels for texts and pairs of texts."""
    rows, is_one = predict_rows(inputs)
    check_num_rows(call, len(rows), "inputs")
    model = call.model(body)
    own = options.inputs(model)
    params = PoolingParams(Task.CLASSIFY, normalize=False if raw_scores else None)
    scores: list[Any] = [None] * len(rows)
    results = []
    for size in sorted({len(row) for row in rows}):
        indices = [index for index, row in enumerate(rows) if len(row) == size]
        chosen = [rows[index][0] if size == 1 else rows[index] for index in indices]
        task = classifier_task(chosen, params, own)
        result = await run(call, body, model, task, rows_name="inputs")
        results.append(result)
        for index, values in zip(indices, result.value, strict=True):
            scores[index] = values
    return Predicted(scores, results, is_one, sum(map(num_chars, rows)))


async def predict_reply(
    call: Call, body: NamedBody, inputs: PredictInputs, options: TextOptions, *, raw_scores: bool = False
) -> Reply:
    """All labels with their scores, best first: one list for one input, otherwise a list of lists."""
    predicted = await predict(call, body, inputs, options, raw_scores=raw_scores)
    rows = label_rows(predicted.scores, predicted.labels)
    return labels_reply(call, predicted, rows[0] if predicted.is_one else rows)


def labels_reply(call: Call, predicted: Predicted, content: Any) -> Reply:
    reply = json_reply(content)
    record_phases(call, time.monotonic())
    reply.headers += compute_headers(call, predicted.results, predicted.num_chars)
    return reply


def predict_rows(inputs: PredictInputs) -> tuple[list[list[str]], bool]:
    """Each input as one or two texts, and whether the body has only one input. Two texts in a flat list are a
    pair."""
    if isinstance(inputs, str):
        inputs = [inputs]
    is_one = bool(inputs) and isinstance(inputs[0], str)
    rows: list[Any] = [inputs] if is_one else inputs
    is_known = all(isinstance(row, list) and len(row) in (1, 2) for row in rows)
    if not rows or not is_known or not all(isinstance(text, str) for row in rows for text in row):
        raise MalformedBody(
            "inputs must be a text, a pair of texts, or a list of lists with one or two texts each",
            param="inputs",
        )
    if not all(map(any, rows)):
        raise EmptyInput("inputs has an empty text; give at least one character", param="inputs")
    return rows, is_one


def label_rows(
    scores: Sequence[NDArray[Any]], labels: Sequence[str], top_k: int | None = None
) -> list[list[dict[str, Any]]]:
    """The labels of each row of scores, the best first."""
    return [
        [{"score": row[index], "label": labels[index]} for index in top_indices(row, top_k)] for row in scores
    ]


def vectors_reply(call: Call, result: Result[Any], num_characters: int) -> Reply:
    began = time.monotonic()
    rows = encode_rows(list(result.value), "float", OutputDtype.FLOAT32)
    return bare_reply(call, result, rows, num_characters, began)


def bare_reply(call: Call, result: Result[Any], content: Any, num_characters: int, began_s: float) -> Reply:
    """The content alone as JSON, with TEI's headers about times and sizes."""
    reply = json_reply(content)
    record_phases(call, began_s)
    reply.headers += compute_headers(call, [result], num_characters)
    return reply


def compute_headers(
    call: Call, results: Iterable[Result[Any]], num_characters: int
) -> list[tuple[bytes, bytes]]:
    """TEI's headers about times and sizes. Times are whole milliseconds."""
    results = list(results)
    settings = getattr(results[0].model.engine, "engine_settings", {}) if results else {}
    is_gpu = str(settings.get("device", "cpu")).startswith("cuda")
    total = b"%d" % ((time.monotonic() - call.began_s) * 1000)
    return [
        (b"x-compute-type", b"gpu+optimized" if is_gpu else b"cpu"),
        (b"x-compute-time", total),
        (b"x-compute-characters", b"%d" % num_characters),
        (b"x-compute-tokens", b"%d" % sum(result.request.num_tokens for result in results)),
        (b"x-total-time", total),
        (b"x-tokenization-time", b"%d" % (call.tokenize_s * 1000)),
        (b"x-queue-time", b"%d" % (call.queue_s * 1000)),
        (b"x-inference-time", b"%d" % (call.device_s * 1000)),
    ]


def joined(bodies: Sequence[Body], before: bytes, after: bytes) -> Body:
    """JSON bodies as the items of one list."""
    parts: list[bytes | LargeRow] = [before]
    for index, body in enumerate(bodies):
        parts += [b","] if index else []
        parts += [body] if isinstance(body, bytes) else body
    parts.append(after)
    is_plain = all(isinstance(part, bytes) for part in parts)
    return b"".join(part for part in parts if isinstance(part, bytes)) if is_plain else parts


def num_chars(inputs: Any) -> int:
    """Characters of texts; token ids count one each."""
    if isinstance(inputs, str):
        return len(inputs)
    return sum(1 if isinstance(each, int) else len(each) for each in inputs)
