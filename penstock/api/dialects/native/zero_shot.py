"""Zero-shot classification: labels that come with the request."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.api.answers import ListAnswer
from penstock.api.call import Call, Reply
from penstock.api.fields import CacheSalt, User
from penstock.api.images import image_source, with_images
from penstock.api.replies import list_reply
from penstock.api.routes import RouteSpec
from penstock.api.run import run
from penstock.api.state import ServedModel
from penstock.inputs.long_texts import MAX_REQUEST_TOKENS
from penstock.tasks.zero_shot import DEFAULT_HYPOTHESIS, ZeroShotOptions, zero_shot_task


class ZeroShotImage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An image among the inputs, for a model that compares images with texts."""

    image: str  # a data URI, base64, the id of an uploaded file, or an allowed URL


class ZeroShotRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/zero-shot`."""

    input: str | ZeroShotImage | list[str | ZeroShotImage]
    labels: list[str]
    model: str | None = None
    adapter: str | None = None
    multi_label: bool = False
    hypothesis_template: str = DEFAULT_HYPOTHESIS
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    timeout: float | None = None
    request_id: str | None = None
    user: User = None
    cache_salt: CacheSalt = ""

    def options(self) -> ZeroShotOptions:
        return ZeroShotOptions(
            hypothesis_template=self.hypothesis_template,
            multi_label=self.multi_label,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            cache_salt=self.cache_salt,
            max_request_tokens=MAX_REQUEST_TOKENS,
        )


async def zero_shot(call: Call, body: ZeroShotRequest) -> Reply:
    """Score labels that come with the request for each text or image, the best first."""
    model = call.model(body)
    inputs = await _inputs(call, model, body.input)
    task = zero_shot_task(model.text, inputs, body.labels, body.options())
    result = await run(call, body, model, task)

    def data() -> list[dict[str, Any]]:
        return [
            {"index": index, "labels": row.labels, "scores": row.scores}
            for index, row in enumerate(result.value)
        ]

    return await list_reply(call, body, result, "zero-shot", data)


async def _inputs(
    call: Call, model: ServedModel, given: str | ZeroShotImage | list[str | ZeroShotImage]
) -> Any:
    """The inputs with their images prepared."""
    items = given if isinstance(given, list) else [given]
    if not any(isinstance(item, ZeroShotImage) for item in items):
        return given
    sources = [
        (image_source(item.image, "input"),) if isinstance(item, ZeroShotImage) else item for item in items
    ]
    return await with_images(call, model, sources, "input")


class ZeroShotEntry(msgspec.Struct, kw_only=True):
    """The labels of the request with their scores for one text or image, the best first."""

    index: int
    labels: list[str]
    scores: list[float]


class ZeroShotAnswer(ListAnswer, kw_only=True):
    data: list[ZeroShotEntry]


ROUTES = (
    RouteSpec(
        "/v1/zero-shot",
        ZeroShotRequest,
        zero_shot,
        "native",
        ZeroShotAnswer,
        example={"input": ["The match ended in a draw."], "labels": ["sport", "politics"]},
    ),
)
