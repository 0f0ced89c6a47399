"""A running server to evaluate: vectors, rankings and token vectors over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bench.offline.embedders import Vectors
from penstock.bench.options import ServerOptions
from penstock.bench.probe import Caller, HttpReply, first_model
from penstock.bench.target import target_of
from penstock.errors import EngineError

_MAX_IN_FLIGHT = 4  # requests in flight
_TEXTS = 64  # texts per request


class ServerClient:
    """Calls the server from several threads, each with its own connection."""

    def __init__(self, base_url: str, model: str | None = None, headers: Sequence[str] = ()) -> None:
        self.target = target_of(ServerOptions(base_url=base_url, header=list(headers)))
        self.model = model or first_model(self.target)
        self._threads = ThreadPoolExecutor(_MAX_IN_FLIGHT, thread_name_prefix="penstock-quality")
        self._local = local()

    def embed(self, texts: Sequence[str], **fields: Any) -> Vectors:
        """Vectors from /v1/embeddings, in order; `fields` are added to each request."""
        parts = [list(texts[i : i + _TEXTS]) for i in range(0, len(texts), _TEXTS)]
        found = self._threads.map(lambda part: self._vectors(part, fields), parts)
        return np.concatenate(list(found))

    def rerank(
        self, query: str, documents: Sequence[str], endpoint: str = "/v1/rerank"
    ) -> NDArray[np.float64]:
        """One score for each document, in the order of the documents."""
        body = {
            "model": self.model,
            "query": query,
            "documents": list(documents),
            "truncate_prompt_tokens": -1,
        }
        results = _list(self._post(endpoint, body), "results", endpoint)
        scores = np.full(len(documents), -np.inf)
        for result in results:
            scores[int(result["index"])] = float(result["relevance_score"])
        return scores

    def token_vectors(self, texts: Sequence[str], input_type: str) -> list[Vectors]:
        """Token vectors from /pooling with task token_embed: [tokens, width] for each text."""
        body = {
            "model": self.model,
            "task": "token_embed",
            "input": list(texts),
            "input_type": input_type,
            "truncate_prompt_tokens": -1,
        }
        return [
            np.asarray(entry["data"], np.float32)
            for entry in _list(self._post("/pooling", body), "data", "/pooling")
        ]

    def rerank_all(
        self, queries: Sequence[str], documents: Sequence[Sequence[str]], endpoint: str = "/v1/rerank"
    ) -> list[NDArray[np.float64]]:
        found = self._threads.map(
            lambda pair: self.rerank(pair[0], pair[1], endpoint), zip(queries, documents, strict=True)
        )
        return list(found)

    def close(self) -> None:
        self._threads.shutdown()

    def _vectors(self, texts: list[str], fields: dict[str, Any]) -> Vectors:
        body = {"model": self.model, "input": texts, "truncate_prompt_tokens": -1, **fields}
        data = _list(self._post("/v1/embeddings", body), "data", "/v1/embeddings")
        ordered = sorted(data, key=lambda entry: int(entry["index"]))
        return np.array([entry["embedding"] for entry in ordered], np.float32)

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        if not hasattr(self._local, "caller"):
            self._local.caller = Caller(self.target, timeout_s=600.0)
        answer: HttpReply = self._local.caller.call("POST", route, body)
        if answer.status != 200:
            raise EngineError(f"{self.target.base_url}{route}: {answer.refusal()}")
        return answer.json()


def _list(answer: Any, key: str, route: str) -> list[Any]:
    found = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(found, list):
        raise EngineError(f"{route} answered without a list `{key}`")
    return found
