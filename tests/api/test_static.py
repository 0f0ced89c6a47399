"""Static models over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.api.local_app import local_app
from tests.checkpoints import wordpiece_tokenizer, write_json, write_modules, write_splade, write_static


def test_a_static_model_is_served_as_any_embedder(tmp_path: Path) -> None:
    with local_app(write_static(tmp_path)) as (client, _):
        body = {"model": "model", "input": ["the water", " "], "dimensions": 4}
        answer = client.post("/v1/embeddings", json=body).json()
        assert [len(row["embedding"]) for row in answer["data"]] == [4, 4]
        assert not any(answer["data"][1]["embedding"])
        assert client.get("/v1/models").json()["data"][0]["dimensions"] == 32
        body = {"model": "model", "query": "the water", "documents": ["the water", "a"]}
        assert client.post("/rerank", json=body).json()["results"][0]["index"] == 0


def test_a_query_of_an_inference_free_model_never_reaches_the_engine(tmp_path: Path) -> None:
    folder, query = write_splade(tmp_path), tmp_path / "query_0_SparseStaticEmbedding"
    query.mkdir()
    tokenizer = wordpiece_tokenizer()
    tokenizer.save(str(query / "tokenizer.json"))
    ids = tokenizer.encode("the water", add_special_tokens=False).ids
    weights = np.linspace(0.5, 1.5, tokenizer.get_vocab_size(), dtype=np.float32)
    save_file({"weight": weights}, query / "model.safetensors")
    rows = json.loads((folder / "modules.json").read_text())
    kinds = {row["path"]: row["type"] for row in rows} | {query.name: "SparseStaticEmbedding"}
    structure = {"query": [query.name], "document": [row["path"] for row in rows]}
    write_json(folder / "router_config.json", {"types": kinds, "structure": structure, "parameters": {}})
    write_modules(folder, [("Router", "")])
    with local_app(folder) as (client, engine):
        body = {"model": "model", "input": "the water the", "input_type": "query"}
        (answer,) = client.post("/v1/sparse", json=body).json()["data"]
        found = {term["token_id"]: term["weight"] for term in answer["sparse"]}
        assert found == pytest.approx({token: float(weights[token]) for token in ids})
        assert not engine.requests
        client.post("/v1/sparse", json=body | {"input_type": "document"})
        assert len(engine.requests) == 1
