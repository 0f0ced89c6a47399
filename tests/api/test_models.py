"""`/v1/models` reports what a model can do, precisely enough for a page to offer it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.api.dialects.openai.embeddings import ModelEntry, ModelsAnswer
from penstock.inputs.tokenizer import Tokenizer
from tests.api.local_app import local_app
from tests.docs.stand_ins import STAND_INS
from tests.text_models import MAKERS, tokenizer_folder


def entry_of(kind: str, folder: Path, **options: Any) -> ModelEntry:
    with local_app(STAND_INS[kind](folder), aliases=("alias",), **options) as (http, _):
        answer = msgspec.json.decode(http.get("/v1/models").content, type=ModelsAnswer)
        one = msgspec.json.decode(http.get("/v1/models/alias").content, type=ModelEntry)
    first, alias = answer.data
    assert alias == one and (alias.id, alias.root) == ("alias", first.id)
    return first


def test_an_embedder_names_its_prompts(tmp_path: Path) -> None:
    entry = entry_of("prompts", tmp_path)
    assert entry.is_embedder and entry.similarity == "cosine" and entry.score_kind == "bi"
    assert entry.prompts == {"query": "query: ", "document": "passage: "}
    assert entry.labels == [] and entry.late is None and not entry.has_chat_template
    assert entry.token_style == "wordpiece"


def test_a_reranker_is_no_embedder(tmp_path: Path) -> None:
    entry = entry_of("cross-encoder", tmp_path)
    assert entry.score_kind == "cross" and not entry.is_embedder and "embed" in entry.tasks


def test_an_inference_model_classifies_by_labels_of_the_request(tmp_path: Path) -> None:
    entry = entry_of("nli", tmp_path)
    assert entry.reads_pairs and entry.zero_shot
    assert entry.labels == ["entailment", "neutral", "contradiction"]


def test_a_classifier_does_not(tmp_path: Path) -> None:
    entry = entry_of("classifier", tmp_path)
    assert not entry.reads_pairs and not entry.zero_shot and len(entry.labels) == 4


def test_a_late_interaction_model_tells_how_it_reads_texts(tmp_path: Path) -> None:
    entry = entry_of("colbert", tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert entry.score_kind == "late" and entry.late is not None
    assert entry.late.query_marker_id == tokenizer.token_id("query")
    assert entry.late.document_marker_id == tokenizer.token_id("document")
    assert entry.late.expansion_id == tokenizer.token_id("[MASK]")
    assert entry.late.expand_to == entry.late.query_length == 32
    assert tokenizer.token_id("!") in entry.late.skipped_ids and not entry.late.skips_in_queries


def test_a_model_that_generates_tells_whether_it_can_chat(tmp_path: Path) -> None:
    entry = entry_of("llama", tmp_path)
    assert entry.has_chat_template and not entry.is_embedder
    assert entry.token_style == "byte_level"


@pytest.mark.parametrize("kind", MAKERS)
def test_the_style_of_tokens_is_read_from_the_decoder(kind: str, tmp_path: Path) -> None:
    expected = "byte_level" if kind == "byte bpe" else "metaspace"
    assert Tokenizer(tokenizer_folder(kind, tmp_path)).token_style == expected
