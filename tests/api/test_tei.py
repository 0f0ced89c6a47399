"""TEI's routes, field by field: answers, errors and headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from starlette.testclient import TestClient

from penstock.api.pipelines import TEI_ERRORS
from penstock.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    PenstockError,
    QueueFull,
    RowFailed,
    Unauthorized,
)
from tests.api.local_app import local_app
from tests.checkpoints import write_bert, write_cross_encoder, write_splade

TEXTS = ["the water was long", "find a word"]
LONG = "water " * 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bert(tmp_path_factory.mktemp("bert"))
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "find the word: "}}')
    return folder


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[TestClient]:
    with local_app(folder) as (client, _):
        yield client


@pytest.fixture(scope="module")
def moods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with local_app(write_cross_encoder(tmp_path_factory.mktemp("moods"), labels=3)) as (client, _):
        yield client


def ask(http: TestClient, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def v1(http: TestClient, texts: Any, **body: Any) -> np.ndarray:
    rows = ask(http, "/v1/embeddings", input=texts, **body)["data"]
    return np.array([row["embedding"] for row in rows])


def refused(http: TestClient, path: str, status: int, kind: str, **body: Any) -> str:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error", "error_type"} and answer.json()["error_type"] == kind
    message: str = answer.json()["error"]
    return message


def test_embed_answers_a_bare_list_of_vectors(http: TestClient) -> None:
    expected = v1(http, TEXTS)
    np.testing.assert_allclose(ask(http, "/embed", inputs=TEXTS), expected, atol=1e-6)
    np.testing.assert_allclose(ask(http, "/embed", inputs=TEXTS[0]), expected[:1], atol=1e-6)
    ids = [token["id"] for token in ask(http, "/tokenize", inputs=TEXTS[0])[0]]
    for inputs in (ids, [ids]):
        np.testing.assert_allclose(ask(http, "/embed", inputs=inputs), expected[:1], atol=1e-6)


def test_embed_normalises_unless_told_otherwise(http: TestClient) -> None:
    raw = np.array(ask(http, "/embed", inputs=TEXTS, normalize=False))
    unit = np.array(ask(http, "/embed", inputs=TEXTS))
    assert abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.01
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), unit, atol=1e-5)
    short = np.array(ask(http, "/embed", inputs=TEXTS, dimensions=4))
    assert short.shape == (2, 4)
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, atol=1e-5)


def test_embed_puts_the_named_prompt_before_the_text(http: TestClient) -> None:
    expected = v1(http, ["find the word: " + TEXTS[0]])
    for body in ({"prompt_name": "query"}, {"prompt": "find the word: "}, {"model": "model:query"}):
        np.testing.assert_allclose(ask(http, "/embed", inputs=TEXTS[0], **body), expected, atol=1e-6)
    assert "query" in refused(http, "/embed", 413, "Validation", inputs="a", prompt_name="none")


def test_long_texts_are_cut_unless_the_body_or_the_operator_objects(http: TestClient, folder: Path) -> None:
    cut = http.post("/embed", json={"inputs": [LONG, "a"]})
    assert cut.headers["x-truncated-rows"] == "1"
    np.testing.assert_allclose(cut.json(), v1(http, [LONG, "a"], truncate_prompt_tokens=-1), atol=1e-6)
    left = ask(http, "/embed", inputs="find " + LONG, truncation_direction="Left")
    np.testing.assert_allclose(
        left, v1(http, "find " + LONG, truncate_prompt_tokens=-1, truncation_side="left"), atol=1e-6
    )
    message = refused(http, "/embed", 413, "Validation", inputs=LONG, truncate=False)
    assert "set truncate to true" in message
    with local_app(folder, server={"auto_truncate": False}) as (strict, _):
        refused(strict, "/embed", 413, "Validation", inputs=LONG)
        assert len(ask(strict, "/embed", inputs=LONG, truncate=True)) == 1
        assert strict.get("/info").json()["auto_truncate"] is False
    with local_app(folder, server={"default_chunking": "mean"}) as (whole, _):
        found = ask(whole, "/embed", inputs=[LONG, "a"])
        np.testing.assert_allclose(found, v1(whole, [LONG, "a"], chunking="mean"), atol=1e-6)
        assert abs(np.array(found[0]) - cut.json()[0]).max() > 1e-3


def test_embed_all_gives_the_states_of_the_feature_extraction_pipeline(
    http: TestClient, folder: Path
) -> None:
    model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    pipe = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    for text, found in zip(TEXTS, ask(http, "/embed_all", inputs=TEXTS), strict=True):
        with torch.inference_mode():
            np.testing.assert_allclose(found, pipe(text)[0], atol=1e-4)


def test_embed_sparse_gives_indices_and_values(tmp_path: Path) -> None:
    with local_app(write_splade(tmp_path)) as (http, _):
        rows = ask(http, "/embed_sparse", inputs=TEXTS)
        expected = ask(http, "/v1/sparse", input=TEXTS, top_k=8192)["data"]
        for row, wanted in zip(rows, expected, strict=True):
            assert [each["index"] for each in row] == sorted(each["index"] for each in row)
            weights = {term["token_id"]: term["weight"] for term in wanted["sparse"]}
            assert {each["index"]: each["value"] for each in row} == weights
        assert ask(http, "/", inputs=TEXTS) == rows
        assert ask(http, "/vertex", instances=[{"inputs": TEXTS}])["predictions"] == [rows]
        assert http.get("/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}


def test_predict_takes_texts_and_pairs_in_one_batch(moods: TestClient) -> None:
    both = ask(moods, "/predict", inputs=[[TEXTS[0]], TEXTS, [TEXTS[1]]])
    assert both[0] == ask(moods, "/predict", inputs=TEXTS[0])
    assert both[1] == ask(moods, "/predict", inputs=TEXTS)
    raw = ask(moods, "/predict", inputs=TEXTS[0], raw_scores=True)
    assert [row["label"] for row in raw] == [row["label"] for row in both[0]]
    powers = np.exp([row["score"] for row in raw])
    np.testing.assert_allclose(powers / powers.sum(), [row["score"] for row in both[0]], atol=1e-5)
    assert moods.get("/info").json()["model_type"]["classifier"]["label2id"]["LABEL_2"] == 2


def test_tokenize_gives_the_characters_of_each_token(http: TestClient) -> None:
    text = "the wateré ist"
    (row,) = ask(http, "/tokenize", inputs=text)
    assert row[0] == {"id": row[0]["id"], "text": "[CLS]", "special": True, "start": None, "stop": None}
    for token in row[1:-1]:
        assert token["text"] == text[token["start"] : token["stop"]] and not token["special"]
    bare = ask(http, "/tokenize", inputs=[text, "a"], add_special_tokens=False)
    assert len(bare) == 2 and bare[0] == row[1:-1]
    prompted = ask(http, "/tokenize", inputs="a", prompt_name="query")
    assert prompted[0][1]["text"] == "find"
    assert ask(http, "/tokenize", prompt=text)["count"] == len(row)  # vLLM's body on the same path


def test_decode_reverses_tokenize(http: TestClient) -> None:
    rows = [[token["id"] for token in row] for row in ask(http, "/tokenize", inputs=TEXTS)]
    assert ask(http, "/decode", ids=rows) == TEXTS
    assert ask(http, "/decode", ids=rows[0]) == TEXTS[:1]
    assert "[CLS]" in ask(http, "/decode", ids=rows[0], skip_special_tokens=False)[0]
    refused(http, "/decode", 413, "Validation", ids=[10**6])


def test_vertex_runs_each_instance_as_its_fields_and_the_model_say(http: TestClient) -> None:
    instances = [{"inputs": TEXTS}, {"inputs": "a", "dimensions": 2}, {"query": "a", "texts": TEXTS}]
    first, second, third = ask(http, "/vertex", instances=instances)["predictions"]
    assert first == ask(http, "/embed", inputs=TEXTS)
    assert second == ask(http, "/embed", inputs="a", dimensions=2)
    assert third == ask(http, "/rerank", query="a", texts=TEXTS)
    assert "instance" in refused(http, "/vertex", 422, "Validation", instances=[{"inputs": 5}])
    refused(http, "/vertex", 400, "Empty", instances=[])


def test_info_has_all_fields(http: TestClient) -> None:
    assert set(http.get("/info").json()) == {
        *("model_id", "model_sha", "model_dtype", "served_model_name", "model_type"),
        *("max_concurrent_requests", "max_input_length", "max_batch_tokens", "max_batch_requests"),
        *("max_client_batch_size", "auto_truncate", "tokenization_workers", "version", "sha", "docker_label"),
    }
    assert http.get("/info").json()["model_type"] == {"embedding": {"pooling": "mean"}}


def test_headers_tell_what_a_request_took(http: TestClient) -> None:
    headers = http.post("/embed", json={"inputs": TEXTS}).headers
    assert headers["x-compute-characters"] == str(sum(map(len, TEXTS)))
    assert int(headers["x-compute-tokens"]) == sum(len(r) for r in ask(http, "/tokenize", inputs=TEXTS))
    for name in ("compute-time", "total-time", "tokenization-time", "queue-time", "inference-time"):
        assert headers[f"x-{name}"].isdigit()
    assert headers["x-compute-type"] == "cpu"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": ""}),
        ("/embed", {"inputs": []}),
        ("/embed", {"inputs": ["a", ""]}),
        ("/embed", {"inputs": [[]]}),
        ("/embed_all", {"inputs": [""]}),
        ("/embed_sparse", {"inputs": []}),
        ("/predict", {"inputs": ""}),
        ("/predict", {"inputs": [["", ""]]}),
        ("/rerank", {"query": "a", "texts": []}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}),
        ("/tokenize", {"inputs": ""}),
        ("/tokenize", {"inputs": []}),
        ("/decode", {"ids": []}),
        ("/decode", {"ids": [[1], []]}),
    ],
)
def test_empty_inputs_are_refused(http: TestClient, path: str, body: dict[str, Any]) -> None:
    refused(http, path, 400, "Empty", **body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": 5}),
        ("/embed", {}),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}),
        ("/predict", {"inputs": []}),
        ("/predict", {"inputs": ["a", "b", "c"]}),
        ("/predict", {"inputs": [["a", "b", "c"]]}),
        ("/decode", {"ids": [1, [2]]}),
    ],
)
def test_bodies_of_another_shape_are_a_422(http: TestClient, path: str, body: dict[str, Any]) -> None:
    refused(http, path, 422, "Validation", **body)


def test_a_body_that_is_no_json_is_a_422(http: TestClient) -> None:
    answer = http.post("/embed", content=b"{inputs")
    assert answer.status_code == 422 and answer.json()["error_type"] == "Validation"


def test_tasks_that_the_model_lacks_are_a_424(http: TestClient) -> None:
    refused(http, "/embed_sparse", 424, "Backend", inputs="a")
    refused(http, "/predict", 424, "Backend", inputs="a")


def test_too_many_texts_are_a_413(folder: Path) -> None:
    with local_app(folder, server={"max_rows": 2}) as (http, _):
        assert "3 rows" in refused(http, "/embed", 413, "Validation", inputs=["a"] * 3)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("full"), 429, "Overloaded"),
        (EngineUnavailable("starting"), 503, "Unhealthy"),
        (DeadlineExceeded("late"), 408, "Overloaded"),
        (RowFailed("failed"), 424, "Backend"),
        (PenstockError("bug"), 424, "Backend"),
        (Unauthorized("key"), 401, "Validation"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PenstockError) else None,
)
def test_errors_have_teis_types_and_statuses(error: PenstockError, status: int, kind: str) -> None:
    assert TEI_ERRORS.status(error) == status
    assert TEI_ERRORS.body(error) == {"error": error.message, "error_type": kind}


def test_a_large_answer_is_the_same_as_several_small_ones(http: TestClient) -> None:
    texts = [f"word {index}" for index in range(1500)]
    found = ask(http, "/embed", inputs=texts)
    np.testing.assert_allclose(found[700:710], ask(http, "/embed", inputs=texts[700:710]), atol=1e-5)
    (vertex,) = ask(http, "/vertex", instances=[{"inputs": texts}])["predictions"]
    assert vertex == found


def test_sagemakers_route_takes_these_bodies(http: TestClient, moods: TestClient) -> None:
    assert ask(http, "/invocations", inputs=TEXTS) == ask(http, "/embed", inputs=TEXTS)
    assert ask(http, "/invocations", query="a", texts=TEXTS) == ask(http, "/rerank", query="a", texts=TEXTS)
    assert ask(moods, "/invocations", inputs=TEXTS[0]) == ask(moods, "/predict", inputs=TEXTS[0])


def test_cut_texts_and_cut_pairs_of_one_request_are_counted_together(moods: TestClient) -> None:
    long = "water " * 700
    answer = moods.post("/predict", json={"inputs": [[long], ["water"], [long, "oil"]]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-truncated-rows"] == "2"
