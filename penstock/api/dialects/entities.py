"""Named entities: what a token classifier finds, as spans of the text."""

from __future__ import annotations

import time

from penstock.api.endpoint import Call, Reply
from penstock.api.fields import InputFields
from penstock.api.work import Result, check_rows, head_of, json_reply, note_phases, run_request
from penstock.inputs.offsets import join_located, texts_only
from penstock.outputs.entities import Aggregation, find_entities
from penstock.types import PoolingParams, Task


class EntitiesRequest(InputFields, kw_only=True):
    """Body of `POST /v1/entities`."""

    aggregation: Aggregation = "simple"


async def entities(call: Call, body: EntitiesRequest) -> Reply:
    """The entities of each text: label, score, and where they stand."""
    call.request_id = body.request_id
    model, params, options = call.state.model(body.model), PoolingParams(Task.TOKEN_CLASSIFY), body.options()
    began = time.monotonic()
    model.processor.check(params)
    texts = texts_only(body.input, allow_empty_text=False)
    check_rows(call, texts)
    prompted = model.processor.with_prompt(texts, options)
    located = await model.tokenizer.locate(prompted, options.add_special_tokens)
    request, places = join_located(model.processor, call.state.next_id(), texts, located, params, options)
    call.tokenize_s = time.monotonic() - began
    result = Result(model, request, await run_request(call, model, request, body))
    began = time.monotonic()
    found = find_entities(
        texts,
        result.answer.values,
        request.lengths,
        places.chars,
        places.words,
        model.spec.labels,
        body.aggregation,
    )
    data = [{"index": index, "entities": row} for index, row in enumerate(found)]
    reply = json_reply(
        {"object": "list", **head_of(body, result, "entities"), "data": data, "usage": result.usage}
    )
    note_phases(call, began)
    return reply
