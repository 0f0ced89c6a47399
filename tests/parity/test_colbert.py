"""Late-interaction checkpoints against the reference's steps, compared by vector in fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from penstock.errors import BadValue, ModelLoadError, NotPossible
from penstock.inputs.processor import InputOptions
from penstock.offline.engine import Engine
from penstock.outputs.tokens import token_rows
from penstock.tasks.multi_task import want_more_outputs
from penstock.types import PoolingParams, Task
from tests.checkpoints import write_json
from tests.parity.colbert import DIM, LATE, bert_tokenizer, worst
from tests.parity.reference import make_texts
from tests.thinning import ALL_CASES

TEXTS = [text for text in make_texts(24, seed=3) if text] + [
    "Who, what; (where)?",
    "a-b/c.d",
    "  spaced out  ",
]


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", threads=1, dtype="float32", **options) as opened:
        yield opened


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("attend", [False, True])
def test_expanded_queries_equal_the_references(name: str, attend: bool, tmp_path: Path) -> None:
    late = LATE[name]
    word = "attend_to_mask_tokens" if late.stanford else "attend_to_expansion_tokens"
    reference = late.write(tmp_path, **{word: attend})
    with engine(tmp_path) as ours:
        vectors = ours.token_embed(TEXTS, input_type="query")
        assert all(row.shape == (reference.how.query_length, DIM) for row in vectors)
        assert worst(vectors, reference.encode(TEXTS, query=True)) <= 1e-5


@pytest.mark.parametrize("name", LATE)
def test_queries_without_expansion_equal_the_references(name: str, tmp_path: Path) -> None:
    reference = LATE[name].write(tmp_path, do_query_expansion=False)
    with engine(tmp_path) as ours:
        vectors = ours.token_embed(TEXTS, input_type="query")
        assert worst(vectors, reference.encode(TEXTS, query=True)) <= 1e-5
    assert max(len(row) for row in vectors) == reference.how.query_length  # some were truncated


@pytest.mark.parametrize("name", LATE)
def test_documents_equal_the_references_without_punctuation(name: str, tmp_path: Path) -> None:
    reference = LATE[name].write(tmp_path)
    with engine(tmp_path) as ours:
        vectors = ours.token_embed(TEXTS)
        assert worst(vectors, reference.encode(TEXTS, query=False)) <= 1e-5
        assert worst(ours.token_embed(TEXTS, input_type="document"), vectors) == 0
        lengths = [len(row) for row in ours.tokenize(TEXTS)]
    assert any(len(row) < length + 1 for row, length in zip(vectors, lengths, strict=True))
    assert max(lengths) + 1 > reference.how.document_length  # some were truncated


@pytest.mark.parametrize("name", LATE)
def test_a_text_has_the_same_vectors_alone_and_among_others(name: str, tmp_path: Path) -> None:
    LATE[name].write(tmp_path)
    with engine(tmp_path, max_num_batched_tokens=256) as ours:
        for kind in ("query", "document"):
            together = ours.token_embed(TEXTS, input_type=kind)
            alone = [ours.token_embed(text, input_type=kind)[0] for text in TEXTS]
            assert worst(alone, together) <= 1e-5


def test_expansion_tokens_beyond_the_attention_window_equal_the_references(tmp_path: Path) -> None:
    reference = LATE["pylate-modernbert"].write(tmp_path, query_length=64)
    with engine(tmp_path) as ours:
        vectors = ours.token_embed(["a", "the water"], input_type="query")
    assert worst(vectors, reference.encode(["a", "the water"], query=True)) <= 1e-5


def test_a_skip_list_may_hold_words_or_be_empty(tmp_path: Path) -> None:
    texts = ["the water, the oil", "of and to"]
    some = LATE["pylate-bert"].write(tmp_path / "some", skiplist_words=["the", ",", "nosuchword"])
    none = LATE["stanford"].write(tmp_path / "none", mask_punctuation=False)
    for reference, folder in ((some, "some"), (none, "none")):
        with engine(tmp_path / folder) as ours:
            assert worst(ours.token_embed(texts), reference.encode(texts, query=False)) <= 1e-5


def test_without_metadata_the_defaults_apply_and_documents_have_the_models_limit(tmp_path: Path) -> None:
    reference = LATE["stanford"].write(tmp_path, doc_maxlen=256, query_maxlen=32)
    (tmp_path / "artifact.metadata").unlink()
    long = " ".join(["water"] * 250)
    with engine(tmp_path) as ours:
        late = ours.spec.late
        assert late is not None and (late.query_length, late.document_length, late.expand_to) == (
            None,
            None,
            32,
        )
        assert worst(ours.token_embed([long]), reference.encode([long], query=False)) <= 1e-5
        assert worst(ours.token_embed("a", input_type="query"), reference.encode(["a"], query=True)) <= 1e-5
        assert len(ours.token_embed(long, input_type="query")[0]) > 250, "nothing is cut unasked"
        with pytest.raises(BadValue, match="303 tokens, but the model takes at most 256"):
            ours.token_embed(" ".join(["water"] * 300))
        assert len(ours.token_embed(" ".join(["water"] * 300), truncate_prompt_tokens=-1)[0]) == 256


def test_a_caller_may_truncate_documents_to_another_length(tmp_path: Path) -> None:
    late, text = LATE["stanford"], " ".join(["water"] * 150)
    for length in (20, 120):
        reference = late.write(tmp_path / str(length), doc_maxlen=length)
        (tmp_path / str(length) / "artifact.metadata").write_text(json.dumps({"doc_maxlen": 60}))
        with engine(tmp_path / str(length)) as ours:
            vectors = ours.token_embed([text], truncate_prompt_tokens=length)
            assert worst(vectors, reference.encode([text], query=False)) <= 1e-5
            left = ours.token_embed([text + " oil"], truncate_prompt_tokens=length, truncation_side="left")
            assert not np.allclose(left[0], vectors[0])


def test_overrides_win_over_the_files(tmp_path: Path) -> None:
    LATE["stanford"].write(tmp_path)
    reference = LATE["stanford"].write(tmp_path / "other", query_maxlen=12, attend_to_mask_tokens=True)
    words = {"query_maxlen": 12, "attend_to_mask_tokens": True}
    with engine(tmp_path, hf_overrides=words) as ours:
        vectors = ours.token_embed(TEXTS, input_type="query")
    assert worst(vectors, reference.encode(TEXTS, query=True)) <= 1e-5


def test_queries_and_documents_of_many_calls_share_steps(tmp_path: Path) -> None:
    """Rows with and without a key limit, some of equal length, share a step."""
    reference = LATE["stanford"].write(tmp_path)
    filler = [" ".join(["water"] * 21), "oil"]  # as a document, the first text has as many tokens as a query
    with engine(tmp_path) as ours:
        jobs = [(kind, text) for text in (TEXTS[:6] + filler) for kind in ("query", "document")]
        futures = []
        for number, (kind, text) in enumerate(jobs):
            options = InputOptions(input_type=kind)
            params = PoolingParams(Task.TOKEN_EMBED)
            request = ours.local.text.processor.prepare(f"r{number}", text, params, options)
            futures.append((request, ours.local.engine.submit(request)))
        for (kind, text), (request, future) in zip(jobs, futures, strict=True):
            vectors = token_rows(request, future.result(60).values)
            assert worst(vectors, reference.encode([text], query=kind == "query")) <= 1e-5


def test_a_late_model_offers_the_tasks_that_its_files_allow(tmp_path: Path) -> None:
    LATE["stanford"].write(tmp_path)
    with engine(tmp_path) as ours:
        assert [task.value for task in ours.spec.tasks] == ["token_embed", "score"]
        assert ours.spec.token_dim == DIM
        with pytest.raises(NotPossible, match="no task 'embed'"):
            ours.embed("a")
        assert ours.token_embed("a", dimensions=8, dtype="float16")[0].shape[1] == 8


def test_a_marker_that_is_no_token_is_refused(tmp_path: Path) -> None:
    LATE["stanford"].write(tmp_path, query_maxlen=24)
    (tmp_path / "artifact.metadata").write_text(json.dumps({"query_token_id": "[nowhere]"}))
    with pytest.raises(ModelLoadError, match=r"\[nowhere\]"), engine(tmp_path):
        pass


def test_a_folder_without_weights_reads_documents_up_to_the_limit_that_is_asked_for(tmp_path: Path) -> None:
    """The shape and the flags of a long-document reranking load, with few layers."""
    bert_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"architectures": ["HF_ColBERT"], "model_type": "bert", "dim": 128, "hidden_size": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    sizes = {"max_position_embeddings": 4096, "vocab_size": bert_tokenizer().get_vocab_size()}
    write_json(tmp_path / "config.json", config | layers | sizes)
    write_json(tmp_path / "tokenizer_config.json", {"model_max_length": 512, "mask_token": "[MASK]"})
    flags = {"load_format": "dummy", "max_model_len": 4096, "max_num_batched_tokens": 4096}
    with engine(tmp_path, **flags) as ours:
        (vectors,) = ours.token_embed(" ".join(["water"] * 3000))
        assert vectors.shape == (3003, 128)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert ours.token_embed("water", input_type="query")[0].shape == (32, 128)


@pytest.mark.parametrize("strategy", ["fixed", "min", None])
@pytest.mark.parametrize("name", ["pylate-bert", "pylate-modernbert"])
def test_multi_vector_encoder_folders_equal_the_reference(
    name: str, strategy: str | None, tmp_path: Path
) -> None:
    """sentence-transformers stores markers as prompts, and other settings in other files than PyLate."""
    library = pytest.importorskip("sentence_transformers", minversion="6.0")
    LATE[name].write(tmp_path / "pylate")
    reference = library.MultiVectorEncoder(str(tmp_path / "pylate"), device="cpu")
    expansion = {"strategy": strategy, "attend": False, "length": 16}
    reference[0].query_expansion = expansion if strategy else None
    reference[0].query_length = 40
    reference.save(str(tmp_path / "saved"), create_model_card=False)
    with engine(tmp_path / "saved") as ours:
        assert ours.spec.late is not None and ours.spec.late.query_marker == ""
        for kind in ("query", "document"):
            encode = reference.encode_query if kind == "query" else reference.encode_document
            vectors = ours.token_embed(TEXTS, input_type=kind)
            assert worst(vectors, encode(TEXTS, convert_to_numpy=True)) <= 1e-5


def by_hand(queries: list[Any], documents: list[Any]) -> list[float]:
    """MaxSim: for each query vector the largest product with a document vector, summed."""
    return [
        float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0
        for query, document in zip(queries, documents, strict=True)
    ]


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "steps": {"max_num_batched_tokens": 64},
    "cache": {"document_cache_gb": 0.001},
}
# Storing and comparing vectors does not depend on the model, so only three models try every option.
SCORED = [
    pytest.param(name, options, id=f"{name}-{way}")
    for number, name in enumerate(LATE)
    for way, options in OPTIONS.items()
    if ALL_CASES or not options or number < 3
]


@pytest.mark.parametrize(("name", "options"), SCORED)
def test_scores_equal_the_references(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference = LATE[name].write(tmp_path)
    documents = [*TEXTS, TEXTS[0], "...", "a"]  # a duplicate, only punctuation, one word
    vectors = reference.encode(documents, query=False)
    (query,) = reference.encode([TEXTS[1]], query=True)
    with engine(tmp_path, **options) as ours:
        expected = by_hand([query] * len(documents), vectors)
        for _ in range(2):  # the second time, the query's vectors are cached
            np.testing.assert_allclose(ours.score(TEXTS[1], documents), expected, atol=2e-4)
        several = by_hand(reference.encode(TEXTS, query=True), reference.encode(TEXTS[::-1], query=False))
        np.testing.assert_allclose(ours.score(TEXTS, TEXTS[::-1]), several, atol=2e-4)
        best = ours.rerank(TEXTS[1], documents, top_n=3)
        assert [row.index for row in best] == np.argsort(-np.array(expected), kind="stable")[:3].tolist()
        places = ours.local.engine.core.scheduler.vector_cache
        assert places is not None and places.query_hits > 0
        places.check_integrity()
        if places.keeps_documents:
            assert places.document_hits > len(TEXTS)


def test_a_late_model_refuses_an_instruction(tmp_path: Path) -> None:
    LATE["stanford"].write(tmp_path)
    with engine(tmp_path) as ours, pytest.raises(NotPossible, match="takes no instruction"):
        ours.score("a", ["b"], instruction="find")


def test_a_salt_keeps_cached_queries_separate(tmp_path: Path) -> None:
    LATE["stanford"].write(tmp_path)
    with engine(tmp_path) as ours:
        places = ours.local.engine.core.scheduler.vector_cache
        assert places is not None
        for salt, hits in (("a", 0), ("b", 0), ("a", 1)):
            ours.score("who is there?", ["a", "b"], cache_salt=salt)
            assert places.query_hits == hits


def test_tasks_that_read_texts_differently_are_refused_in_one_request(tmp_path: Path) -> None:
    LATE["stanford"].write(tmp_path)
    with engine(tmp_path) as ours:
        assert list(ours.outputs(["a"], ["token_embed"])) == ["token_embed"]
        request = ours.local.text.processor.prepare("r", ["a"], PoolingParams(Task.TOKEN_EMBED))
        with pytest.raises(NotPossible, match="one task at a time"):
            want_more_outputs(ours.local.text, request, [PoolingParams(Task.EMBED)])
