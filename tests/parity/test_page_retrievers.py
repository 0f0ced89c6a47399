"""ColQwen's token vectors and MaxSim scores, in the layouts of colpali-engine and of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock import Engine
from penstock.checkpoint.describe import read_spec
from penstock.errors import ModelLoadError
from penstock.inputs.processor import InputOptions
from penstock.types import PoolingParams, Task, split_rows
from tests.parity.page_retrievers import DIM, LAYOUTS
from tests.parity.qwen_vl import make_row, qwen_tokenizer, request_of

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
        pairs = np.array([0, 1, 0], dtype=np.int32)  # the query of each page
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


def test_a_width_that_the_weights_contradict_is_refused(tmp_path: Path) -> None:
    LAYOUTS["ColQwen3"](tmp_path / "model")
    with pytest.raises(ModelLoadError, match="custom_text_proj"):
        read_spec(tmp_path / "model", "colqwen", {"embed_dim": 128})
