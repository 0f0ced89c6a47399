from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.outputs.entities import Entity, find_entities
from tests.helpers import ints

LABELS = ["O", "B-PER", "I-PER", "B-LOC"]
TEXT = "Ada Lovelace in London"
# [CLS] Ada Love ##lace in London [SEP]
CHARS = ints([0, 0, 0, 3, 4, 8, 8, 12, 13, 15, 16, 22, 0, 0]).reshape(-1, 2)
WORDS = ints([-1, 0, 1, 1, 2, 3, -1])


def scores(*chosen: tuple[str, float]) -> Any:
    out = np.zeros((len(chosen), 4), dtype=np.float32)
    for row, (label, score) in enumerate(chosen):
        out[row] = (1 - score) / 3
        out[row, LABELS.index(label)] = score
    return out


FOUND = scores(
    ("B-PER", 0.9),
    ("B-PER", 0.9),
    ("I-PER", 0.8),
    ("O", 0.7),
    ("O", 0.9),
    ("B-LOC", 0.6),
    ("B-LOC", 0.9),
)


def found(aggregation: Any, values: Any = FOUND) -> list[Entity]:
    (entities,) = find_entities([TEXT], values, ints([7]), CHARS, WORDS, LABELS, aggregation)
    return entities


def test_aggregation_none_lists_the_labelled_tokens() -> None:
    assert [(e.label, e.text) for e in found("none")] == [
        ("B-PER", "Ada"),
        ("I-PER", "Love"),
        ("B-LOC", "London"),
    ]


def test_aggregation_simple_merges_neighbours_with_the_same_tag() -> None:
    person, place = found("simple")
    assert (person.label, person.text, person.start, person.end) == ("PER", "Ada Love", 0, 8)
    assert person.score == pytest.approx(0.85)
    assert (place.label, place.text) == ("LOC", "London")


@pytest.mark.parametrize(("aggregation", "score"), [("first", 0.85), ("max", 0.85)])
def test_word_aggregations_choose_one_label_per_word(aggregation: str, score: float) -> None:
    person, _ = found(aggregation)
    assert person.text == "Ada Lovelace"
    assert person.score == pytest.approx(score)


def test_a_begin_label_starts_a_new_entity() -> None:
    values = scores(*[("B-PER", 0.9)] * 7)
    assert [e.text for e in found("simple", values)] == ["Ada", "Love", "lace", "in", "London"]


def test_entities_do_not_span_texts() -> None:
    values = scores(*[("I-PER", 0.9)] * 4)
    texts = ["Ada", "Bob"]
    chars = ints([0, 2, 2, 3, 0, 2, 2, 3]).reshape(-1, 2)
    first, second = find_entities(texts, values, ints([2, 2]), chars, ints([0, 0, 0, 0]), LABELS, "first")
    assert [e.text for e in first] == ["Ada"] and [e.text for e in second] == ["Bob"]


def test_texts_of_only_special_tokens_have_no_entities() -> None:
    chars = ints([0, 0, 0, 0]).reshape(-1, 2)
    assert find_entities([""], FOUND[:2], ints([2]), chars, ints([-1, -1]), LABELS) == [[]]


def test_end_and_single_labels_close_an_entity() -> None:
    labels = ["O", *(f"{kind}-PER" for kind in "BIES")]
    chosen = ["O", "B-PER", "E-PER", "S-PER", "I-PER", "E-PER", "O"]
    values = np.eye(5, dtype=np.float32)[[labels.index(label) for label in chosen]]
    (entities,) = find_entities([TEXT], values, ints([7]), CHARS, WORDS, labels, "simple")
    assert [(e.label, e.text) for e in entities] == [
        ("PER", "Ada Love"),
        ("PER", "lace"),
        ("PER", "in London"),
    ]
