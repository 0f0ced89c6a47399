"""Every encoder family and sentence-transformers layout against the reference, on the same files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer
from torch import nn

from penstock import Engine
from tests.checkpoints import wordpiece_tokenizer, write_json
from tests.parity.reference import (
    FAMILIES,
    LIMIT,
    Vectors,
    cosines,
    make_texts,
    write_sentence_transformer,
    write_transformer,
)
from tests.thinning import ALL_CASES

TEXTS = make_texts(60)


class Pair(NamedTuple):
    reference: SentenceTransformer
    engine: Engine
    folder: Path


def embed(engine: Engine, texts: list[str], **options: Any) -> Vectors:
    return engine.embed(texts, truncate_prompt_tokens=-1, **options)


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **options)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    reference = write_sentence_transformer(folder, FAMILIES[request.param])
    with open_engine(folder / "model", max_num_batched_tokens=256) as engine:
        yield Pair(reference, engine, folder / "model")


def test_vectors_of_the_reference_differ_from_text_to_text(pair: Pair) -> None:
    """Otherwise agreement with it would mean little."""
    vectors = pair.reference.encode(TEXTS)
    between = vectors @ vectors.T
    np.fill_diagonal(between, 0)
    assert between.mean() < 0.9
    longest = [text for text in TEXTS if len(text.split()) > 8]
    reordered = [" ".join(random.Random(1).sample(text.split(), len(text.split()))) for text in longest]
    moved = cosines(pair.reference.encode(longest), pair.reference.encode(reordered))
    assert np.median(moved) < 0.995, "positions matter"


def test_fp32_equals_the_reference(pair: Pair) -> None:
    ours, theirs = embed(pair.engine, TEXTS), pair.reference.encode(TEXTS)
    assert ours.shape == theirs.shape
    assert cosines(ours, theirs).min() >= 0.99999
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_bf16_stays_near_the_reference(pair: Pair) -> None:
    with open_engine(pair.folder, dtype="bfloat16") as engine:
        assert cosines(embed(engine, TEXTS), pair.reference.encode(TEXTS)).min() >= 0.999


def test_a_text_has_the_same_vector_alone_in_a_batch_and_in_any_order(pair: Pair) -> None:
    batch = embed(pair.engine, TEXTS)
    alone = np.concatenate([embed(pair.engine, [text]) for text in TEXTS])
    np.testing.assert_allclose(batch, alone, atol=1e-5)
    order = np.random.default_rng(3).permutation(len(TEXTS))
    np.testing.assert_allclose(embed(pair.engine, [TEXTS[i] for i in order]), batch[order], atol=1e-5)


def test_tokens_and_limit_equal_those_of_the_reference(pair: Pair) -> None:
    assert pair.engine.spec.max_model_len == pair.reference.max_seq_length == LIMIT
    theirs = [pair.reference.tokenizer(text)["input_ids"] for text in TEXTS]
    assert pair.engine.tokenize(TEXTS) == theirs


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plain_checkpoint_without_modules_is_mean_pooled_like_the_reference(
    name: str, tmp_path: Path
) -> None:
    folder = write_transformer(tmp_path, FAMILIES[name], seed=3)
    reference = SentenceTransformer(str(folder), device="cpu")
    with open_engine(folder) as engine:
        ours, theirs = embed(engine, TEXTS), reference.encode(TEXTS)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert cosines(ours, theirs).min() >= 0.99999


LAYOUTS: dict[str, dict[str, Any]] = {
    "cls": {"pooling": "cls"},
    "max": {"pooling": "max"},
    "mean-sqrt-len": {"pooling": "mean_sqrt_len_tokens", "normalize": False},
    "weighted-mean": {"pooling": "weightedmean"},
    "last": {"pooling": "lasttoken"},
    "not-normalised": {"normalize": False},
    "three-methods": {"pooling": ("mean", "cls", "max"), "normalize": False},
    "dense-tanh": {"dense": {"out_features": 12}},
    "dense-identity-no-bias": {
        "dense": {"out_features": 80, "bias": False, "activation_function": nn.Identity()}
    },
    "dense-gelu-of-two-methods": {
        "pooling": ("cls", "mean"),
        "dense": {"out_features": 30, "activation_function": nn.GELU()},
    },
    "dense-residual": {"dense": {"out_features": 64, "use_residual": True}, "normalize": False},
    "dense-projected-residual": {"dense": {"out_features": 20, "use_residual": True}},
    "short": {"max_seq_length": 17},
    "relu": {"hidden_act": "relu"},
    "gelu-new": {"hidden_act": "gelu_new"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sentence_transformers_layout_gives_the_references_vectors(layout: str, tmp_path: Path) -> None:
    reference = write_sentence_transformer(tmp_path, FAMILIES["bert"], **LAYOUTS[layout])
    with open_engine(tmp_path / "model") as engine:
        ours, theirs = embed(engine, TEXTS), reference.encode(TEXTS)
        assert engine.spec.embed_dim == theirs.shape[1]
        assert engine.spec.max_model_len == reference.max_seq_length
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert cosines(ours, theirs).min() >= 0.99999


@pytest.mark.parametrize("cased", [True, False])
def test_lower_casing_follows_the_reference(cased: bool, tmp_path: Path) -> None:
    """`do_lower_case` with a tokenizer that keeps case, and with one that lower-cases by itself."""
    family = replace(FAMILIES["bert"], tokenizer=lambda: wordpiece_tokenizer(lowercase=not cased))
    write_sentence_transformer(tmp_path, family, include_prompt=False, prompts={"loud": "SEARCH Query: "})
    write_json(
        tmp_path / "model" / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": True}
    )
    reference = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    texts = [*TEXTS, "THE PEOPLE Go", "ΑΒΓ βγα", "the [SEP] water [MASK] [PAD]", "İ and ß and É"]
    with open_engine(tmp_path / "model") as engine:
        assert engine.spec.lower_case
        plain = cosines(embed(engine, texts), reference.encode(texts))
        named = {"prompt_name": "loud"}
        prompted = cosines(embed(engine, texts, **named), reference.encode(texts, **named))
    assert min(plain.min(), prompted.min()) >= 0.99999


PROMPTS = {
    "query": "search query: ",
    "document": "document: ",
    "long": "represent this sentence for search: ",
}


POOLINGS = ["mean", "cls", "max", "weightedmean", "mean_sqrt_len_tokens", "lasttoken"]
PROMPTED = [
    (name, pooling, include_prompt)
    for i, name in enumerate(["bert", "roberta"])
    for j, pooling in enumerate(POOLINGS)
    for include_prompt in (True, False)
    if ALL_CASES or (i + j + include_prompt) % 2  # the prompt is included in one family only
]


@pytest.mark.parametrize(("name", "pooling", "include_prompt"), PROMPTED)
def test_prompts_are_prepended_and_excluded_from_pooling_like_the_reference(
    name: str, pooling: str, include_prompt: bool, tmp_path: Path
) -> None:
    texts = [text for text in TEXTS if text]
    reference = write_sentence_transformer(
        tmp_path,
        FAMILIES[name],
        pooling=pooling,
        include_prompt=include_prompt,
        prompts=PROMPTS,
        default_prompt_name="document",
    )
    with open_engine(tmp_path / "model") as engine:
        by_default = cosines(embed(engine, texts), reference.encode(texts))
        by_name = cosines(
            embed(engine, texts, prompt_name="long"), reference.encode(texts, prompt_name="long")
        )
        own = cosines(embed(engine, texts, prompt="see: "), reference.encode(texts, prompt="see: "))
        none = cosines(embed(engine, texts, prompt=""), reference.encode(texts, prompt=""))
    assert min(by_default.min(), by_name.min(), own.min(), none.min()) >= 0.99999


def test_dimensions_are_truncated_and_normalised_like_the_reference(tmp_path: Path) -> None:
    reference = write_sentence_transformer(tmp_path, FAMILIES["bert"], normalize=False)
    with open_engine(tmp_path / "model") as engine:
        ours = embed(engine, TEXTS, dimensions=24)
    theirs = reference.encode(TEXTS, truncate_dim=24, normalize_embeddings=True)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
