"""Named entities over HTTP equal those of the offline engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from penstock import Engine
from penstock.errors import BadValue, NotPossible
from tests.checkpoints import WORDS, write_token_classifier
from tests.e2e.server import serving_here

TEXTS = [" ".join(WORDS[i : i + 9]) for i in range(0, 45, 9)] + ["  Watering, the PEOPLE"]
NAMES = ["O", "B-PER", "I-PER"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_token_classifier(tmp_path_factory.mktemp("models") / "ner", NAMES)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def ner(folder: Path) -> Iterator[httpx.Client]:
    with serving_here(folder) as http:
        yield http


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
def test_the_route_answers_as_the_offline_engine_does(
    ner: httpx.Client, engine: Engine, aggregation: str
) -> None:
    response = ner.post("/v1/entities", json={"input": TEXTS, "aggregation": aggregation})
    assert response.status_code == 200, response.text
    wanted = engine.entities(TEXTS, aggregation=aggregation)  # type: ignore[arg-type]
    assert sum(len(row) for row in wanted) > 3
    for index, (item, row) in enumerate(zip(response.json()["data"], wanted, strict=True)):
        assert item["index"] == index
        for got, entity in zip(item["entities"], row, strict=True):
            place = {"label": entity.label, "start": entity.start, "end": entity.end, "text": entity.text}
            assert got == place | {"score": pytest.approx(entity.score, abs=1e-5)}
            assert got["text"] == TEXTS[index][got["start"] : got["end"]]
    tokens = sum(len(row) for row in engine.tokenize(TEXTS))
    assert response.json()["usage"]["prompt_tokens"] == tokens


def test_a_prompt_shifts_no_offset_and_is_in_no_entity(engine: Engine) -> None:
    for row, text in zip(engine.entities(TEXTS, aggregation="none", prompt="search: "), TEXTS, strict=True):
        assert all(text[e.start : e.end] == e.text != "" for e in row)
        assert all(before.end <= after.start for before, after in pairwise(row))


def test_a_truncated_text_keeps_its_character_offsets(engine: Engine) -> None:
    text = " ".join(WORDS)
    (row,) = engine.entities([text], aggregation="none", truncate_prompt_tokens=-1, truncation_side="left")
    assert row and all(text[e.start : e.end] == e.text for e in row)
    assert row[0].start >= text.index(" ".join(WORDS[-62:]))


def test_bad_values_are_refused(ner: httpx.Client, engine: Engine) -> None:
    for body, param in (
        ({"input": "the water", "aggregation": "most"}, "aggregation"),
        ({"input": [5, 6]}, "input"),
    ):
        response = ner.post("/v1/entities", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
    with pytest.raises(BadValue, match="aggregation"):
        engine.entities(["a"], aggregation="most")  # type: ignore[arg-type]


def test_a_model_without_token_labels_names_its_tasks(http: httpx.Client) -> None:
    response = http.post("/v1/entities", json={"input": "the water"})
    assert response.status_code == 422
    assert "embed" in response.json()["error"]["message"]
    with Engine(device="cpu", threads=1) as engine, pytest.raises(NotPossible):
        engine.entities(["the water"])
