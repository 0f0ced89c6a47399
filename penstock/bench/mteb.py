"""Lets `mteb` evaluate a model behind a running server.

import mteb
from penstock.bench.mteb import PenstockEncoder
mteb.evaluate(PenstockEncoder("http://127.0.0.1:8000"), mteb.get_tasks(["STSBenchmark"]))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bench.offline.embedders import import_peer
from penstock.bench.quality.server import ServerClient

Vectors = NDArray[np.float32]


class PenstockEncoder:
    """mteb's encoder interface over `/v1/embeddings`.

    `prompt_names` maps mteb's prompt types ("query", "document") to names in the model's prompt table;
    without it, texts are sent as they are.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        model: str | None = None,
        *,
        prompt_names: dict[str, str] | None = None,
        headers: Iterable[str] = (),
    ) -> None:
        self._client = ServerClient(base_url, model, list(headers))
        self._prompt_names = prompt_names or {}

    def encode(self, inputs: Iterable[dict[str, Any]], *, prompt_type: Any = None, **_: Any) -> Vectors:
        """`inputs` yields batches, each a dict with a list of `text`. Other arguments are ignored."""
        texts = [text for batch in inputs for text in batch["text"]]
        kind = getattr(prompt_type, "value", prompt_type)
        name = self._prompt_names.get(kind) if kind is not None else None
        return self._client.embed(texts, **({} if name is None else {"prompt_name": name}))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Vectors:
        """Cosine of each row of `embeddings1` with each row of `embeddings2`."""
        return np.asarray(_unit(embeddings1) @ _unit(embeddings2).T, np.float32)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Vectors:
        return np.asarray((_unit(embeddings1) * _unit(embeddings2)).sum(axis=-1), np.float32)

    @property
    def mteb_model_meta(self) -> Any:
        meta = import_peer("mteb.models.model_meta", "mteb").ModelMeta
        name = self._client.model if "/" in self._client.model else f"penstock/{self._client.model}"
        return meta.create_empty({"name": name, "revision": "served"})

    def close(self) -> None:
        self._client.close()


def _unit(vectors: Any) -> Vectors:
    rows = np.atleast_2d(np.asarray(vectors, np.float32))
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12), np.float32)
