"""Text pairs for classifiers, and labels in requests, through the whole application."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from penstock import Engine
from tests.api.local_app import local_app
from tests.checkpoints import write_cross_encoder

NLI = {"0": "entailment", "1": "neutral", "2": "contradiction"}
TEXTS = ["the water was long", "find a word"]
LABELS = ["water", "oil", "people"]
PAIRS = [["the long water", "oil"], ["find a word", "the people see water"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("models") / "nli", labels=3, id2label=NLI)


@pytest.fixture(scope="module")
def nli(folder: Path) -> Iterator[tuple[TestClient, Engine]]:
    with local_app(folder) as (http, _), Engine(str(folder), device="cpu", threads=1) as engine:
        yield http, engine


def test_classify_reads_the_texts_of_a_pair_together(nli: tuple[TestClient, Engine]) -> None:
    http, engine = nli
    answer = http.post("/classify", json={"input": PAIRS}).json()
    expected = engine.classify([(first, second) for first, second in PAIRS])
    np.testing.assert_allclose([row["probs"] for row in answer["data"]], expected, atol=1e-5)
    assert [row["label"] for row in answer["data"]] == [NLI[str(best)] for best in expected.argmax(1)]
    joined = engine.classify([" ".join(pair) for pair in PAIRS])
    assert abs(joined - expected).max() > 1e-3


def test_predict_takes_a_text_a_pair_and_lists_of_them(nli: tuple[TestClient, Engine]) -> None:
    http, engine = nli
    pair = engine.classify([(PAIRS[0][0], PAIRS[0][1])])[0]
    (text,) = engine.classify([TEXTS[0]])
    one, single, many, texts = (
        http.post("/predict", json={"inputs": inputs}).json()
        for inputs in (PAIRS[0], TEXTS[0], PAIRS, [[text] for text in TEXTS])
    )
    for got, wanted in ((one, pair), (single, text), (many[0], pair), (texts[0], text)):
        scores = {each["label"]: each["score"] for each in got}
        np.testing.assert_allclose([scores[NLI[str(at)]] for at in range(3)], wanted, atol=1e-5)
        assert [each["score"] for each in got] == sorted((each["score"] for each in got), reverse=True)
    assert len(many) == len(texts) == 2


@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_answers_as_the_offline_engine_does(
    nli: tuple[TestClient, Engine], multi_label: bool
) -> None:
    http, engine = nli
    body = {"input": TEXTS, "labels": LABELS, "multi_label": multi_label, "hypothesis_template": "see {}"}
    answer = http.post("/v1/zero-shot", json=body).json()
    wanted = engine.zero_shot(TEXTS, LABELS, multi_label=multi_label, hypothesis_template="see {}")
    for index, (row, scores) in enumerate(zip(answer["data"], wanted, strict=True)):
        assert row["index"] == index and row["labels"] == list(scores.labels)
        np.testing.assert_allclose(row["scores"], scores.scores, atol=1e-5)


@pytest.mark.parametrize(
    ("route", "body", "status", "message"),
    [
        ("/classify", {"input": [["a", "b"], ["a"]]}, 400, "input 1 is not a pair"),
        ("/classify", {"input": [["a", "b"]], "prompt": "x"}, 400, "prompt does not apply to pairs"),
        ("/classify", {"input": [["water " * 400, "oil"]]}, 400, "truncate_prompt_tokens"),
        ("/predict", {"inputs": ["a", "b", "c"]}, 422, "inputs must be"),
        ("/v1/zero-shot", {"input": "water", "labels": []}, 400, "labels is empty"),
        ("/v1/zero-shot", {"input": "water", "labels": ["a", "a"]}, 400, "given twice"),
        ("/v1/zero-shot", {"input": "water", "labels": ["a"], "hypothesis_template": "x"}, 400, "one {}"),
        ("/v1/zero-shot", {"input": "a", "labels": ["a"], "hypothesis_template": "{} {0}"}, 400, "one {}"),
        ("/v1/entities", {"input": "water", "labels": ["a"]}, 422, "takes no labels"),
        ("/v1/entities", {"input": "water", "threshold": 0.1}, 400, "give labels"),
        ("/pooling", {"input": "water", "task": "entities"}, 400, "use /v1/entities"),
    ],
)
def test_what_cannot_be_done_is_refused(
    nli: tuple[TestClient, Engine], route: str, body: dict[str, object], status: int, message: str
) -> None:
    response = nli[0].post(route, json=body)
    assert response.status_code == status, response.text
    assert message in response.text
