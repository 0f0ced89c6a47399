"""Zero-shot classification of images, in Penstock's own and Hugging Face's dialects."""

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
from tests.checkpoints import write_cross_encoder
from tests.inputs.images.pictures import encoded, noise
from tests.parity.dual import CLIP

PICTURES = [noise(40, 30), noise(21, 50, seed=3)]
BASE64 = [base64.b64encode(encoded(picture)).decode() for picture in PICTURES]
IMAGES = [{"image": f"data:image/png;base64,{data}"} for data in BASE64]
LABELS = ["w1 w2", "w3", "w40 w41"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Path]]:
    folder = tmp_path_factory.mktemp("clip")
    CLIP.write(folder)
    with local_app(folder, dtype="float32") as (http, _):
        yield http, folder


@pytest.fixture(scope="module")
def wanted(clip: tuple[TestClient, Path]) -> list[dict[str, float]]:
    """The scores of the offline engine, which `tests/parity` compares with transformers."""
    with Engine(str(clip[1]), dtype="float32", device="cpu") as engine:
        rows = engine.zero_shot(PICTURES, LABELS, hypothesis_template="w5 {}")
    return [dict(zip(row.labels, row.scores, strict=True)) for row in rows]


def check(got: dict[str, float], expected: dict[str, float]) -> None:
    assert list(got) == list(expected)  # descending by score
    np.testing.assert_allclose(list(got.values()), list(expected.values()), atol=1e-5)


def test_the_native_route_scores_labels_for_images(
    clip: tuple[TestClient, Path], wanted: list[dict[str, float]]
) -> None:
    body = {"input": IMAGES, "labels": LABELS, "hypothesis_template": "w5 {}"}
    rows = clip[0].post("/v1/zero-shot", json=body).json()["data"]
    for row, expected in zip(rows, wanted, strict=True):
        check(dict(zip(row["labels"], row["scores"], strict=True)), expected)
    single = clip[0].post("/v1/zero-shot", json={**body, "input": IMAGES[1]}).json()["data"]
    assert [each["labels"] for each in single] == [rows[1]["labels"]]


def test_hugging_faces_task_scores_labels_for_an_image(
    clip: tuple[TestClient, Path], wanted: list[dict[str, float]]
) -> None:
    parameters = {"candidate_labels": LABELS, "hypothesis_template": "w5 {}"}
    for path in ("/", "/pipeline/zero-shot-image-classification", "/models/model"):
        answer = clip[0].post(path, json={"inputs": BASE64[0], "parameters": parameters})
        assert answer.status_code == 200, (path, answer.text)
        check({each["label"]: each["score"] for each in answer.json()}, wanted[0])
    both = clip[0].post("/", json={"inputs": BASE64, "parameters": parameters}).json()
    for rows, expected in zip(both, wanted, strict=True):
        check({each["label"]: each["score"] for each in rows}, expected)


def test_the_list_of_models_says_that_it_takes_images_and_labels(clip: tuple[TestClient, Path]) -> None:
    (entry,) = clip[0].get("/v1/models").json()["data"]
    assert entry["reads_images"] is True and entry["zero_shot"] is True


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/zero-shot", {"input": ["w1"], "labels": LABELS}, 400, "give images as input"),
        ("/v1/zero-shot", {"input": ["w1", IMAGES[0]], "labels": LABELS}, 400, "give images as input"),
        ("/v1/zero-shot", {"input": [], "labels": LABELS}, 400, "input is empty"),
        ("/v1/zero-shot", {"input": IMAGES, "labels": []}, 400, "labels is empty"),
        ("/v1/zero-shot", {"input": IMAGES, "labels": LABELS, "multi_label": True}, 400, "multi_label"),
        ("/v1/zero-shot", {"input": [{"image": "AAAA"}], "labels": LABELS}, 400, "image"),
        ("/v1/zero-shot", {"input": [{"picture": "AAAA"}], "labels": LABELS}, 400, "image"),
        ("/", {"inputs": 3, "parameters": {"candidate_labels": LABELS}}, 422, "inputs"),
        ("/", {"inputs": [1], "parameters": {"candidate_labels": LABELS}}, 413, "data URI"),
        ("/", {"inputs": [], "parameters": {"candidate_labels": LABELS}}, 413, "empty"),
        ("/", {"inputs": {"text": "a"}, "parameters": {"candidate_labels": LABELS}}, 413, "data URI"),
        (
            "/",
            {"inputs": BASE64[0], "parameters": {"candidate_labels": LABELS, "multi_label": True}},
            413,
            "multi_label does not apply",
        ),
    ],
)
def test_other_inputs_are_refused_in_words(
    clip: tuple[TestClient, Path], path: str, body: dict[str, Any], status: int, message: str
) -> None:
    """Hugging Face's dialect has TEI's statuses: 413 for a bad value, 422 for a body of another shape."""
    answer = clip[0].post(path, json=body)
    assert answer.status_code == status and message in answer.text, answer.text


def test_a_classifier_of_texts_refuses_images(tmp_path: Path) -> None:
    names = {"0": "entailment", "1": "neutral", "2": "contradiction"}
    write_cross_encoder(tmp_path / "nli", labels=3, id2label=names)
    with local_app(tmp_path / "nli") as (http, _):
        answer = http.post("/v1/zero-shot", json={"input": IMAGES, "labels": LABELS})
        assert answer.status_code in (400, 422) and "reads texts, not images" in answer.text
        named = "/pipeline/zero-shot-image-classification"
        body = {"inputs": BASE64[0], "parameters": {"candidate_labels": LABELS}}
        assert "reads texts, not images" in http.post(named, json=body).text
