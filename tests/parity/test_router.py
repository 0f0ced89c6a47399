"""Inference-free SPLADE, a Router with static query weights, against sentence-transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

import torch
import transformers
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer import modules as dense_modules
from sentence_transformers.sparse_encoder.modules import (
    MLMTransformer,
    Router,
    SparseStaticEmbedding,
    SpladePooling,
)

from penstock import Engine
from penstock.errors import ModelLoadError, NotPossible
from penstock.types import Task
from tests.parity.reference import FAMILIES, Vectors, make_texts, with_head, write_transformer

TEXTS = [*(text for text in make_texts(40) if len(text) < 150), "the [MASK] water"]


def write_router(folder: Path, **options: Any) -> SparseEncoder:
    plain = write_transformer(folder / "plain", with_head("distilbert", "ForMaskedLM"), seed=2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    weight = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(5))
    weight[tokenizer.convert_tokens_to_ids("the")] = 0  # terms with weight 0 are left out
    router = Router.for_query_document(
        query_modules=[SparseStaticEmbedding(tokenizer, weight=weight)],
        document_modules=[MLMTransformer(str(plain)), SpladePooling(activation_function="log1p_relu")],
        **options,
    )
    reference = SparseEncoder(modules=[router], device="cpu", similarity_fn_name="dot")
    reference.save(str(folder / "model"), create_model_card=False)
    return reference


def with_the_model_at_the_root(folder: Path) -> None:
    """The layout of published models: the Router names the transformer's folder ""."""
    (transformer,) = (path for path in folder.iterdir() if path.name.startswith("document_0"))
    for file in transformer.iterdir():
        shutil.move(file, folder / file.name)
    transformer.rmdir()
    config = json.loads((folder / "router_config.json").read_text())
    config["types"][""] = config["types"].pop(transformer.name)
    config["structure"]["document"][0] = ""
    (folder / "router_config.json").write_text(json.dumps(config))


def open_engine(folder: Path) -> Engine:
    return Engine(str(folder), device="cpu", threads=1)


def dense(rows: list[dict[int, float]], width: int) -> Vectors:
    out = np.zeros((len(rows), width), dtype=np.float32)
    for place, row in zip(out, rows, strict=True):
        place[list(row)] = list(row.values())
    return out


@pytest.mark.parametrize("at_root", [False, True])
def test_queries_and_documents_take_their_routes(tmp_path: Path, at_root: bool) -> None:
    reference = write_router(tmp_path)
    if at_root:
        with_the_model_at_the_root(tmp_path / "model")
    assert (tmp_path / "model/config.json").exists() is at_root
    queries = reference.encode_query(TEXTS, convert_to_sparse_tensor=False).numpy()
    documents = reference.encode_document(TEXTS, convert_to_sparse_tensor=False).numpy()
    with open_engine(tmp_path / "model") as engine:
        assert engine.spec.tasks == (Task.SPARSE,)
        width = queries.shape[1]
        ours = dense(engine.sparse(TEXTS, input_type="query"), width)
        np.testing.assert_allclose(ours, queries, rtol=1e-6)
        for options in ({"input_type": "document"}, {}):
            found = dense(engine.sparse(TEXTS, truncate_prompt_tokens=-1, **options), width)
            np.testing.assert_allclose(found, documents, rtol=1e-5, atol=5e-5)
        assert engine.sparse(["the"], input_type="query") == [{}]
        (heaviest,) = engine.sparse(["water the house"], input_type="query", top_k=1)
        assert len(heaviest) == 1
        with pytest.raises(NotPossible, match="has no task 'embed'"):
            engine.embed(["the water"])


def test_the_default_route_counts_where_no_input_type_is_given(tmp_path: Path) -> None:
    reference = write_router(tmp_path, default_route="query")
    theirs = reference.encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    with open_engine(tmp_path / "model") as engine:
        np.testing.assert_allclose(dense(engine.sparse(TEXTS), theirs.shape[1]), theirs, rtol=1e-6)


def test_a_dense_router_with_two_kinds_of_routes_is_refused_by_name(tmp_path: Path) -> None:
    plain = write_transformer(tmp_path / "plain", FAMILIES["bert"])
    transformer = dense_modules.Transformer(str(plain))
    width = transformer.get_embedding_dimension()
    static = dense_modules.StaticEmbedding(transformer.tokenizer, embedding_dim=width)
    router = Router.for_query_document([static], [transformer, dense_modules.Pooling(width)])
    SentenceTransformer(modules=[router], device="cpu").save(str(tmp_path / "model"), create_model_card=False)
    with pytest.raises(ModelLoadError, match="sends queries through StaticEmbedding, which is not supported"):
        open_engine(tmp_path / "model")


def test_a_router_whose_routes_are_the_same_is_a_plain_model(tmp_path: Path) -> None:
    plain = write_transformer(tmp_path / "plain", FAMILIES["bert"])
    transformer = dense_modules.Transformer(str(plain))
    parts = [transformer, dense_modules.Pooling(transformer.get_embedding_dimension())]
    router = Router.for_query_document(parts, parts)
    reference = SentenceTransformer(modules=[router, dense_modules.Normalize()], device="cpu")
    reference.save(str(tmp_path / "model"), create_model_card=False)
    texts = [text for text in TEXTS if text]
    with open_engine(tmp_path / "model") as engine:
        ours = engine.embed(texts, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(ours, reference.encode_query(texts), atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"route_mappings": {"('query', 'text')": "query"}}, "route_mappings"),
        ({"routes": {"a": [], "b": []}}, "routes 'a', 'b'; supported: query and document"),
    ],
)
def test_routes_that_are_not_understood_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    routes = change.pop("routes", {"query": [], "document": []})
    config = {"types": {}, "structure": routes, "parameters": change}
    (tmp_path / "router_config.json").write_text(json.dumps(config))
    (tmp_path / "modules.json").write_text('[{"path": "", "type": "sentence_transformers.models.Router"}]')
    with pytest.raises(ModelLoadError, match=message):
        open_engine(tmp_path)


def test_weights_for_queries_without_modules_are_refused(tmp_path: Path) -> None:
    folder = write_transformer(tmp_path, with_head("distilbert", "ForMaskedLM"))
    (folder / "idf.json").write_text('{"the": 1.0}')
    with pytest.raises(ModelLoadError, match=r"idf\.json but no modules\.json"):
        open_engine(folder)
