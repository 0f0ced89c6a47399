"""Long texts over HTTP: one vector from chunks, and late chunking with offsets."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from penstock import Engine
from tests.checkpoints import write_bert, write_json
from tests.e2e.server import Server, serving_here

LONG = " ".join(f"The river carries word number {i} down to the sea." for i in range(80))
SHORT = "A penstock feeds a turbine. Water under pressure turns it, and the lights go on."


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(device="cpu", threads=1) as opened:
        yield opened


def post(http: httpx.Client, path: str = "/v1/embeddings", **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_long_text_has_one_vector(http: httpx.Client, engine: Engine) -> None:
    answer = post(http, input=[LONG, SHORT], chunking="mean")
    got = np.array([row["embedding"] for row in answer["data"]])
    np.testing.assert_allclose(got, engine.embed([LONG, SHORT], chunking="mean"), atol=1e-5)
    np.testing.assert_allclose(got[1], engine.embed([SHORT])[0], atol=1e-5)
    bodies = sum(len(row) for row in engine.tokenize([LONG, SHORT], add_special_tokens=False))
    parts = -(-(len(engine.tokenize([LONG])[0]) - 2) // 254)
    assert answer["usage"]["prompt_tokens"] == bodies + 2 * (parts + 1)
    assert "chunks" not in answer["data"][0]


def test_late_chunks_come_with_their_offsets(http: httpx.Client, engine: Engine) -> None:
    answer = post(http, input=[SHORT, "sea"], chunking="late", chunk_size=7)
    wanted, _ = engine.embed_chunks([SHORT, "sea"], chunk_size=7)
    first, second = answer["data"]
    assert [chunk["index"] for chunk in first["chunks"]] == [0, 1, 2]
    assert len(second["chunks"]) == 1
    got = np.array([chunk["embedding"] for chunk in first["chunks"]])
    np.testing.assert_allclose(got, wanted.vectors, atol=1e-5)
    np.testing.assert_allclose(first["embedding"], engine.embed([SHORT])[0], atol=1e-5)
    assert first["chunks"][0]["start_token"] == 0
    words = " ".join(SHORT[chunk["start_char"] : chunk["end_char"]] for chunk in first["chunks"])
    assert words == SHORT
    assert answer["usage"]["prompt_tokens"] == first["chunks"][-1]["end_token"] + 3


def test_chunks_may_be_given_as_character_spans(http: httpx.Client, engine: Engine) -> None:
    spans = [(0, 27), (28, len(SHORT))]
    (item,) = post(http, input=SHORT, chunking="late", chunk_spans=[spans])["data"]
    assert [(chunk["start_char"], chunk["end_char"]) for chunk in item["chunks"]] == spans
    (wanted,) = engine.embed_chunks([SHORT], chunk_spans=[spans])
    got = [chunk["embedding"] for chunk in item["chunks"]]
    np.testing.assert_allclose(got, wanted.vectors, atol=1e-5)
    np.testing.assert_allclose(item["embedding"], engine.embed([SHORT])[0], atol=1e-5)


def test_late_chunks_can_be_encoded_truncated_and_cast(http: httpx.Client) -> None:
    plain = post(http, input=SHORT, chunking="late", chunk_size=7)["data"][0]["chunks"]
    fields = {"encoding_format": "base64", "dimensions": 64, "embed_dtype": "float16"}
    coded = post(http, input=SHORT, chunking="late", chunk_size=7, **fields)["data"][0]["chunks"]
    for one, other in zip(plain, coded, strict=True):
        got = np.frombuffer(base64.b64decode(other["embedding"]), "<f2")
        cut = np.array(one["embedding"][:64])
        np.testing.assert_allclose(got, cut / np.linalg.norm(cut), atol=1e-3)


def test_the_pooling_route_takes_chunking_for_embed(http: httpx.Client, engine: Engine) -> None:
    (item,) = post(http, "/pooling", input=LONG, task="embed", chunking="mean")["data"]
    np.testing.assert_allclose(item["data"], engine.embed([LONG], chunking="mean")[0], atol=1e-5)
    (item,) = post(http, "/pooling", input=SHORT, task="embed", chunking="late")["data"]
    assert len(item["chunks"]) == 1


def test_chunks_of_token_ids_have_no_character_offsets(http: httpx.Client) -> None:
    (item,) = post(http, input=[101, 2300, 2300, 102], chunking="late", chunk_size=2)["data"]
    assert [chunk["start_char"] for chunk in item["chunks"]] == [None, None]


def test_the_openai_client_reads_the_vector_of_the_whole_text(server: Server, engine: Engine) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(
            model="sentence-transformers/all-MiniLM-L6-v2", input=SHORT, extra_body={"chunking": "late"}
        )
    np.testing.assert_allclose(answer.data[0].embedding, engine.embed([SHORT])[0], atol=1e-5)


CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "unknown": ("/v1/embeddings", {"chunking": "early"}, "chunking", "early"),
    "zero": ("/v1/embeddings", {"chunking": "late", "chunk_size": 0}, "chunk_size", "at least 1"),
    "text": ("/v1/embeddings", {"chunking": "late", "chunk_size": "7"}, "chunk_size", "int"),
    "size alone": ("/v1/embeddings", {"chunk_size": 7}, "chunk_size", "late"),
    "spans as numbers": ("/v1/embeddings", {"chunking": "late", "chunk_spans": [3]}, "chunk_spans", "array"),
    "spans beyond": (
        "/v1/embeddings",
        {"chunking": "late", "chunk_spans": [[[0, 999]]]},
        "chunk_spans",
        "0 to",
    ),
    "late beyond the limit": ("/v1/embeddings", {"chunking": "late", "input": LONG}, "input", "256"),
    "bytes": ("/v1/embeddings", {"chunking": "late", "encoding_format": "bytes"}, "encoding_format", "bytes"),
    "truncated": (
        "/v1/embeddings",
        {"chunking": "mean", "truncate_prompt_tokens": -1},
        "truncate_prompt_tokens",
        "whole",
    ),
    "other task": ("/pooling", {"chunking": "mean", "task": "token_embed"}, "chunking", "token_embed"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_value_is_a_400_that_names_the_field(http: httpx.Client, name: str) -> None:
    path, body, param, words = CASES[name]
    response = http.post(path, json={"input": SHORT} | body)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["param"] == param and words in error["message"]


def test_late_chunks_of_a_cls_model_are_a_422(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "cls")
    write_json(folder / "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    with serving_here(folder) as http:
        response = http.post("/v1/embeddings", json={"input": "the water", "chunking": "late"})
        assert response.status_code == 422
        assert "pools by cls" in response.json()["error"]["message"]
        assert http.post("/v1/embeddings", json={"input": "the water"}).status_code == 200
