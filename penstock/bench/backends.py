"""The APIs that the load client can call: the body of a request, and the check of a response.

A backend is one entry of `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.bench.datasets.item import Item
from penstock.bench.load.plan import Reader
from penstock.bench.options import BackendName
from penstock.errors import BadValue

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Backend:
    """`make(item, model)` builds the body; `missing(answer, item)` names what a decoded response lacks."""

    endpoint: str
    make: Callable[[Item, str], Body]
    missing: Callable[[Any, Item], str | None]
    reader: Reader = "body"
    generates: bool = False
    applies_chat_template: bool = False  # by the server


def _query_of(item: Item, backend: str) -> str:
    if item.query is None:
        raise BadValue(
            f"--backend {backend} needs queries with documents: use --dataset-name random-rerank, or custom "
            "with `query` and `documents`",
            param="dataset_name",
        )
    return item.query


def _prompt_of(item: Item) -> Any:
    if item.query is not None:
        raise BadValue("this data set is for ranking; use a rerank backend", param="dataset_name")
    return item.prompt


def _messages(item: Item) -> list[dict[str, Any]]:
    prompt = _prompt_of(item)
    if isinstance(prompt, list) and all(isinstance(part, dict) and "role" in part for part in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise BadValue("a chat backend needs prompts that are texts or messages", param="dataset_name")
    return [{"role": "user", "content": prompt}]


def _embeddings(item: Item, model: str) -> Body:
    # Truncate at the model's limit: many embedders take few tokens, and a refused request measures nothing.
    return {"model": model, "input": _prompt_of(item), "truncate_prompt_tokens": -1}


def _embeddings_chat(item: Item, model: str) -> Body:
    return {"model": model, "messages": _messages(item), "truncate_prompt_tokens": -1}


def _pooling(item: Item, model: str) -> Body:
    prompt = _prompt_of(item)
    fields = prompt if isinstance(prompt, dict) else {"input": prompt}
    return {"model": model, "truncate_prompt_tokens": -1} | fields


def _rerank(item: Item, model: str) -> Body:
    query = _query_of(item, "vllm-rerank")
    return {"model": model, "query": query, "documents": item.prompt, "truncate_prompt_tokens": -1}


def _cohere_rerank(item: Item, model: str) -> Body:
    return {"model": model, "query": _query_of(item, "cohere-rerank"), "documents": item.prompt}


def _tei(item: Item, model: str) -> Body:
    if item.query is not None:
        return {"query": item.query, "texts": item.prompt, "truncate": True}
    return {"inputs": item.prompt, "truncate": True}


def _infinity(item: Item, model: str) -> Body:
    return {"model": model, "input": _prompt_of(item)}


def _completion(item: Item, model: str) -> Body:
    return {
        "model": model,
        "prompt": _prompt_of(item),
        "max_tokens": item.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _chat(item: Item, model: str) -> Body:
    return {
        "model": model,
        "messages": _messages(item),
        "max_completion_tokens": item.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _list_of(key: str) -> Callable[[Any, Item], str | None]:
    def missing(answer: Any, item: Item) -> str | None:
        found = answer.get(key) if isinstance(answer, dict) else None
        if not isinstance(found, list):
            return f"a list `{key}`"
        return None if len(found) == item.rows else f"{item.rows} entries in `{key}` (it has {len(found)})"

    return missing


def _some_of(key: str) -> Callable[[Any, Item], str | None]:
    """At least one result; fewer than the documents if the request has a top_n."""

    def missing(answer: Any, item: Item) -> str | None:
        found = answer.get(key) if isinstance(answer, dict) else None
        return None if isinstance(found, list) and found else f"a list `{key}`"

    return missing


def _bare_list(answer: Any, item: Item) -> str | None:
    right = isinstance(answer, list) and len(answer) == item.rows
    return None if right else f"a list of {item.rows}"


def _nothing(answer: Any, item: Item) -> str | None:
    return None


BACKENDS: dict[BackendName, Backend] = {
    BackendName.OPENAI_EMBEDDINGS: Backend("/v1/embeddings", _embeddings, _list_of("data")),
    BackendName.OPENAI_EMBEDDINGS_CHAT: Backend(
        "/v1/embeddings", _embeddings_chat, _list_of("data"), applies_chat_template=True
    ),
    BackendName.VLLM_POOLING: Backend("/pooling", _pooling, _list_of("data")),
    BackendName.VLLM_RERANK: Backend("/v1/rerank", _rerank, _some_of("results")),
    BackendName.COHERE_RERANK: Backend("/v2/rerank", _cohere_rerank, _some_of("results")),
    BackendName.TEI: Backend("/embed", _tei, _bare_list, reader="header"),
    BackendName.INFINITY: Backend("/embeddings", _infinity, _list_of("data")),
    BackendName.OPENAI: Backend("/v1/completions", _completion, _nothing, reader="stream", generates=True),
    BackendName.OPENAI_CHAT: Backend(
        "/v1/chat/completions", _chat, _nothing, reader="stream", generates=True, applies_chat_template=True
    ),
}
