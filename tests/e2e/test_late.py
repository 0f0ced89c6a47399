"""Token vectors of a late-interaction model, served over HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from penstock import Engine
from tests.checkpoints import write_late
from tests.e2e.server import serving_here

TEXTS = ["the water, was long.", "find a word", "oil"]
DIM = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_late(tmp_path_factory.mktemp("models") / "late", DIM)


@pytest.fixture(scope="module")
def late_http(folder: Path) -> Iterator[httpx.Client]:
    with serving_here(folder) as http:
        yield http


def post(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/pooling", json={"input": TEXTS, **body})


@pytest.mark.parametrize("kind", ["query", "document", None])
def test_token_vectors_equal_those_of_the_offline_engine(
    late_http: httpx.Client, folder: Path, kind: str | None
) -> None:
    with Engine(str(folder), device="cpu", threads=1) as engine:
        expected = engine.token_embed(TEXTS, input_type=kind)
    assert [len(row) for row in expected] == ([12] * 3 if kind == "query" else [7, 6, 4])
    options = {} if kind is None else {"input_type": kind}
    numbers = post(late_http, task="token_embed", **options).json()["data"]
    texts = post(late_http, encoding_format="base64", **options).json()[
        "data"
    ]  # without a task: token_embed, the model's first
    for row, as_numbers, as_text in zip(expected, numbers, texts, strict=True):
        np.testing.assert_allclose(as_numbers["data"], row, atol=1e-5)
        raw = np.frombuffer(base64.b64decode(as_text["data"]), dtype="<f4").reshape(-1, DIM)
        np.testing.assert_allclose(raw, row, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(raw, axis=1), 1, atol=1e-5)


def test_bytes_hold_only_the_kept_vectors(late_http: httpx.Client) -> None:
    reply = post(late_http, encoding_format="bytes")
    metadata = json.loads(reply.headers["metadata"])["data"]
    assert [entry["shape"] for entry in metadata] == [[7, DIM], [6, DIM], [4, DIM]]
    assert metadata[-1]["end"] == len(reply.content) == 17 * DIM * 4


def test_the_embeddings_route_is_refused_with_the_tasks_of_the_model(late_http: httpx.Client) -> None:
    reply = late_http.post("/v1/embeddings", json={"input": "oil"})
    assert reply.status_code == 422 and "token_embed, score" in reply.text
