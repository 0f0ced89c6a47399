"""The default model, with real weights, against sentence-transformers on texts in many scripts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer

from penstock import Engine
from penstock.checkpoint.find import package_folder
from tests.parity.reference import Vectors, cosines
from tests.parity.texts import LANGUAGES, natural_texts
from tests.thinning import ALL_CASES

pytestmark = pytest.mark.skipif(package_folder() is None, reason="the default model is not installed")
TEXTS = natural_texts(260 if ALL_CASES else 160)  # benchmarks/parity_real.py compares more
SOME = slice(0, None, 4)  # enough to compare one run of the engine with another


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(device="cpu") as made:
        yield made


@pytest.fixture(scope="module")
def ours(engine: Engine) -> Vectors:
    return engine.embed(TEXTS, truncate_prompt_tokens=-1)


@pytest.fixture(scope="module")
def theirs() -> Vectors:
    reference = SentenceTransformer(str(package_folder()), device="cpu")
    return reference.encode(TEXTS, batch_size=32)


def test_the_texts_are_many_scripts_short_long_and_odd() -> None:
    assert len(TEXTS) >= 160
    assert len(set(TEXTS)) >= 0.85 * len(TEXTS)
    assert len(LANGUAGES) >= 10
    assert {0, 1, 10_000} <= {len(text) for text in TEXTS}


def test_every_text_has_the_references_vector(ours: Vectors, theirs: Vectors) -> None:
    similar = cosines(ours, theirs)
    worst = int(similar.argmin())
    assert similar[worst] >= 0.99999, TEXTS[worst][:80]
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_vectors_are_384_wide_and_of_unit_length(ours: Vectors) -> None:
    assert ours.shape == (len(TEXTS), 384)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)


def test_a_text_has_the_same_vector_alone_as_in_the_batch(engine: Engine, ours: Vectors) -> None:
    alone = np.concatenate([engine.embed([text], truncate_prompt_tokens=-1) for text in TEXTS[SOME]])
    assert np.abs(alone - ours[SOME]).max() <= 1e-5


def test_the_order_of_the_batch_does_not_matter(engine: Engine, ours: Vectors) -> None:
    order = np.random.default_rng(1).permutation(len(TEXTS))[SOME]
    shuffled = engine.embed([TEXTS[i] for i in order], truncate_prompt_tokens=-1)
    assert np.abs(shuffled - ours[order]).max() <= 1e-5


def test_bf16_keeps_the_direction(theirs: Vectors) -> None:
    with Engine(device="cpu", dtype="bfloat16") as engine:
        assert cosines(engine.embed(TEXTS[SOME], truncate_prompt_tokens=-1), theirs[SOME]).min() >= 0.999


def test_int8_keeps_the_direction_in_any_batch(theirs: Vectors) -> None:
    with Engine(device="cpu", quantization="int8") as engine:
        batch = engine.embed(TEXTS[:160], truncate_prompt_tokens=-1)
        alone = np.concatenate([engine.embed([text], truncate_prompt_tokens=-1) for text in TEXTS[:160:4]])
    similar = cosines(batch, theirs[:160])
    assert np.quantile(similar, 0.05) >= 0.99
    assert similar.min() >= 0.985, "near-empty texts lose the most"
    assert np.abs(alone - batch[::4]).max() <= 1e-5
