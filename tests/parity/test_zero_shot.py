"""Classification of pairs, and zero-shot classification, against transformers on the same files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
import transformers

from penstock import Engine
from penstock.errors import BadValue, NotPossible
from tests.checkpoints import WORDS, wordpiece_tokenizer, write_cross_encoder
from tests.parity.reference import LIMIT, make_texts, randomise

LABELS = ["water", "long people", "oil and words", "find"]
TEXTS = [text for text in make_texts(30) if text and len(text.split()) < LIMIT // 4][:8]
PAIRS = [(first, second) for first in TEXTS[:4] for second in TEXTS[2:6]]
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": LIMIT,
    "pad_token_id": 0,
}
DEBERTA = {
    "relative_attention": True,
    "position_buckets": 32,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
# Label orders of published models: BART's and DeBERTa's MNLI, cross-encoder/nli, and zeroshot-v2 (2 labels).
CASES = {
    "bert-contradiction-first": ("Bert", {}, ("contradiction", "neutral", "entailment")),
    "bert-entailment-second": ("Bert", {}, ("CONTRADICTION", "ENTAILMENT", "NEUTRAL")),
    "deberta-entailment-first": ("DebertaV2", DEBERTA, ("entailment", "neutral", "contradiction")),
    "deberta-two-labels": ("DebertaV2", DEBERTA, ("entailment", "not_entailment")),
}


@dataclass(frozen=True)
class Opened:
    engine: Engine
    pipeline: Any
    model: Any
    tokenizer: Any


@pytest.fixture(scope="module", params=CASES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    name, options, labels = CASES[request.param]
    folder = tmp_path_factory.mktemp("models") / request.param
    id2label = dict(enumerate(labels))
    tokenizer = wordpiece_tokenizer()
    config = getattr(transformers, f"{name}Config")(
        **SIZES,
        **options,
        vocab_size=tokenizer.get_vocab_size(),
        id2label=id2label,
        label2id={label: index for index, label in id2label.items()},
    )
    written = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    randomise(written, 1)
    written.save_pretrained(folder)
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=LIMIT,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **special,
    ).save_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pipeline = transformers.ZeroShotClassificationPipeline(model=model, tokenizer=tokenizer, device="cpu")
    with Engine(str(folder), device="cpu", threads=1) as engine:
        yield Opened(engine, pipeline, model, tokenizer)


def test_pairs_have_the_probabilities_of_the_reference(opened: Opened) -> None:
    with torch.inference_mode():
        encoded = opened.tokenizer(*map(list, zip(*PAIRS, strict=True)), padding=True, return_tensors="pt")
        expected = opened.model(**encoded).logits.softmax(-1).numpy()
    assert np.ptp(expected, axis=0).max() > 0.05
    np.testing.assert_allclose(opened.engine.classify(PAIRS), expected, atol=2e-5)


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("template", ["This example is {}.", "the {} was long"])
def test_scores_are_those_of_the_zero_shot_pipeline(opened: Opened, multi_label: bool, template: str) -> None:
    expected = opened.pipeline(TEXTS, LABELS, multi_label=multi_label, hypothesis_template=template)
    got = opened.engine.zero_shot(TEXTS, LABELS, multi_label=multi_label, hypothesis_template=template)
    assert np.ptp([row["scores"] for row in expected]) > 0.05
    for row, wanted in zip(got, expected, strict=True):
        assert list(row.labels) == wanted["labels"]
        np.testing.assert_allclose(row.scores, wanted["scores"], atol=2e-5)


def test_one_label_is_scored_by_itself(opened: Opened) -> None:
    expected = opened.pipeline(TEXTS[0], LABELS[:1])
    (got,) = opened.engine.zero_shot(TEXTS[0], LABELS[:1])
    np.testing.assert_allclose(got.scores, expected["scores"], atol=2e-5)


def test_truncation_cuts_the_text_and_never_the_hypothesis(opened: Opened) -> None:
    long = " ".join(WORDS[index % len(WORDS)] for index in range(3 * LIMIT))
    expected = opened.pipeline(long, LABELS)
    (got,) = opened.engine.zero_shot(long, LABELS, truncate_prompt_tokens=-1)
    assert list(got.labels) == expected["labels"]
    np.testing.assert_allclose(got.scores, expected["scores"], atol=2e-5)
    with pytest.raises(BadValue, match="truncate_prompt_tokens"):
        opened.engine.zero_shot(long, LABELS)


def test_a_model_without_entailment_is_refused(tmp_path: Path) -> None:
    folder = write_cross_encoder(tmp_path / "model", labels=3)
    with Engine(str(folder), device="cpu", threads=1) as engine:
        with pytest.raises(NotPossible, match=r"labels are LABEL_0.*entailment"):
            engine.zero_shot(TEXTS, LABELS)
        with pytest.raises(BadValue, match="input 1 is not a pair"):
            engine.classify([("a", "b"), ("a",)])  # type: ignore[list-item]
        with pytest.raises(BadValue, match="prompt does not apply to pairs"):
            engine.classify([("a", "b")], prompt="search: ")
