"""The APIs that the load client can call: the body of a request, and the check of a response.

A backend is one entry of `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.bench.datasets.item import Item
from penstock.bench.load.plan import Reader
from penstock.bench.options import BackendName
from penstock.errors import BadValue

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Backend:
    """`make(item, model)` builds the body. `missing(answer, item)` describes what a decoded response lacks,
    or returns None."""

    endpoint: str
    make: Callable[[Item, str], Body]
    missing: Callable[[Any, Item], str | None]
    tasks: frozenset[str]  # the model must support one of them
    reader: Reader = "body"
    generates: bool = False
    applies_chat_template: bool = False  # the server does
    names_model: bool = True  # whether requests carry the model's name
    rank_endpoint: str | None = None  # for items with a query, if it differs from `endpoint`

    def endpoint_for(self, item: Item) -> str:
        return self.endpoint if item.query is None else self.rank_endpoint or self.endpoint


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


def _score(item: Item, model: str) -> Body:
    query = _query_of(item, "vllm-score")
    return {"model": model, "text_1": query, "text_2": item.prompt, "truncate_prompt_tokens": -1}


def _rerank(item: Item, model: str) -> Body:
    query = _query_of(item, "vllm-rerank")
    return {"model": model, "query": query, "documents": item.prompt, "truncate_prompt_tokens": -1}


def _plain_rerank(backend: str) -> Callable[[Item, str], Body]:
    """The body for Cohere's and Infinity's APIs, whose servers truncate by default."""

    def make(item: Item, model: str) -> Body:
        return {"model": model, "query": _query_of(item, backend), "documents": item.prompt}

    return make


def _texts_of(item: Item, backend: str) -> list[str]:
    prompt = _prompt_of(item)
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not all(isinstance(text, str) for text in texts):
        raise BadValue(f"--backend {backend} needs prompts that are texts", param="dataset_name")
    return texts


def _cohere_embed(item: Item, model: str) -> Body:
    return {
        "model": model,
        "texts": _texts_of(item, "cohere-embed"),
        "input_type": "search_document",
        "embedding_types": ["float"],
        "truncate": "END",
    }


def _ollama_embed(item: Item, model: str) -> Body:
    return {"model": model, "input": _texts_of(item, "ollama-embed"), "truncate": True}


def _tei(item: Item, model: str) -> Body:
    if item.query is not None:
        return {"query": item.query, "texts": item.prompt, "truncate": True}
    return {"inputs": item.prompt, "truncate": True}


def _tei_predict(item: Item, model: str) -> Body:
    return {"inputs": [[text] for text in _texts_of(item, "tei-predict")], "truncate": True}


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
    """Require at least one result. There may be fewer results than documents, if the request has a top_n."""

    def missing(answer: Any, item: Item) -> str | None:
        found = answer.get(key) if isinstance(answer, dict) else None
        return None if isinstance(found, list) and found else f"a list `{key}`"

    return missing


def _embeddings_at(*path: str) -> Callable[[Any, Item], str | None]:
    """Require as many vectors as inputs, below these keys."""
    *outer, last = path
    is_complete = _list_of(last)

    def missing(answer: Any, item: Item) -> str | None:
        for key in outer:
            answer = answer.get(key) if isinstance(answer, dict) else None
        return is_complete(answer, item)

    return missing


def _bare_list(answer: Any, item: Item) -> str | None:
    right = isinstance(answer, list) and len(answer) == item.rows
    return None if right else f"a list of {item.rows}"


def _nothing(answer: Any, item: Item) -> str | None:
    return None


_EMBED, _CLASSIFY, _SCORE = frozenset({"embed"}), frozenset({"classify"}), frozenset({"score"})
_POOLING = frozenset(
    {"embed", "token_embed", "sparse", "classify", "token_classify", "reward", "score"}  # any but generation
)
_GENERATE = frozenset({"generate"})
_COMPLETIONS = Backend("/v1/completions", _completion, _nothing, _GENERATE, reader="stream", generates=True)

BACKENDS: dict[BackendName, Backend] = {
    BackendName.OPENAI_EMBEDDINGS: Backend("/v1/embeddings", _embeddings, _list_of("data"), _EMBED),
    BackendName.OPENAI_EMBEDDINGS_CHAT: Backend(
        "/v1/embeddings", _embeddings_chat, _list_of("data"), _EMBED, applies_chat_template=True
    ),
    BackendName.VLLM_POOLING: Backend("/pooling", _pooling, _list_of("data"), _POOLING),
    BackendName.VLLM_CLASSIFY: Backend("/classify", _embeddings, _list_of("data"), _CLASSIFY),
    BackendName.VLLM_SCORE: Backend("/v1/score", _score, _list_of("data"), _SCORE),
    BackendName.VLLM_RERANK: Backend("/v1/rerank", _rerank, _some_of("results"), _SCORE),
    BackendName.COHERE_EMBED: Backend(
        "/v2/embed", _cohere_embed, _embeddings_at("embeddings", "float"), _EMBED
    ),
    BackendName.COHERE_RERANK: Backend(
        "/v2/rerank", _plain_rerank("cohere-rerank"), _some_of("results"), _SCORE
    ),
    BackendName.TEI: Backend(
        "/embed",
        _tei,
        _bare_list,
        _EMBED | _SCORE,
        reader="header",
        names_model=False,
        rank_endpoint="/rerank",
    ),
    BackendName.TEI_PREDICT: Backend(
        "/predict", _tei_predict, _bare_list, _CLASSIFY, reader="header", names_model=False
    ),
    BackendName.INFINITY: Backend("/embeddings", _infinity, _list_of("data"), _EMBED),
    BackendName.INFINITY_RERANK: Backend(
        "/rerank", _plain_rerank("infinity-rerank"), _some_of("results"), _SCORE
    ),
    BackendName.OLLAMA_EMBED: Backend("/api/embed", _ollama_embed, _embeddings_at("embeddings"), _EMBED),
    BackendName.OPENAI: _COMPLETIONS,
    BackendName.OPENAI_CHAT: Backend(
        "/v1/chat/completions",
        _chat,
        _nothing,
        _GENERATE,
        reader="stream",
        generates=True,
        applies_chat_template=True,
    ),
    BackendName.VLLM: _COMPLETIONS,
}

# The backend to suggest for each task of a model.
_USUAL = {
    "embed": BackendName.OPENAI_EMBEDDINGS,
    "classify": BackendName.VLLM_CLASSIFY,
    "score": BackendName.VLLM_RERANK,
    "generate": BackendName.OPENAI,
}


def fitting_backends(name: BackendName, tasks: Sequence[str]) -> list[BackendName]:
    """Backends to suggest for a model with these tasks; none if `name` is suitable."""
    if BACKENDS[name].tasks & set(tasks):
        return []
    usual = [backend for task, backend in _USUAL.items() if task in tasks]
    return usual or [BackendName.VLLM_POOLING]
