"""Named entities: what a token classifier or a GLiNER model finds, as spans of the text."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.api.answers import ListAnswer
from penstock.api.call import Call, Reply
from penstock.api.fields import InputFields
from penstock.api.replies import list_reply
from penstock.api.routes import RouteSpec
from penstock.api.run import run
from penstock.errors import BadValue
from penstock.inputs.long_texts import MAX_REQUEST_TOKENS
from penstock.inputs.offsets import require_texts
from penstock.outputs.entities import Aggregation, Entity
from penstock.outputs.spans import SpanOptions
from penstock.tasks.entities import FindEntities, FindLabelledEntities
from penstock.tasks.labels import row_options


class EntitiesRequest(InputFields, kw_only=True):
    """Body of `POST /v1/entities`."""

    aggregation: Aggregation = "simple"
    labels: list[str] | None = None
    threshold: float | None = None
    flat: bool | None = None
    multi_label: bool | None = None


_SPAN_FIELDS = ("threshold", "flat", "multi_label")


def _task(body: EntitiesRequest) -> FindEntities | FindLabelledEntities:
    """The task for the labels of the request or, without any, the labels of the model."""
    if body.labels is None:
        for name in _SPAN_FIELDS:
            if getattr(body, name) is not None:
                raise BadValue(f"{name} applies to labels of the request only; give labels", param=name)
        return FindEntities(inputs=body.input, options=body.options(), aggregation=body.aggregation)
    if body.aggregation != "simple":
        raise BadValue(
            "aggregation does not apply to labels of the request; leave it out", param="aggregation"
        )
    given = {name: value for name in _SPAN_FIELDS if (value := getattr(body, name)) is not None}
    return FindLabelledEntities(
        texts=require_texts(body.input),
        labels=body.labels,
        options=SpanOptions(**given),
        rows=row_options(body.options(), MAX_REQUEST_TOKENS),
    )


async def entities(call: Call, body: EntitiesRequest) -> Reply:
    """Find the entities of each text: label, score and character offsets."""
    result = await run(call, body, call.model(body), _task(body))

    def data() -> list[dict[str, Any]]:
        return [{"index": index, "entities": row} for index, row in enumerate(result.value)]

    return await list_reply(call, body, result, "entities", data)


class TextEntities(msgspec.Struct, kw_only=True):
    """The entities of one text."""

    index: int
    entities: list[Entity]


class EntitiesAnswer(ListAnswer, kw_only=True):
    data: list[TextEntities]


ROUTES = (
    RouteSpec(
        "/v1/entities",
        EntitiesRequest,
        entities,
        "native",
        EntitiesAnswer,
        example={"input": ["Ada Lovelace was born in London."]},
    ),
)
