"""Sparse weights against transformers and sentence-transformers, on the same files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

from penstock import AsyncEngine, Engine
from penstock.engine.progress import split_outputs
from penstock.errors import BadValue, ModelLoadError, NotPossible
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolingParams, Task
from tests.checkpoints import write_m3 as write_whole_m3
from tests.parity import decoders
from tests.parity.reference import FAMILIES, Vectors, make_texts, with_head, write_transformer

TEXTS = [text for text in make_texts(40) if len(text) < 150]
SPLADE = {"pooler_config": {"pooling_type": "splade"}}


def write_masked_lm(folder: Path, name: str, **config: Any) -> Path:
    return write_transformer(folder, with_head(name, "ForMaskedLM"), seed=2, **config)


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **options)


def dense(rows: list[dict[int, float]], vocabulary: int) -> Vectors:
    out = np.zeros((len(rows), vocabulary), dtype=np.float32)
    for place, row in zip(out, rows, strict=True):
        place[list(row)] = list(row.values())
    return out


@torch.inference_mode()
def by_the_formula(folder: Path, texts: list[str]) -> Vectors:
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        rows.append(torch.log1p(torch.relu(model(input_ids=ids).logits[0])).amax(dim=0).numpy())
    return np.stack(rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_masked_language_model_forced_to_splade_follows_the_formula(name: str, tmp_path: Path) -> None:
    folder = write_masked_lm(tmp_path, name)
    theirs = by_the_formula(folder, TEXTS)
    assert 0.05 < (theirs > 0).mean() < 0.999, "some weights are zero, some are not"
    with open_engine(folder, max_num_batched_tokens=128, **SPLADE) as engine:
        ours = dense(engine.sparse(TEXTS), theirs.shape[1])
        alone = dense([engine.sparse([text])[0] for text in TEXTS], theirs.shape[1])
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    np.testing.assert_allclose(ours, alone, atol=2e-5)


def test_an_untied_decoder_is_read_from_its_own_tensor(tmp_path: Path) -> None:
    folder = write_masked_lm(tmp_path, "bert", tie_word_embeddings=False)
    theirs = by_the_formula(folder, TEXTS[:8])
    with open_engine(folder, **SPLADE) as engine:
        np.testing.assert_allclose(dense(engine.sparse(TEXTS[:8]), theirs.shape[1]), theirs, atol=2e-5)


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_a_sparse_encoder_of_sentence_transformers_gives_its_weights(
    strategy: Any, activation: Any, tmp_path: Path
) -> None:
    plain = write_masked_lm(tmp_path / "plain", "distilbert")
    pooling = SpladePooling(pooling_strategy=strategy, activation_function=activation)
    reference = SparseEncoder(modules=[MLMTransformer(str(plain)), pooling], device="cpu")
    reference.save(str(tmp_path / "model"), create_model_card=False)
    theirs = reference.encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    with open_engine(tmp_path / "model") as engine:
        assert engine.spec.tasks[0] is Task.SPARSE
        ours = dense(engine.sparse(TEXTS), theirs.shape[1])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("name", ["qwen3-causal-lm", "gemma3-causal-lm"])
def test_a_decoder_with_its_language_head_gives_the_weights_of_sentence_transformers(
    name: str, tmp_path: Path
) -> None:
    plain = decoders.FAMILIES[name].write(tmp_path / "plain")
    logits = {"text": {"method": "forward", "method_output_name": "logits"}}
    every_token = {"text": {"logits_to_keep": 0}}
    transformer = Transformer(
        str(plain),
        transformer_task="text-generation",
        modality_config=logits,
        module_output_name="token_embeddings",
        processing_kwargs=every_token,
    )
    reference = SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")
    reference.save(str(tmp_path / "model"), create_model_card=False)
    theirs = reference.encode(TEXTS, batch_size=1, convert_to_sparse_tensor=False).numpy()
    with open_engine(tmp_path / "model") as engine:
        assert engine.spec.tasks == (Task.SPARSE, Task.EMBED, Task.TOKEN_EMBED)
        ours = dense(engine.sparse(TEXTS), theirs.shape[1])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-5)
    file = tmp_path / "model/sentence_bert_config.json"
    options = json.loads(file.read_text())
    del options["processing_kwargs"]  # without it, the reference reads only the last token
    file.write_text(json.dumps(options))
    with pytest.raises(ModelLoadError, match="logits of 1 tokens"):
        open_engine(tmp_path / "model")


def test_a_masked_language_model_on_a_decoder_has_to_say_how_it_attends(tmp_path: Path) -> None:
    folder = decoders.FAMILIES["qwen3-causal-lm"].write(tmp_path)
    named: dict[str, Any] = {"architectures": ["Qwen3ForMaskedLM"]}
    with pytest.raises(ModelLoadError, match=r"Qwen3ForMaskedLM predicts masked tokens.*is_causal"):
        open_engine(folder, hf_overrides=named, **SPLADE)
    with open_engine(folder, hf_overrides=named | {"is_causal": False}, **SPLADE) as engine:
        assert engine.sparse(["the water"])[0] and not engine.spec.is_causal


def test_the_old_module_name_of_sentence_transformers_is_accepted(tmp_path: Path) -> None:
    plain = write_masked_lm(tmp_path / "plain", "bert")
    reference = SparseEncoder(modules=[MLMTransformer(str(plain)), SpladePooling()], device="cpu")
    reference.save(str(tmp_path / "model"), create_model_card=False)
    modules = tmp_path / "model/modules.json"
    text = modules.read_text().replace("base.modules.transformer.Transformer", "models.MLMTransformer")
    assert "MLMTransformer" in text
    modules.write_text(text)
    with open_engine(tmp_path / "model") as engine:
        assert engine.sparse(["the water"], top_k=2)[0]


def test_bf16_finds_the_same_terms(tmp_path: Path) -> None:
    folder = write_masked_lm(tmp_path, "bert")
    theirs = by_the_formula(folder, TEXTS)
    with open_engine(folder, dtype="bfloat16", **SPLADE) as engine:
        ours = dense(engine.sparse(TEXTS), theirs.shape[1])
    cosine = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert cosine.min() > 0.999


def test_top_k_and_min_weight_keep_the_heaviest_terms_in_order(tmp_path: Path) -> None:
    folder = write_masked_lm(tmp_path, "bert")
    with open_engine(folder, **SPLADE) as engine:
        whole = engine.sparse(TEXTS)
        few = engine.sparse(TEXTS, top_k=5)
        heavy = engine.sparse(TEXTS, min_weight=1.0)
        named = engine.sparse_terms(TEXTS[:2], top_k=3)
        strings = [
            [engine.local.text.processor.tokenizer.token_strings([number])[0] for number in list(row)[:3]]
            for row in few[:2]
        ]
    for all_, five, one in zip(whole, few, heavy, strict=True):
        weights = list(all_.values())
        assert weights == sorted(weights, reverse=True)
        np.testing.assert_allclose(list(five.values()), weights[:5], atol=1e-5)
        np.testing.assert_allclose(list(one.values()), [w for w in weights if w >= 1.0], atol=1e-5)
    assert [[term.token for term in row] for row in named] == strings
    assert named[0][0] == (next(iter(few[0])), strings[0][0], pytest.approx(next(iter(few[0].values()))))


def test_sparse_and_dense_rows_with_several_top_k_share_an_engine(tmp_path: Path) -> None:
    folder = write_masked_lm(tmp_path, "bert")
    with open_engine(folder, **SPLADE) as engine:
        vectors, weights = engine.embed(TEXTS), engine.sparse(TEXTS)

    async def together() -> list[Any]:
        options = {"device": "cpu", "threads": 1, **SPLADE}
        async with AsyncEngine(str(folder), **options) as engine:
            calls = [engine.embed(TEXTS), engine.sparse(TEXTS), engine.sparse(TEXTS, top_k=4)]
            calls += [engine.token_embed(TEXTS)]
            return await asyncio.gather(*calls)

    embedded, sparse, four, _ = asyncio.run(together())
    np.testing.assert_allclose(embedded, vectors, atol=1e-5)
    size = max(max(row) for row in weights) + 1
    np.testing.assert_allclose(dense(sparse, size), dense(weights, size), atol=2e-5)
    for short, row in zip(four, weights, strict=True):
        np.testing.assert_allclose(list(short.values()), list(row.values())[:4], atol=2e-5)


def test_a_step_of_mixed_rows_gives_each_what_it_gives_alone(tmp_path: Path) -> None:
    """Rows with three different parameters are interleaved by length in one step."""
    folder = write_masked_lm(tmp_path, "roberta")
    kinds = (PoolingParams(Task.SPARSE, top_k=300), PoolingParams(), PoolingParams(Task.SPARSE, top_k=7))
    with open_engine(folder, **SPLADE) as engine:
        runner = engine.local.engine.core.runner
        requests = [
            engine.local.text.processor.prepare(str(i), TEXTS[i::3], kind) for i, kind in enumerate(kinds)
        ]
        shares = [ScheduledRows(request, np.arange(request.num_rows, dtype=np.int32)) for request in requests]
        plan = build_plan(shares)
        mixed = split_outputs(plan, runner.launch(plan).result().outputs)
        for share, (_, (values,)) in zip(shares, mixed, strict=True):
            plan = build_plan([share])
            ((_, (alone,)),) = split_outputs(plan, runner.launch(plan).result().outputs)
            np.testing.assert_allclose(values[..., -1], alone[..., -1], atol=2e-5)
            assert values.shape == alone.shape


def save_pt(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    torch.save(tensors, folder / "sparse_linear.pt")


def save_safetensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    save_file(tensors, folder / "sparse_linear.safetensors")


def write_m3(
    folder: Path, save: Callable[[dict[str, torch.Tensor], Path], None] = save_pt
) -> torch.nn.Linear:
    write_transformer(folder, FAMILIES["xlm-roberta"], seed=4)
    torch.manual_seed(6)
    layer = torch.nn.Linear(64, 1)
    save(dict(layer.state_dict()), folder)
    return layer


@torch.inference_mode()
def m3_weights(folder: Path, layer: torch.nn.Linear, text: str) -> dict[int, float]:
    """Token weights, computed as in BGE-M3's code."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    weights = torch.relu(layer(model(input_ids=torch.tensor([ids])).last_hidden_state))[0, :, 0].tolist()
    out: dict[int, float] = {}
    for number, weight in zip(ids, weights, strict=True):
        if number > 4 and weight > 0:  # the first five ids are special tokens
            out[number] = max(weight, out.get(number, 0.0))
    return out


@pytest.mark.parametrize("save", [save_pt, save_safetensors])
def test_bge_m3_weighs_the_tokens_of_the_text(save: Any, tmp_path: Path) -> None:
    layer = write_m3(tmp_path, save)
    texts = [*TEXTS[:12], "the water the water the oil the"]
    theirs = [m3_weights(tmp_path, layer, text) for text in texts]
    assert any(theirs)
    with open_engine(tmp_path, max_num_batched_tokens=64) as engine:
        assert engine.spec.tasks == (Task.EMBED, Task.TOKEN_EMBED, Task.SPARSE, Task.SCORE)
        ours, two = engine.sparse(texts), engine.sparse(texts, top_k=2)
        ids = engine.sparse(engine.tokenize(texts))
        assert engine.embed(texts).shape == (13, 64)
    for a, b, c, short in zip(ours, theirs, ids, two, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
        assert a == pytest.approx(c, abs=1e-5)
        assert list(a.values()) == sorted(a.values(), reverse=True)
        assert list(short.values()) == pytest.approx(list(a.values())[:2], abs=1e-5)


def test_bge_m3s_dense_and_sparse_rows_share_a_step(tmp_path: Path) -> None:
    write_m3(tmp_path)
    with open_engine(tmp_path) as engine:
        vectors, weights = engine.embed(TEXTS), engine.sparse(TEXTS)

    async def together() -> list[Any]:
        async with AsyncEngine(str(tmp_path), device="cpu", threads=1) as engine:
            return await asyncio.gather(
                engine.embed(TEXTS), engine.sparse(TEXTS), engine.sparse(TEXTS, top_k=3)
            )

    embedded, sparse, _ = asyncio.run(together())
    np.testing.assert_allclose(embedded, vectors, atol=1e-5)
    for a, b in zip(sparse, weights, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_a_sparse_layer_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_m3(tmp_path)
    torch.save({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, tmp_path / "sparse_linear.pt")
    with pytest.raises(ModelLoadError, match=r"sparse_linear\.pt"):
        open_engine(tmp_path)


def test_models_without_sparse_weights_and_wrong_values_are_refused(tmp_path: Path) -> None:
    folder = write_transformer(tmp_path / "plain", FAMILIES["bert"])
    with open_engine(folder) as engine, pytest.raises(NotPossible, match="embed, token_embed"):
        engine.sparse(["a"])
    with pytest.raises(ModelLoadError, match="masked-language"):
        open_engine(folder, **SPLADE)
    with open_engine(write_masked_lm(tmp_path / "mlm", "bert"), **SPLADE) as engine:
        for top_k in (0, -3, 10**9):
            with pytest.raises(BadValue, match="top_k"):
                engine.sparse(["a"], top_k=top_k)
        for weight in (-0.1, float("nan"), float("inf")):
            with pytest.raises(BadValue, match="min_weight"):
                engine.sparse(["a"], min_weight=weight)


def test_bge_m3_gives_dense_sparse_and_token_vectors_of_one_forward(tmp_path: Path) -> None:
    """By its recipe: all tokens except the first go through a layer and are normalised; sparse weights by
    token; one dense vector."""
    folder = write_whole_m3(tmp_path)
    layer = torch.load(folder / "colbert_linear.pt", weights_only=True)
    with Engine(str(folder), device="cpu", threads=1) as engine:
        texts = ["the water of the people", "a long search"]
        found = engine.outputs(texts, ["embed", "sparse", "token_embed"])
        assert found["sparse"] == engine.sparse(texts)
        np.testing.assert_allclose(found["embed"], engine.embed(texts), atol=1e-6)
        alone = engine.token_embed(texts)
        rows = engine.tokenize(texts)
    reference = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for row, ours, single in zip(rows, found["token_embed"], alone, strict=True):
        with torch.inference_mode():
            hidden = reference(input_ids=torch.tensor([row])).last_hidden_state[0, 1:]
            expected = torch.nn.functional.normalize(hidden @ layer["weight"].T + layer["bias"], dim=-1)
        assert ours.shape == (len(row) - 1, layer["weight"].shape[0])
        np.testing.assert_allclose(ours, expected, atol=1e-5)
        np.testing.assert_allclose(ours, single, atol=1e-6)
