"""Embeddings over HTTP equal those of the offline engine, in every encoding and data type."""

from __future__ import annotations

import base64
import json

import httpx
import numpy as np
import openai
import pytest

from penstock import Engine
from tests.e2e.server import Server

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = ["The cat sits on the mat.", "Ein Satz auf Deutsch.", "数学", "🙂"]


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    with Engine(device="cpu") as engine:
        return engine.embed(TEXTS)


def post(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/v1/embeddings", json={"model": MODEL, **body})


def vectors(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.array([row["embedding"] for row in response.json()["data"]], dtype=np.float32)


def test_texts_become_unit_vectors_equal_to_those_of_the_offline_engine(
    http: httpx.Client, expected: np.ndarray
) -> None:
    response = post(http, input=TEXTS)
    got = vectors(response)
    assert got.shape == (4, 384)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    body = response.json()
    assert [row["index"] for row in body["data"]] == [0, 1, 2, 3]
    assert body["model"] == MODEL
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 8


def test_input_may_be_a_text_or_token_ids_alone_or_in_a_list(
    http: httpx.Client, expected: np.ndarray
) -> None:
    ids = http.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    for form in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        np.testing.assert_allclose(vectors(post(http, input=form))[0], expected[0], atol=1e-5)


def test_the_model_name_is_optional(http: httpx.Client) -> None:
    assert http.post("/v1/embeddings", json={"input": "x"}).status_code == 200


def test_base64_holds_the_same_floats(http: httpx.Client, expected: np.ndarray) -> None:
    rows = post(http, input=TEXTS, encoding_format="base64").json()["data"]
    got = np.stack([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in rows])
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_big_endian_reverses_the_byte_order(http: httpx.Client, expected: np.ndarray) -> None:
    row = post(http, input=TEXTS[0], encoding_format="base64", endianness="big").json()["data"][0]
    np.testing.assert_allclose(
        np.frombuffer(base64.b64decode(row["embedding"]), ">f4"), expected[0], atol=1e-5
    )


def test_bytes_are_described_in_the_metadata_header(http: httpx.Client, expected: np.ndarray) -> None:
    response = post(http, input=TEXTS, encoding_format="bytes", embed_dtype="float16")
    metadata = json.loads(response.headers["metadata"])
    assert response.headers["content-type"] == "application/octet-stream"
    assert metadata["usage"]["prompt_tokens"] > 0
    for row in metadata["data"]:
        got = np.frombuffer(response.content[row["start"] : row["end"]], "<f2")
        assert row["shape"] == [384]
        np.testing.assert_allclose(got, expected[row["index"]], atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8"])
def test_every_dtype_keeps_the_direction(http: httpx.Client, expected: np.ndarray, dtype: str) -> None:
    got = vectors(post(http, input=TEXTS, embed_dtype=dtype))
    if dtype == "uint8":
        got = got - 128
    got /= np.linalg.norm(got, axis=1, keepdims=True)
    assert (got * expected).sum(1).min() > 0.999


@pytest.mark.parametrize("dtype", ["binary", "ubinary"])
def test_binary_packs_the_signs(http: httpx.Client, expected: np.ndarray, dtype: str) -> None:
    got = vectors(post(http, input=TEXTS, embed_dtype=dtype)).astype(np.int64)
    bits = np.packbits(expected > 0, axis=1).astype(np.int64)
    np.testing.assert_array_equal(got, bits - 128 if dtype == "binary" else bits)


def test_dimensions_truncates_and_renormalises(http: httpx.Client, expected: np.ndarray) -> None:
    got = vectors(post(http, input=TEXTS, dimensions=64))
    cut = expected[:, :64] / np.linalg.norm(expected[:, :64], axis=1, keepdims=True)
    np.testing.assert_allclose(got, cut, atol=1e-5)


def test_normalisation_can_be_turned_off(http: httpx.Client) -> None:
    for field in ("normalize", "use_activation"):
        raw = vectors(post(http, input=TEXTS, **{field: False}))
        assert abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.01


def test_a_prompt_is_put_before_the_text(http: httpx.Client, expected: np.ndarray) -> None:
    got = vectors(post(http, input="sits on the mat.", prompt="The cat "))
    np.testing.assert_allclose(got[0], expected[0], atol=1e-5)


def test_truncation_cuts_on_the_requested_side(http: httpx.Client) -> None:
    words = " ".join(f"word{i}" for i in range(400))
    right = post(http, input=words, truncate_prompt_tokens=-1)
    left = post(http, input=words, truncate_prompt_tokens=-1, truncation_side="left")
    assert right.json()["usage"]["prompt_tokens"] == left.json()["usage"]["prompt_tokens"] == 256
    assert float(vectors(right)[0] @ vectors(left)[0]) < 0.99
    assert post(http, input=words, truncate_prompt_tokens=16).json()["usage"]["prompt_tokens"] == 16


def test_special_tokens_are_optional(http: httpx.Client) -> None:
    used = [
        post(http, input="cat", add_special_tokens=flag).json()["usage"]["prompt_tokens"]
        for flag in (True, False)
    ]
    assert used == [3, 1]


def test_response_headers_carry_the_request_id_and_four_timings(http: httpx.Client) -> None:
    response = post(http, input="x", request_id="abc-1", user="someone", priority=-3, timeout=30)
    assert response.headers["x-request-id"] == "abc-1"
    times = [float(response.headers[f"x-{name}-ms"]) for name in ("tokenize", "queue", "device", "total")]
    assert all(value >= 0 for value in times) and times[2] > 0
    assert sum(times[:3]) <= times[3] + 1


def test_the_openai_client_works_unchanged(server: Server, expected: np.ndarray) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    for kind in ("float", "base64"):
        answer = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format=kind)
        if kind == "float":
            np.testing.assert_allclose([row.embedding for row in answer.data], expected, atol=1e-5)
    defaulted = client.embeddings.create(model=MODEL, input=TEXTS)
    np.testing.assert_allclose([row.embedding for row in defaulted.data], expected, atol=1e-5)
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nope", input="x")


def test_many_rows_of_one_request_come_back_in_order(http: httpx.Client) -> None:
    texts = [f"{'long ' * (i % 40)}text number {i}" for i in range(300)]
    together = vectors(post(http, input=texts))
    for i in (0, 39, 155, 299):
        np.testing.assert_allclose(vectors(post(http, input=texts[i]))[0], together[i], atol=1e-5)
