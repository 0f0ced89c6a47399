"""Entities against transformers' token-classification pipeline, on the same files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from transformers import (
    BertConfig,
    BertForTokenClassification,
    PreTrainedTokenizerFast,
    TokenClassificationPipeline,
)

from penstock import Engine
from penstock.outputs.entities import Aggregation
from tests.checkpoints import BERT_CONFIG, WORDS, wordpiece_tokenizer

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC"]


def make_texts(count: int) -> list[str]:
    """Words of the vocabulary and words that are split into pieces, with spaces and punctuation between."""
    random = np.random.default_rng(5)
    words = [*WORDS, "Watering", "peopled", "Xylophone", "zebra-crossing", "oils,", "(two)", "…", "数学"]
    return ["  ".join(random.choice(words, size=int(random.integers(1, 20)))) for _ in range(count)]


TEXTS = make_texts(40)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, TokenClassificationPipeline]]:
    folder: Path = tmp_path_factory.mktemp("models") / "ner"
    torch.manual_seed(0)
    names = dict(enumerate(LABELS))
    config = BertConfig(
        **(BERT_CONFIG | {"initializer_range": 0.2, "max_position_embeddings": 256}),
        id2label=names,
        label2id={name: index for index, name in names.items()},
    )
    model = BertForTokenClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=wordpiece_tokenizer(),
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    tokenizer.save_pretrained(folder)
    with Engine(str(folder), device="cpu", threads=1, max_num_batched_tokens=512) as engine:
        yield engine, TokenClassificationPipeline(model=model, tokenizer=tokenizer)


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
def test_entities_equal_those_of_the_pipeline(pair: Any, aggregation: Aggregation) -> None:
    engine, reference = pair
    ours = engine.entities(TEXTS, aggregation=aggregation)
    theirs = [reference(text, aggregation_strategy=aggregation) for text in TEXTS]
    labels = set()
    for text, got, wanted in zip(TEXTS, ours, theirs, strict=True):
        key = "entity" if aggregation == "none" else "entity_group"
        assert [(e.label, e.start, e.end) for e in got] == [(w[key], w["start"], w["end"]) for w in wanted]
        np.testing.assert_allclose([e.score for e in got], [w["score"] for w in wanted], atol=1e-5)
        assert all(e.text == text[e.start : e.end] for e in got)
        labels |= {e.label for e in got}
    assert len(labels) > 2, "otherwise agreeing would mean little"
