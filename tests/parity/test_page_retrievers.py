"""ColQwen's token vectors and MaxSim scores, in the layouts of colpali-engine and transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from penstock import Engine
from penstock.checkpoint.describe import read_spec
from penstock.errors import ModelLoadError
from penstock.inputs.processor import InputOptions
from penstock.types import PoolingParams, Task, split_rows
from tests.parity.page_retrievers import DIM, LAYOUTS
from tests.parity.qwen_vl import (
    Row,
    make_model,
    make_row,
    qwen_tokenizer,
    reference_states,
    request_of,
    write_model,
)
from tests.parity.reference import Vectors

QUERIES = [make_row(7, seed=1), make_row(3, seed=2)]
PAGES = [make_row(4, (6, 8), 5, seed=3), make_row(2, (4, 4), 3, seed=4), make_row(9, seed=5)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_vectors_and_scores_of_pages_are_those_of_the_reference(layout: str, tmp_path: Path) -> None:
    reference, folder = LAYOUTS[layout](tmp_path / "model"), tmp_path / "model"
    with Engine(str(folder), dtype="float32", device="cpu") as engine:
        assert engine.spec.tasks == (Task.TOKEN_EMBED, Task.SCORE)
        assert engine.spec.token_dim == DIM
        rows = [*QUERIES, *PAGES]
        output = engine.local.engine.submit(
            request_of("vectors", rows, PoolingParams(Task.TOKEN_EMBED))
        ).result()
        lengths = np.array([len(row.ids) for row in rows], dtype=np.int32)
        own = split_rows(output.values, lengths)
        wanted = [reference(row) for row in rows]
        for vectors, expected in zip(own, wanted, strict=True):
            assert np.abs(vectors - expected).max() < 1e-5
        pairs = np.array([0, 1, 0], dtype=np.int32)  # query index of each page
        params = PoolingParams(Task.SCORE, late=True)
        scored = engine.local.engine.submit(request_of("scores", rows, params, pairs=pairs)).result()
        queries, pages = wanted[:2], wanted[2:]
        maxsim = [(queries[q] @ page.T).max(axis=1).sum() for q, page in zip(pairs, pages, strict=True)]
        assert np.abs(scored.values.reshape(-1) - maxsim).max() < 1e-4


def test_queries_end_with_the_tokens_that_their_library_adds(tmp_path: Path) -> None:
    tokenizer = qwen_tokenizer()
    for layout, prefix, end in (("ColQwen3", "", ""), ("ColQwen2ForRetrieval", "Query: ", "\n")):
        folder = tmp_path / layout
        LAYOUTS[layout](folder)
        with Engine(str(folder), dtype="float32", device="cpu") as engine:
            processor, options = engine.local.text.processor, InputOptions(input_type="query")
            request = processor.prepare("a", ["the page"], PoolingParams(Task.TOKEN_EMBED), options)
            text = prefix + "the page" + "<|endoftext|>" * 10 + end
            assert request.token_ids.tolist() == tokenizer.encode(text).ids


def test_published_checkpoints_get_the_prompt_that_their_library_wrote_when_it_trained_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """colpali-engine dropped "Query: " in 0.3.13; mteb restores it for earlier checkpoints (mteb#5207)."""
    tokenizer = qwen_tokenizer()
    for name, layout, prefix in (
        ("colqwen2-v1.0-merged", "ColQwen2", "Query: "),
        ("colqwen2.5-v0.2", "ColQwen2_5", "Query: "),
        ("colnomic-embed-multimodal-3b", "ColQwen2_5", "Query: "),
        ("my-retriever", "ColQwen2_5", ""),
        ("tomoro-colqwen3-embed-4b", "ColQwen3", ""),
    ):
        folder = tmp_path / name
        LAYOUTS[layout](folder)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "penstock.load"):
            spec = read_spec(folder, name)
        assert ("nothing says whether my-retriever was trained" in caplog.text) == (name == "my-retriever")
        assert spec.prompts == ({"query": prefix} if prefix else {})
        with Engine(str(folder), dtype="float32", device="cpu") as engine:
            processor, options = engine.local.text.processor, InputOptions(input_type="query")
            request = processor.prepare("a", ["the page"], PoolingParams(Task.TOKEN_EMBED), options)
            text = prefix + "the page" + "<|endoftext|>" * 10
            assert request.token_ids.tolist() == tokenizer.encode(text).ids


def test_the_processors_file_names_the_prompt_of_queries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "my-retriever"
    LAYOUTS["ColQwen2_5"](folder)
    for given, prompts in (("Query: ", {"query": "Query: "}), ("", {})):
        (folder / "processor_config.json").write_text(json.dumps({"query_prefix": given}))
        assert read_spec(folder, "my-retriever").prompts == prompts
    assert "nothing says" not in caplog.text


@pytest.mark.parametrize(
    ("name", "kind", "layout", "prefix", "num_ends"),
    [
        ("nomic-embed-multimodal-3b", "qwen2_5_vl", "BiQwen2_5", "Query: ", 1),
        ("my-retriever", "qwen2_vl", "BiQwen2", "", 10),
        ("another", "qwen3_vl", "BiQwen3", "", 10),
    ],
)
def test_queries_of_retrievers_with_one_vector_end_with_the_token_that_is_pooled(
    name: str, kind: str, layout: str, prefix: str, num_ends: int, tmp_path: Path
) -> None:
    """nomic-ai/colpali adds "Query: " and one token; current colpali-engine adds ten tokens and no prompt."""
    folder, model = tmp_path / name, make_model(kind, "Model")
    write_model(folder, model)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [layout]}))

    def vector(text: str) -> Vectors:
        last = reference_states(model, Row(qwen_tokenizer().encode(text).ids))[-1]
        found: Vectors = last / np.linalg.norm(last)
        return found

    with Engine(str(folder), dtype="float32", device="cpu") as engine:
        (query,) = engine.embed(["the page"], input_type="query")
        (document,) = engine.embed(["the page"])
    assert np.abs(query - vector(prefix + "the page" + "<|endoftext|>" * num_ends)).max() < 1e-5
    assert np.abs(document - vector("the page")).max() < 1e-5


def test_a_width_that_the_weights_contradict_is_refused(tmp_path: Path) -> None:
    LAYOUTS["ColQwen3"](tmp_path / "model")
    with pytest.raises(ModelLoadError, match="custom_text_proj"):
        read_spec(tmp_path / "model", "colqwen", {"embed_dim": 128})
