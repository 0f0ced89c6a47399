"""Zero-shot classification: labels that come with the request."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.api.answers import ListAnswer
from penstock.api.call import Call, Reply
from penstock.api.fields import CacheSalt, User
from penstock.api.replies import list_reply
from penstock.api.routes import RouteSpec
from penstock.api.run import run
from penstock.inputs.long_texts import MAX_REQUEST_TOKENS
from penstock.tasks.zero_shot import DEFAULT_HYPOTHESIS, ZeroShotOptions, zero_shot_task


class ZeroShotRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/zero-shot`."""

    input: str | list[str]
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
    """Score labels that come with the request for each text, the best first."""
    model = call.model(body)
    task = zero_shot_task(model.text, body.input, body.labels, body.options())
    result = await run(call, body, model, task)

    def data() -> list[dict[str, Any]]:
        return [
            {"index": index, "labels": row.labels, "scores": row.scores}
            for index, row in enumerate(result.value)
        ]

    return await list_reply(call, body, result, "zero-shot", data)


class ZeroShotEntry(msgspec.Struct, kw_only=True):
    """The labels of the request with their scores for one text, the best first."""

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
