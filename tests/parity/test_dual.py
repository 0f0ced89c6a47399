"""CLIP, SigLIP and SigLIP 2 against transformers: texts, images, and both in one call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import Engine
from penstock.inputs.images.preprocess import prepare
from penstock.types import PreparedImage
from tests.parity.dual import CASES, IMAGES, TEXTS, DualCase, DualReference, largest_difference

TOLERANCE = 1e-5


class Subject:
    def __init__(self, case: DualCase, folder: Path) -> None:
        self.reference: DualReference = case.write(folder)
        self.engine = Engine(str(folder), device="cpu", dtype="float32")
        assert self.engine.spec.images is not None
        self.images: list[PreparedImage] = [prepare(image, self.engine.spec.images) for image in IMAGES]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    made = Subject(request.param, tmp_path_factory.mktemp(request.param.name))
    yield made
    made.engine.close()


def test_texts_have_the_vectors_of_the_reference(subject: Subject) -> None:
    got = subject.engine.embed(TEXTS, truncate_prompt_tokens=-1)
    assert largest_difference(got, subject.reference.texts(TEXTS)) < TOLERANCE


def test_images_have_the_vectors_of_the_reference(subject: Subject) -> None:
    got = subject.engine.embed(subject.images)
    assert largest_difference(got, subject.reference.images(IMAGES)) < TOLERANCE


def test_a_row_has_the_same_vector_alone_and_among_texts_and_images(subject: Subject) -> None:
    images, embed = subject.images, subject.engine.embed
    mixed = embed([images[2], TEXTS[0], images[0], images[1], TEXTS[3], images[2], TEXTS[1], images[3]])
    alone = [embed([row])[0] for row in (images[2], TEXTS[0], images[0])]
    assert largest_difference(mixed[:3], np.stack(alone)) < TOLERANCE
    assert np.array_equal(mixed[0], mixed[5])
    wanted = subject.reference.texts([TEXTS[0], TEXTS[3], TEXTS[1]])
    assert largest_difference(mixed[[1, 4, 6]], wanted) < TOLERANCE


def test_images_may_be_files_bytes_arrays_or_pillow_images(subject: Subject, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    IMAGES[0].save(file)
    given = [file, file.read_bytes(), np.asarray(IMAGES[0]), IMAGES[0], subject.images[0]]
    vectors = subject.engine.embed(images=given)
    wanted = np.repeat(subject.engine.embed(subject.images[:1]), len(given), axis=0)
    assert largest_difference(vectors, wanted) < TOLERANCE
    assert largest_difference(subject.engine.embed([TEXTS[0], file])[1:], wanted[:1]) < TOLERANCE


def test_scores_of_texts_and_images_are_cosines(subject: Subject) -> None:
    engine, reference = subject.engine, subject.reference
    got = engine.score(TEXTS[0], subject.images)
    wanted = reference.images(IMAGES) @ reference.texts(TEXTS[:1])[0]
    assert largest_difference(got, wanted) < TOLERANCE


def test_labels_of_images_have_the_scores_of_the_reference(subject: Subject) -> None:
    """CLIP applies a softmax over the labels; SigLIP scores each label independently."""
    labels = ["w7 w8", "w9", "w10 w11 w12"]
    ranked = subject.engine.zero_shot(subject.images[:2], labels, hypothesis_template="w1 {} w2")
    logits = subject.reference.logits([f"w1 {label} w2" for label in labels], IMAGES[:2])
    if subject.reference.case.model == "CLIP":
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        wanted = powers / powers.sum(axis=1, keepdims=True)
    else:
        wanted = 1 / (1 + np.exp(-logits))
    for row, scores in zip(ranked, wanted, strict=True):
        by_label = dict(zip(row.labels, row.scores, strict=True))
        assert largest_difference([by_label[label] for label in labels], scores) < TOLERANCE
        assert list(row.scores) == sorted(row.scores, reverse=True)
