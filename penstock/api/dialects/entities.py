"""Named entities: what a token classifier finds, as spans of the text."""

from __future__ import annotations

from typing import Any

from penstock.api.endpoint import Call, Reply
from penstock.api.fields import InputFields
from penstock.api.replies import list_reply
from penstock.api.run import run
from penstock.outputs.entities import Aggregation
from penstock.tasks.entities import FindEntities


class EntitiesRequest(InputFields, kw_only=True):
    """Body of `POST /v1/entities`."""

    aggregation: Aggregation = "simple"


async def entities(call: Call, body: EntitiesRequest) -> Reply:
    """Find the entities of each text: label, score and character offsets."""
    model = call.state.model(body.model)
    task = FindEntities(
        inputs=body.input, options=body.options(), aggregation=body.aggregation, allows_empty_text=False
    )
    result = await run(call, body, model, task)

    def data() -> list[dict[str, Any]]:
        return [{"index": index, "entities": row} for index, row in enumerate(result.value)]

    return await list_reply(call, body, result, "entities", data)
