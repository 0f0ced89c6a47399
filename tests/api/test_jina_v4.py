"""jina-embeddings-v4 over HTTP: Jina's task names, images, and one vector per token."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from penstock import Engine
from tests.api.local_app import local_app
from tests.inputs.images.pictures import encoded, noise
from tests.parity.jina_v4 import DIM, JinaV4

PICTURE = noise(50, 38)
URI = "data:image/png;base64," + base64.b64encode(encoded(PICTURE)).decode()
INPUT = [{"text": "the page of the book"}, {"image": URI}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("jina") / "jina-embeddings-v4"
    JinaV4(made)
    return made


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[TestClient]:
    with local_app(folder, dtype="float32") as (client, _):
        yield client


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", dtype="float32", threads=1) as engine:
        yield engine


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("retrieval.query", {"adapter": "retrieval", "prompt_name": "query"}),
        ("retrieval.passage", {"adapter": "retrieval", "prompt_name": "passage"}),
        ("text-matching", {"adapter": "text-matching"}),
        ("code.query", {"adapter": "code", "prompt_name": "query"}),
        ("code.passage", {"adapter": "code", "prompt_name": "passage"}),
    ],
)
def test_jina_task_names_choose_the_adapter(
    http: TestClient, engine: Engine, task: str, options: dict[str, Any]
) -> None:
    inputs = ["the page of the book", PICTURE]
    answer = http.post("/v1/embeddings", json={"input": INPUT, "task": task})
    assert answer.status_code == 200, answer.text
    got = np.array([row["embedding"] for row in answer.json()["data"]])
    assert np.abs(got - engine.embed(inputs, **options)).max() < 1e-5
    body = {"input": INPUT, "task": task, "return_multivector": True}
    rows = http.post("/v1/embeddings", json=body).json()["data"]
    for row, wanted in zip(rows, engine.token_embed(inputs, **options), strict=True):
        assert np.array(row["embeddings"]).shape == wanted.shape and wanted.shape[1] == DIM
        assert np.abs(np.array(row["embeddings"]) - wanted).max() < 1e-5


def test_a_request_without_a_task_and_an_input_of_both_kinds_are_refused(http: TestClient) -> None:
    for body, words in (
        ({"input": INPUT}, "needs an adapter for each request"),
        ({"input": [{"text": "a", "image": URI}], "task": "code.query"}, "a text or one image, not both"),
        ({"input": INPUT, "task": "separation"}, "separation"),
    ):
        answer = http.post("/v1/embeddings", json=body)
        assert 400 <= answer.status_code < 500 and words in answer.text, answer.text
