"""GLiNER and GLiClass against references on the same files: equal entities and scores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch

from penstock import Engine
from penstock.checkpoint.describe import read_spec
from penstock.errors import BadValue, ModelLoadError, NotPossible
from tests.checkpoints import WORDS, write_json, write_token_classifier
from tests.parity.labelled import MAX_WIDTH, MAX_WORDS, Written, write_gliclass, write_gliner

LABELS = ["person", "long water", "oil", "two words and more"]
KINDS = {
    "markerV0": ("markerV0", "deberta-v2"),
    "marker": ("marker", "deberta-v2"),
    "token-level": ("token_level", "deberta-v2"),
    "modernbert": ("markerV0", "modernbert"),
}
Found = list[tuple[int, int, str]]


def make_texts() -> list[str]:
    random = np.random.default_rng(3)
    some = [" ".join(random.choice(WORDS, size)) for size in (1, 4, 12, 39)]
    return [
        *some,
        "People, find (two) Words: zebra-crossing xylo_phone now!",
        "naïve façade … 数学 end",
        "   ",
    ]


TEXTS = make_texts()


def probabilities(written: Written, text: str, labels: list[str]) -> tuple[np.ndarray[Any, Any], Any]:
    """The reference's scores of a text, and the offsets of its words."""
    words = list(re.finditer(r"\w+(?:[-_]\w+)*|\S", text))[:MAX_WORDS]
    prompt = [part for label in labels for part in ("<<ENT>>", label)] + ["<<SEP>>"]
    row = [*prompt, *(word[0] for word in words)]
    encoded = written.tokenizer(row, is_split_into_words=True)
    ids, of = encoded["input_ids"], encoded.word_ids()
    labels_at = [at for at, token in enumerate(ids) if token == written.token("<<ENT>>")]
    words_at = [of.index(len(prompt) + index) for index in range(len(words))]
    return written.model(torch.tensor(ids), labels_at, words_at).numpy(), words


def all_candidates(scores: np.ndarray[Any, Any], is_token_level: bool, threshold: float) -> list[Any]:
    found = []
    for start in range(len(scores)):
        for end in range(start, len(scores) if is_token_level else min(len(scores), start + MAX_WIDTH)):
            for label in range(len(LABELS)):
                if not is_token_level:
                    score, fits = (
                        scores[start, end - start, label],
                        scores[start, end - start, label] > threshold,
                    )
                else:
                    inside = scores[start : end + 1, label, 2]
                    score = min(*inside, scores[start, label, 0], scores[end, label, 1])
                    fits = score > threshold
                if fits:
                    found.append((start, end, label, float(score)))
    return found


def expected(
    written: Written, text: str, threshold: float, flat: bool, multi_label: bool
) -> dict[Any, float]:
    if not text.strip():
        return {}
    scores, words = probabilities(written, text, LABELS)
    chosen: list[Any] = []
    for start, end, label, score in sorted(
        all_candidates(scores, written.model.mode == "token_level", threshold), key=lambda each: -each[3]
    ):
        for first, last, _, _ in chosen:
            if (start, end) == (first, last):
                clash = not multi_label
            else:
                clash = start <= last and first <= end
                nested = (start <= first and end >= last) or (first <= start and last >= end)
                clash = clash and (flat or not nested)
            if clash:
                break
        else:
            chosen.append((start, end, label, score))
    return {(words[s].start(), words[e].end(), LABELS[label]): score for s, e, label, score in chosen}


@pytest.fixture(scope="module", params=KINDS)
def gliner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Written]]:
    written = write_gliner(tmp_path_factory.mktemp(request.param), *KINDS[request.param])
    with Engine(str(written.folder), device="cpu", threads=1) as engine:
        yield engine, written


@pytest.mark.parametrize(
    ("threshold", "flat", "multi_label"), [(0.5, True, False), (0.3, False, False), (0.6, True, True)]
)
def test_entities_are_those_of_the_reference(
    gliner: tuple[Engine, Written], threshold: float, flat: bool, multi_label: bool
) -> None:
    engine, written = gliner
    got = engine.entities(TEXTS, labels=LABELS, threshold=threshold, flat=flat, multi_label=multi_label)
    wanted = [expected(written, text, threshold, flat, multi_label) for text in TEXTS]
    assert sum(map(len, wanted)) > 3
    for text, row, scores in zip(TEXTS, got, wanted, strict=True):
        assert {(each.start, each.end, each.label) for each in row} == scores.keys()
        assert [each.start for each in row] == sorted(each.start for each in row)
        for each in row:
            assert each.score == pytest.approx(scores[each.start, each.end, each.label], abs=2e-5)
            assert each.text == text[each.start : each.end]


def test_an_answer_does_not_depend_on_other_rows_or_other_labels(gliner: tuple[Engine, Written]) -> None:
    engine, _ = gliner
    together = engine.entities(TEXTS, labels=LABELS, threshold=0.3)
    for text, row in zip(TEXTS, together, strict=True):
        (alone,) = engine.entities(text, labels=LABELS, threshold=0.3)
        assert [(e.start, e.end, e.label) for e in alone] == [(e.start, e.end, e.label) for e in row]
        np.testing.assert_allclose([e.score for e in alone], [e.score for e in row], atol=1e-5)


def test_long_texts_are_refused_or_cut_at_the_model_s_words(gliner: tuple[Engine, Written]) -> None:
    engine, written = gliner
    long = " ".join(WORDS[index % len(WORDS)] for index in range(3 * MAX_WORDS))
    with pytest.raises(BadValue, match=f"more than {MAX_WORDS} words"):
        engine.entities(long, labels=LABELS)
    (got,) = engine.entities(long, labels=LABELS, threshold=0.3, truncate_prompt_tokens=-1)
    wanted = expected(written, long, 0.3, True, False)
    assert {(each.start, each.end, each.label) for each in got} == wanted.keys()


def test_what_a_model_with_labels_of_the_request_cannot_do_is_refused(
    gliner: tuple[Engine, Written], tmp_path: Path
) -> None:
    engine, _ = gliner
    with pytest.raises(BadValue, match="give labels"):
        engine.entities("water")
    with pytest.raises(BadValue, match="a label contains <<ENT>>"):
        engine.entities("water", labels=["a <<ENT>> b"])
    with pytest.raises(BadValue, match="threshold is 2"):
        engine.entities("water", labels=["oil"], threshold=2)
    with pytest.raises(NotPossible, match="its tasks are: entities"):
        engine.embed("water")
    with (
        Engine(str(write_token_classifier(tmp_path / "ner")), device="cpu", threads=1) as tagger,
        pytest.raises(NotPossible, match="takes no labels"),
    ):
        tagger.entities("water", labels=["oil"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels_encoder": "BAAI/bge-small-en-v1.5"}, "labels_encoder = .*this kind of GLiNER"),
        ({"span_mode": "conv_share"}, "supported: 'markerV0', 'marker', 'token_level'"),
        ({"words_splitter_type": "spacy"}, "words_splitter_type"),
        ({"encoder_config": {"model_type": "t5"}}, "model_type 't5'.*supported: deberta-v2, modernbert"),
        ({"encoder_config": None, "model_name": "x/y"}, "names the encoder 'x/y'"),
    ],
)
def test_other_kinds_of_gliner_models_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    write_json(tmp_path / "gliner_config.json", {"span_mode": "markerV0", **options})
    with pytest.raises(ModelLoadError, match=message):
        read_spec(tmp_path, "model")


def test_an_older_file_names_its_encoder_only(tmp_path: Path) -> None:
    named = {"model_name": "microsoft/deberta-v3-large", "vocab_size": 128004, "class_token_index": 128002}
    write_json(tmp_path / "gliner_config.json", named | {"span_mode": "markerV0", "hidden_size": 512})
    spec = read_spec(tmp_path, "model")
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (1024, 24, 128004)
    assert spec.entities is not None and spec.entities.max_words == 384


GLICLASS: dict[str, dict[str, Any]] = {
    "dot": {"prompt_first": True},
    "text-first": {"scorer_type": "weighted-dot"},
    "mean": {"prompt_first": True, "scorer_type": "weighted-dot", "pooling_strategy": "avg"},
    "modernbert": {"prompt_first": True, "kind": "modernbert"},
    "mlp": {
        "prompt_first": True,
        "scorer_type": "mlp",
        "normalize_features": True,
        "extract_text_features": True,
        "embed_class_token": False,
    },
}


@pytest.mark.parametrize("name", GLICLASS)
def test_scores_of_labels_are_those_of_the_reference(tmp_path: Path, name: str) -> None:
    written, texts = write_gliclass(tmp_path, **GLICLASS[name]), TEXTS[:-1]
    prompt = "".join(f"<<LABEL>>{label}" for label in LABELS) + "<<SEP>>"
    with Engine(str(tmp_path), device="cpu", threads=1) as engine:
        single, multi = (engine.zero_shot(texts, LABELS, multi_label=each) for each in (False, True))
        with pytest.raises(BadValue, match="hypothesis_template does not apply"):
            engine.zero_shot(texts, LABELS, hypothesis_template="about {}")
    spread = 0.0
    for text, one, each in zip(texts, single, multi, strict=True):
        row = prompt + text if GLICLASS[name].get("prompt_first") else text + prompt
        ids = torch.tensor(written.tokenizer(row)["input_ids"])
        logits = written.model(ids, written.token("<<LABEL>>"), written.token("<<SEP>>"))
        spread = max(spread, float(logits.max() - logits.min()))
        for got, wanted in ((one, logits.softmax(-1)), (each, logits.sigmoid())):
            assert list(got.scores) == sorted(got.scores, reverse=True)
            scores = dict(zip(got.labels, got.scores, strict=True))
            np.testing.assert_allclose([scores[label] for label in LABELS], wanted.numpy(), atol=2e-5)
    assert spread > 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture_type": "bi-encoder"}, "architecture_type = 'bi-encoder'.*supported: 'uni-encoder'"),
        ({"class_token_pooling": "average"}, "class_token_pooling = 'average'"),
        ({"encoder_config": {"model_type": "t5"}}, "model_type 't5'"),
    ],
)
def test_other_kinds_of_gliclass_models_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    write_json(tmp_path / "config.json", {"architectures": ["GLiClassModel"], **options})
    with pytest.raises(ModelLoadError, match=message):
        read_spec(tmp_path, "model")


def test_gliner2_is_refused_by_name(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"architectures": ["Extractor"], "model_type": "extractor"})
    with pytest.raises(ModelLoadError, match="GLiNER2"):
        read_spec(tmp_path, "model")
