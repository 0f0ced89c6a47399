"""Embedders that are published with their own code, against the steps of that code."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

import torch

from penstock import Engine
from penstock.errors import BadValue, ModelLoadError
from tests.parity.decoders import FAMILIES, ROWS, reference_states, unit
from tests.parity.embedders import EMBEDDERS, TASKS, write_jina_v5, write_modules, write_nv_embed
from tests.parity.reference import cosines


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **{"max_num_batched_tokens": 1024} | options)


@pytest.mark.parametrize("name", EMBEDDERS)
def test_states_and_vectors_equal_those_of_the_published_code(name: str, tmp_path: Path) -> None:
    embedder = EMBEDDERS[name]
    states = embedder.write(tmp_path).token_states(ROWS)
    with open_engine(tmp_path, hf_overrides=embedder.overrides) as engine:
        ours = np.concatenate(engine.token_embed(ROWS, normalize=False))
        vectors = engine.embed(ROWS)
    np.testing.assert_allclose(ours, np.concatenate(states), atol=2e-5)
    np.testing.assert_allclose(vectors, unit(embedder.pooled(states)), atol=1e-5)
    with open_engine(tmp_path, dtype="bfloat16", hf_overrides=embedder.overrides) as engine:
        assert cosines(engine.embed(ROWS), vectors).min() >= 0.999


POOLING = ("sentence_transformers.models.Pooling", "1_Pooling", {"pooling_mode_mean_tokens": True})
TRANSFORMER = ("sentence_transformers.models.Transformer", "", None)
QUANTIZER = ("st_quantize.FlexibleQuantizer", "", None)


def write_pplx(folder: Path, *modules: tuple[str, str, dict[str, Any] | None]) -> Path:
    FAMILIES["pplx"].write(folder)
    write_modules(folder, *modules)
    return folder


def test_pplx_embed_gives_the_integers_and_bits_of_its_quantizer(tmp_path: Path) -> None:
    folder = write_pplx(tmp_path, TRANSFORMER, POOLING, QUANTIZER)
    pooled = torch.from_numpy(np.stack([s.mean(0) for s in reference_states(FAMILIES["pplx"], folder)]))
    whole = (pooled.tanh() * 127).round().numpy()
    bits = np.packbits(pooled.numpy() >= 0, axis=-1)
    assert (whole == 0).any(), "the sign of the vector differs from that of the integers"
    with open_engine(folder) as engine:
        found = engine.embed(ROWS)
        assert (found == found.round()).all() and np.abs(
            found - whole
        ).max() <= 1  # ties may round either way
        assert (found == whole).mean() > 0.99
        np.testing.assert_array_equal(engine.embed(ROWS, dtype="int8"), found)
        np.testing.assert_array_equal(engine.embed(ROWS, dtype="uint8"), found + 128)
        np.testing.assert_array_equal(engine.embed(ROWS, dtype="ubinary"), bits)
        np.testing.assert_array_equal(engine.embed(ROWS, dimensions=16), found[:, :16])
        np.testing.assert_allclose(engine.embed(ROWS, normalize=True), unit(found), atol=1e-6)
        scores = engine.score("a text", ["another one"])
        query, document = engine.embed(["a text", "another one"])
        np.testing.assert_allclose(np.ravel(scores), unit(query[None]) @ unit(document[None])[0], atol=1e-5)


def test_a_module_after_the_quantizer_is_refused(tmp_path: Path) -> None:
    last = ("sentence_transformers.models.Normalize", "2_Normalize", None)
    folder = write_pplx(tmp_path, TRANSFORMER, POOLING, QUANTIZER, last)
    with pytest.raises(ModelLoadError, match="a module after FlexibleQuantizer"):
        open_engine(folder)


@pytest.mark.parametrize("base", ["Qwen3", "EuroBert"])
def test_each_request_chooses_a_task_adapter_of_jina_embeddings_v5(base: str, tmp_path: Path) -> None:
    references = {task: write_jina_v5(tmp_path / task, base, task) for task in TASKS}
    expected = {
        task: unit(np.stack([states[-1] for states in reference.token_states(ROWS)]))
        for task, reference in references.items()
    }
    with open_engine(tmp_path / "retrieval") as engine:
        assert engine.spec.adapters == tuple(TASKS) and engine.spec.is_causal == (base == "Qwen3")
        found = {task: engine.embed(ROWS, adapter=task) for task in TASKS}
        for task, vectors in expected.items():
            np.testing.assert_allclose(found[task], vectors, atol=2e-5)
        assert np.abs(found["retrieval"] - found["clustering"]).max() > 0.1
        cut = engine.embed(ROWS, adapter="clustering", dimensions=16)
        np.testing.assert_allclose(cut, unit(expected["clustering"][:, :16]), atol=2e-5)
        mixed = asyncio.run(_at_once(engine, list(TASKS)))
        for task, vectors in zip(TASKS, mixed, strict=True):
            np.testing.assert_allclose(vectors, expected[task], atol=2e-5)


async def _at_once(engine: Engine, tasks: list[str]) -> list[Any]:
    """Run rows with different adapters in one step."""
    calls = (asyncio.to_thread(engine.embed, ROWS, adapter=task) for task in tasks)
    return await asyncio.gather(*calls)


def test_jina_embeddings_v5_refuses_a_request_without_a_task(tmp_path: Path) -> None:
    write_jina_v5(tmp_path, "EuroBert")
    with open_engine(tmp_path) as engine:
        assert engine.spec.prompts == {"query": "Query: ", "document": "Document: "}
        with pytest.raises(BadValue, match=r"needs an adapter.*retrieval, text-matching, clustering"):
            engine.embed(["a text"])
        as_query = engine.embed(["a text"], input_type="query")
        np.testing.assert_array_equal(
            as_query, engine.embed(["Query: a text"], prompt="", adapter="retrieval")
        )
        with pytest.raises(BadValue, match="adapter 'poetry' is unknown"):
            engine.embed(["a text"], adapter="poetry")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("peft_type", "IA3"),
        ("modules_to_save", ["norm"]),
        ("rank_pattern", {"q_proj": 8}),
        ("bias", "all"),
        ("r", 5),
        ("target_modules", ["q_proj"]),
    ],
)
def test_an_adapter_that_is_not_understood_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    write_jina_v5(tmp_path, "EuroBert")
    file = tmp_path / "adapters/clustering/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    message = {"r": "its rank is 5", "rank_pattern": "its rank is 8"}.get(key, key)
    with pytest.raises(ModelLoadError, match=message):
        open_engine(tmp_path)


def test_nv_embed_ends_texts_and_leaves_the_instruction_out_of_the_mean(tmp_path: Path) -> None:
    reference = write_nv_embed(tmp_path)
    with open_engine(tmp_path) as engine:
        (prompt,) = engine.tokenize(["Instruct: find it\nQuery: "], add_special_tokens=False)
        (row,) = engine.tokenize(["Instruct: find it\nQuery: a text</s>"])
        first = 1 + len(prompt)  # first token of the text
        assert row[0] == 0 and row[-1] == 2 and row[1 : first - 1] == prompt[:-1]
        found = engine.embed(["a text"], instruction="find it")
        plain = engine.embed(["a text"])
        ids = engine.tokenize(["a text</s>"])
    (states,) = reference.token_states([row])
    np.testing.assert_allclose(found, unit(states[None, first:].mean(1)), atol=1e-5)
    (states,) = reference.token_states(ids)
    np.testing.assert_allclose(plain, unit(states[None].mean(1)), atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"latent_attention_config": None}, "latent_attention_config"),
        ({"latent_attention_config": {"latent_dim": 7}}, "latent_dim = 7"),
        ({"mask_type": "d"}, "mask_type = 'd'"),
    ],
)
def test_an_nv_embed_of_another_form_is_refused(overrides: Any, message: str, tmp_path: Path) -> None:
    write_nv_embed(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        open_engine(tmp_path, hf_overrides=overrides)
