"""Pair rows equal those of the tokenizers library, whatever the lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Rust
from tokenizers import processors

from penstock.checkpoint.score import ScoreSpec
from penstock.errors import BadValue, NotPossible
from penstock.inputs.pair_options import PairOptions, make_pairs
from penstock.inputs.pairs import prepare_pairs, score_kind
from penstock.inputs.processor import InputProcessor
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import PoolingParams, Request, Task
from tests.checkpoints import WORDS, wordpiece_tokenizer, wordpiece_vocabulary
from tests.helpers import make_spec, row_tokens
from tests.thinning import num_examples

SCORE = PoolingParams(Task.SCORE)


def double_separator() -> Rust:
    tokenizer = wordpiece_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def make(folder: Path, tokenizer: Rust | None = None, **changes: Any) -> InputProcessor:
    (tokenizer or wordpiece_tokenizer()).save(str(folder / "tokenizer.json"))
    values = {
        "vocab_size": len(wordpiece_vocabulary()),
        "tasks": (Task.CLASSIFY, Task.SCORE),
        "num_segments": 2,
        "score": ScoreSpec(),
    }
    return InputProcessor(make_spec(**values | changes), Tokenizer(folder))


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    return make(tmp_path_factory.mktemp("cross"))


def rows_of(request: Request) -> list[list[int]]:
    return [row_tokens(request, row) for row in range(request.num_rows)]


words = st.lists(st.sampled_from(WORDS[:30]), max_size=12).map(" ".join)


@pytest.mark.parametrize("tokenizer", [wordpiece_tokenizer, double_separator])
@settings(max_examples=num_examples(60), deadline=None)
@given(
    queries=st.lists(words, min_size=1, max_size=4),
    documents=st.lists(words, min_size=1, max_size=6),
    cut=st.integers(7, 16),
)
def test_pair_rows_equal_those_of_the_tokenizer(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Callable[[], Rust],
    queries: list[str],
    documents: list[str],
    cut: int,
) -> None:
    rust = tokenizer()
    processor = make(tmp_path_factory.mktemp("pairs"), rust)
    pairs = [(query, document) for query in queries for document in documents]
    options = PairOptions(truncate_prompt_tokens=cut)
    request = prepare_pairs(processor, "r", pairs, SCORE, options)
    rust.enable_truncation(cut, strategy="longest_first")
    expected = rust.encode_batch(pairs)
    assert rows_of(request) == [row.ids for row in expected]
    types = [kind for row in expected for kind in row.type_ids]
    assert (request.type_ids.tolist() if request.type_ids is not None else [0] * len(types)) == types
    assert request.pairs is None and not request.reuse_prefix


def test_models_without_segments_get_no_type_ids(tmp_path: Path) -> None:
    processor = make(tmp_path, num_segments=1)
    assert prepare_pairs(processor, "r", [("a", "b")], SCORE).type_ids is None


def test_pairs_may_be_truncated_on_the_left(cross: InputProcessor) -> None:
    pairs = [("a", "one two three four" * 1 + " time water oil word find look see")]
    left = prepare_pairs(
        cross, "r", pairs, SCORE, PairOptions(truncate_prompt_tokens=8, truncation_side="left")
    )
    whole = cross.tokenizer.encode(["word find look see"], add_special_tokens=False)[0]
    assert left.token_ids[-5:-1].tolist() == whole.tolist()


def test_a_templated_pair_tokenises_like_one_text(tmp_path: Path) -> None:
    processor = make(tmp_path, score=ScoreSpec(template=("Query: {query}\nSentence: {document}",)))
    pairs = [("the water", "{query} is long"), ("oil", "")]
    request = prepare_pairs(processor, "r", pairs, SCORE)
    texts = ["Query: the water\nSentence: {query} is long", "Query: oil\nSentence: "]
    assert rows_of(request) == [row.tolist() for row in processor.tokenizer.encode(texts)]
    cut = prepare_pairs(processor, "r", pairs, SCORE, PairOptions(truncate_prompt_tokens=8))
    assert rows_of(cut)[0] == [*rows_of(request)[0][:7], 3]


def test_the_text_after_a_truncated_document_is_kept(tmp_path: Path) -> None:
    template = ("find {instruction} {query} in", "a {document}", "one way")
    processor = make(tmp_path, score=ScoreSpec(template=template, instruction="the", closed=False))
    encode = processor.tokenizer.encode
    request = prepare_pairs(
        processor, "r", [("oil", "water " * 30)], SCORE, PairOptions(truncate_prompt_tokens=12)
    )
    (row,) = rows_of(request)
    before, after = (
        encode([text], add_special_tokens=False)[0].tolist() for text in ("find the oil in", "one way")
    )
    water = encode(["a water"], add_special_tokens=False)[0].tolist()
    assert row == [2, *before, *water, *water[1:] * 3, *after] and len(row) == 12
    instructed = prepare_pairs(processor, "r", [("oil", "a")], SCORE, PairOptions(instruction="long"))
    assert encode(["long"], add_special_tokens=False)[0][0] in instructed.token_ids


def test_embedders_get_query_rows_first(tmp_path: Path) -> None:
    prompts = {"query": "query ", "document": "passage "}
    processor = make(tmp_path, tasks=(Task.EMBED, Task.SCORE), score=None, prompts=prompts, max_model_len=40)
    pairs = [("oil", "water"), ("time", "long water"), ("oil", "see")]
    request = prepare_pairs(processor, "r", pairs, PoolingParams(Task.SCORE, normalize=False))
    texts = ["query oil", "query time", "passage water", "passage long water", "passage see"]
    assert rows_of(request) == [row.tolist() for row in processor.tokenizer.encode(texts)]
    assert request.pairs is not None and request.pairs.tolist() == [0, 1, 0] and request.num_queries == 2
    assert request.params.normalize is None  # it applies to vectors, not to scores


def test_models_without_scores_are_rejected(tmp_path: Path) -> None:
    assert score_kind(make_spec(score=ScoreSpec(), tasks=(Task.CLASSIFY, Task.SCORE))) == "cross"
    assert score_kind(make_spec(tasks=(Task.EMBED, Task.SCORE))) == "bi"
    with pytest.raises(NotPossible, match="cannot score pairs; its tasks are: classify"):
        score_kind(make_spec(tasks=(Task.CLASSIFY, Task.EMBED)))


def test_causal_rerankers_may_reuse_cached_prefixes(tmp_path: Path) -> None:
    processor = make(tmp_path, is_causal=True, tasks=(Task.SCORE,))
    assert prepare_pairs(processor, "r", [("a", "b")], SCORE).reuse_prefix


def test_query_and_document_counts_must_match() -> None:
    assert make_pairs("a", ["b", "c"]) == [("a", "b"), ("a", "c")]
    assert make_pairs(["a", "b"], ["c", "d"]) == [("a", "c"), ("b", "d")]
    for queries, documents in ((["a", "b"], ["c"]), ([], ["c"]), ("a", []), ("a", [3]), ([None], ["a"])):
        with pytest.raises(BadValue):
            make_pairs(queries, documents)  # type: ignore[arg-type]


def test_a_query_is_encoded_once_for_a_thousand_documents(
    cross: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    encode = cross.tokenizer.encode

    def counted(texts: Any, *options: Any) -> Any:
        seen.append(len(texts))
        return encode(texts, *options)

    monkeypatch.setattr(cross.tokenizer, "encode", counted)
    request = prepare_pairs(cross, "r", [("the water", WORDS[i % 50]) for i in range(1000)], SCORE)
    assert request.num_rows == 1000 and seen == [1, 1000]
    assert np.array_equal(request.lengths, np.diff(np.append(request.starts, request.num_tokens)))
