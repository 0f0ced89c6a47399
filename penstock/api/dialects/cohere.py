"""The dialect of Cohere."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from penstock.api.endpoint import Call, Reply
from penstock.api.error_styles import ErrorStyle
from penstock.api.ranking import RerankRequest, ranked_rows, returned_documents, run_ranking, search_units
from penstock.api.replies import json_reply, record_phases
from penstock.api.routes import RouteSpec
from penstock.errors import PenstockError
from penstock.inputs.pair_options import PairOptions


class CohereRerankRequest(RerankRequest, kw_only=True):
    """Body of `POST /v2/rerank`. As at Cohere, texts beyond the model's limit are truncated."""

    def options(self) -> PairOptions:
        options = super().options()
        return replace(options, truncate_prompt_tokens=-1) if self.truncate_prompt_tokens is None else options


async def cohere_rerank(call: Call, body: CohereRerankRequest) -> Reply:
    """Rank documents from best to worst, in the shape of Cohere's v2 API."""
    documents = returned_documents(body)
    result = await run_ranking(call, body)
    began = time.monotonic()
    meta = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": search_units(body)},
        "tokens": {"input_tokens": result.request.num_tokens},
    }
    name = result.head(body, "rerank")["id"]
    reply = json_reply({"id": name, "results": ranked_rows(body, result.value, documents), "meta": meta})
    record_phases(call, began)
    return reply


def cohere_error(error: PenstockError) -> dict[str, Any]:
    return {"message": error.message}


COHERE_ERRORS = ErrorStyle(cohere_error)
ROUTES = (RouteSpec("/v2/rerank", CohereRerankRequest, cohere_rerank, "Cohere", errors=COHERE_ERRORS),)
