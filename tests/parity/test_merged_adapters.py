"""Repositories that hold only an adapter load as the model that PEFT's merge_and_unload makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock import Engine, SamplingParams
from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig, PoolerConfig
from penstock.errors import ModelLoadError
from penstock.types import PoolingParams, Task, split_rows
from tests.checkpoints import write_bert
from tests.lora_models import TEXTS, adapted_embedder, adapted_llama, adapted_reranker
from tests.parity import decoders
from tests.parity.encoders import Case, opened, reference_hidden
from tests.parity.lora import write_adapter
from tests.parity.page_retrievers import DIM, Retriever, colpali_layout
from tests.parity.qwen_vl import (
    CHAT_TEMPLATE,
    HIDDEN,
    as_published,
    flat_config,
    make_model,
    make_row,
    reference_states,
    request_of,
    write_files,
    write_model,
)
from tests.parity.reference import randomise
from tests.parity.rerankers import QWEN3, write

# vidore/colqwen2.5-v0.2 targets the layers of the language model, and the projection.
PUBLISHED_TARGETS = (
    "(.*(model).*(down_proj|gate_proj|up_proj|k_proj|q_proj|v_proj|o_proj).*$|.*(custom_text_proj).*$)"
)
PAGES = [make_row(4, (6, 8), 5, seed=3), make_row(9, seed=5)]


def test_an_adapter_of_a_reranker_that_only_its_name_identifies_is_asked_the_same(tmp_path: Path) -> None:
    language_model = write(tmp_path / "lm", "Qwen3ForCausalLM")
    base = tmp_path / "Qwen3-Reranker-0.6B-seq-cls"
    config = transformers.AutoConfig.from_pretrained(language_model, num_labels=1)
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    randomise(model, seed=2)
    model.save_pretrained(base)
    transformers.AutoTokenizer.from_pretrained(language_model).save_pretrained(base)
    adapter = tmp_path / "tenant"
    write_adapter(model, adapter, 4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")
    query, documents = "how long is the water?", ["the water was long", "a field"]
    with Engine(str(base), device="cpu", dtype="float32", enable_lora=True) as engine:
        engine.load_adapter("tenant", str(adapter))
        wanted = engine.score(query, documents, adapter="tenant")
    with Engine(str(adapter), base_model=str(base), device="cpu", dtype="float32") as engine:
        np.testing.assert_allclose(engine.score(query, documents), wanted, atol=1e-5)


def test_an_adapter_of_a_text_embedder_is_served_with_its_base(tmp_path: Path) -> None:
    made = adapted_embedder(tmp_path, "one")
    with Engine(str(made.adapters["one"]), device="cpu", dtype="float32") as engine:
        own = engine.embed(TEXTS)
        assert engine.spec.merges_adapter and engine.spec.name == "one"
    with Engine(str(made.merged["one"]), device="cpu", dtype="float32") as engine:
        merged = engine.embed(TEXTS)
    with Engine(str(made.base), device="cpu", dtype="float32") as engine:
        base = engine.embed(TEXTS)
    assert np.abs(own - merged).max() < 1e-5
    assert np.abs(own - base).max() > 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "rank_pattern": {"q_proj": 2}},
        {"target_modules": "all-linear", "use_dora": True},
        {"target_modules": ["v_proj", "embed_tokens"]},
        {"target_modules": ["o_proj"], "trainable_token_indices": {"embed_tokens": [5, 9, 200]}},
        {"target_modules": ["o_proj"], "modules_to_save": ["norm"]},
    ],
    ids=["linear", "ranks", "dora", "table", "tokens", "saved"],
)
def test_each_kind_of_change_is_merged_as_peft_merges_it(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = decoders.FAMILIES["qwen3"].write(tmp_path / "base")
    base: Any = transformers.Qwen3Model.from_pretrained(folder).eval()
    adapted: Any = write_adapter(base, tmp_path / "adapter", **options)
    merged = adapted.merge_and_unload().eval()
    rows = decoders.make_rows()[:6]
    with opened(tmp_path / "adapter", dtype="float32") as engine:
        got = split_rows(engine.ask(rows, Task.TOKEN_EMBED), np.array([len(row) for row in rows], np.int32))
    for own, wanted, before in zip(
        got, reference_hidden(merged, rows), reference_hidden(base, rows), strict=True
    ):
        assert np.abs(own - wanted).max() < 1e-4
        assert np.abs(own - before).max() > 1e-2
    assert "has no tensors for modules" not in caplog.text


def test_modules_that_a_merged_adapter_names_and_its_file_lacks_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = adapted_embedder(tmp_path, "one")
    file = made.adapters["one"] / "adapter_model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if "layer.1.attention.self" not in name}
    save_file(kept, file)
    with Engine(str(made.adapters["one"]), device="cpu", dtype="float32") as engine:
        engine.embed(TEXTS)
    (message,) = [each.getMessage() for each in caplog.records if "has no tensors for" in each.getMessage()]
    assert "layer.1.attention.self.query" in message and "layer.0" not in message


def test_sums_are_fp32_whatever_the_base_is_stored_as(tmp_path: Path) -> None:
    """The base is in bfloat16, where rounding would lose small changes."""
    folder = decoders.FAMILIES["qwen3"].write(tmp_path / "base")
    base: Any = transformers.Qwen3Model.from_pretrained(folder, dtype=torch.bfloat16).eval()
    base.save_pretrained(folder)
    decoders.write_tokenizer(folder)
    exact: Any = transformers.Qwen3Model.from_pretrained(folder, dtype=torch.float32).eval()
    adapted: Any = write_adapter(exact, tmp_path / "adapter", lora_alpha=0.01)
    merged = adapted.merge_and_unload()
    rows = decoders.make_rows()[:4]
    with opened(tmp_path / "adapter", dtype="float32") as engine:
        got = split_rows(engine.ask(rows, Task.TOKEN_EMBED), np.array([len(row) for row in rows], np.int32))
    for own, wanted in zip(got, reference_hidden(merged, rows), strict=True):
        assert np.abs(own - wanted).max() < 1e-4


def test_a_classifier_that_the_adapter_saves_takes_the_place_of_the_base_models(tmp_path: Path) -> None:
    made = adapted_reranker(tmp_path, "one")
    with Engine(str(made.adapters["one"]), device="cpu", dtype="float32") as engine:
        own = engine.score(TEXTS[0], TEXTS)
    with Engine(str(made.merged["one"]), device="cpu", dtype="float32") as engine:
        assert np.abs(np.array(own) - engine.score(TEXTS[0], TEXTS)).max() < 1e-5


def test_a_merged_decoder_generates(tmp_path: Path) -> None:
    made = adapted_llama(tmp_path, "one")
    texts = []
    for folder in (made.adapters["one"], made.merged["one"]):
        with Engine(str(folder), device="cpu", dtype="float32") as engine:
            texts.append(engine.generate("water", SamplingParams(max_tokens=8, temperature=0.0))[0].text)
    assert texts[0] == texts[1]


# Page retrievers.


def test_a_colqwen_adapter_in_its_published_layout_is_merged_with_its_projection(tmp_path: Path) -> None:
    """The adapter and the base have tensor names of different versions of transformers."""
    retriever = colpali_layout("qwen2_5_vl", "ColQwen2_5", old=True)(tmp_path / "colqwen2.5-base")
    adapter = tmp_path / "colqwen2.5-v0.2"
    merged = _adapt(retriever.model, adapter, tmp_path / "colqwen2.5-base", target_modules=PUBLISHED_TARGETS)
    (adapter / "preprocessor_config.json").write_text(
        json.dumps(
            json.loads((tmp_path / "colqwen2.5-base/preprocessor_config.json").read_text())
            | {"max_pixels": 1 << 12}
        )
    )
    names = {
        name.removeprefix("base_model.model.") for name in load_file(adapter / "adapter_model.safetensors")
    }
    assert "custom_text_proj.lora_A.weight" in names and not any("visual" in name for name in names)
    with Engine(str(adapter), device="cpu", dtype="float32") as engine:
        assert engine.spec.tasks == (Task.TOKEN_EMBED, Task.SCORE) and engine.spec.token_dim == DIM
        assert engine.spec.images is not None and engine.spec.images.geometry.max_pixels == 1 << 12  # type: ignore[union-attr]
        _check_pages(engine, Retriever(merged, merged.custom_text_proj), retriever)


def test_layers_of_the_vision_tower_are_merged_too(tmp_path: Path) -> None:
    retriever = colpali_layout("qwen2_5_vl", "ColQwen2_5", old=False)(tmp_path / "base")
    targets = r".*(visual\.blocks).*(gate_proj|qkv|proj)$|.*(custom_text_proj)$"
    merged = _adapt(retriever.model, tmp_path / "adapter", tmp_path / "base", target_modules=targets)
    with Engine(str(tmp_path / "adapter"), device="cpu", dtype="float32") as engine:
        _check_pages(engine, Retriever(merged, merged.custom_text_proj), retriever)


def test_a_projection_that_the_adapter_saves_makes_a_chat_model_a_retriever(tmp_path: Path) -> None:
    chat = make_model("qwen2_5_vl")
    write_model(tmp_path / "chat", chat)
    model = chat.model
    model.custom_text_proj = torch.nn.Linear(HIDDEN, DIM)
    randomise(model.custom_text_proj, 8)
    merged = _adapt(
        model,
        tmp_path / "adapter",
        tmp_path / "chat",
        target_modules=r".*language_model.*(q_proj|v_proj)$",
        modules_to_save=["custom_text_proj"],
    )
    with Engine(str(tmp_path / "adapter"), device="cpu", dtype="float32") as engine:
        assert engine.spec.architecture == "ColQwen2_5"
        assert engine.spec.tasks == (Task.TOKEN_EMBED, Task.SCORE) and engine.spec.token_dim == DIM
        _check_pages(engine, Retriever(merged, merged.custom_text_proj))


def test_a_missing_projection_is_refused(tmp_path: Path) -> None:
    retriever = colpali_layout("qwen2_5_vl", "ColQwen2_5", old=False)(tmp_path / "base")
    _adapt(retriever.model, tmp_path / "adapter", tmp_path / "chat", target_modules=PUBLISHED_TARGETS)
    write_model(tmp_path / "chat", make_model("qwen2_5_vl"))
    with pytest.raises(ModelLoadError, match=r"custom_text_proj, whose weights neither .*--base-model"):
        describe(EngineConfig(model=str(tmp_path / "adapter")))
    spec = describe(EngineConfig(model=str(tmp_path / "adapter"), base_model=str(tmp_path / "base")))
    assert spec.architecture == "ColQwen2_5"


def _adapt(model: Any, folder: Path, base: Path, **options: Any) -> Any:
    """Write an adapter with the files that page retrievers are published with; returns the merged model."""
    adapted: Any = write_adapter(model, folder, **options)
    write_files(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(base), "task_type": "FEATURE_EXTRACTION"})
    )
    return adapted.merge_and_unload().eval()


def _check_pages(engine: Engine, wanted: Retriever, unwanted: Retriever | None = None) -> None:
    request = request_of("vectors", PAGES, PoolingParams(Task.TOKEN_EMBED))
    values = engine.local.engine.submit(request).result().values
    for row, own in zip(PAGES, split_rows(values, request.lengths), strict=True):
        assert np.abs(own - wanted(row)).max() < 1e-5
        if unwanted is not None:
            assert np.abs(own - unwanted(row)).max() > 1e-2


# Which files make up the model.


def test_the_tokenizer_of_the_adapter_is_used_whole_and_the_rest_is_the_bases(tmp_path: Path) -> None:
    made = adapted_embedder(tmp_path, "one")
    adapter, base = made.adapters["one"], made.base
    shutil.copy(base / "tokenizer.json", adapter)
    (base / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (adapter / "config.json").write_text("{}")  # the base's config.json is used
    (adapter / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "Ask: "}}))
    (adapter / "training_args.bin").write_bytes(b"no weights")
    spec = describe(EngineConfig(model=str(adapter)))
    found = {path.name: path.resolve() for path in spec.root_path.iterdir()}
    assert found["tokenizer.json"].parent == adapter.resolve()
    assert "tokenizer_config.json" not in found and "training_args.bin" not in found
    assert found["model.safetensors"].parent == base.resolve()
    assert spec.prompts == {"query": "Ask: "} and spec.root_path.name == "one"
    assert spec.config["_name_or_path"] == str(base)
    assert describe(EngineConfig(model=str(adapter))).folder == spec.folder  # made only once


def test_a_base_that_cannot_be_found_can_be_given(tmp_path: Path) -> None:
    made = adapted_embedder(tmp_path, "one")
    moved = made.base.rename(tmp_path / "elsewhere")
    model = str(made.adapters["one"])
    with pytest.raises(
        ModelLoadError, match=r"an adapter for '.*base', which cannot be loaded: .*--base-model"
    ):
        describe(EngineConfig(model=model))
    assert describe(EngineConfig(model=model, base_model=str(moved))).merges_adapter
    with pytest.raises(ModelLoadError, match=r"is a complete model; --base-model"):
        describe(EngineConfig(model=str(moved), base_model=str(moved)))


def test_an_adapter_that_names_no_base_is_refused(tmp_path: Path) -> None:
    made = adapted_embedder(tmp_path, "one")
    _rewrite(made.adapters["one"], base_model_name_or_path=None)
    with pytest.raises(ModelLoadError, match=r"does not name its base model; give .*--base-model"):
        describe(EngineConfig(model=str(made.adapters["one"])))


def test_an_adapter_of_an_adapter_is_refused(tmp_path: Path) -> None:
    made = adapted_embedder(tmp_path, "one", "two")
    _rewrite(made.adapters["one"], base_model_name_or_path=str(made.adapters["two"]))
    with pytest.raises(ModelLoadError, match="which is an adapter too"):
        describe(EngineConfig(model=str(made.adapters["one"])))


def test_changes_without_a_module_are_refused_by_name(tmp_path: Path) -> None:
    made = adapted_embedder(tmp_path, "one")
    file = made.adapters["one"] / "adapter_model.safetensors"
    tensors = load_file(file)
    moved = {name.replace("layer.1.", "layer.7."): tensor for name, tensor in tensors.items()}
    assert moved.keys() != tensors.keys()
    save_file(moved, file, {"format": "pt"})
    _rewrite(made.adapters["one"], target_modules="all-linear")
    with (
        pytest.raises(ModelLoadError, match=r"modules that this model does not have: .*layer\.7\."),
        opened(made.adapters["one"]),
    ):
        pass


def test_tensors_that_no_option_names_are_refused(tmp_path: Path) -> None:
    made = adapted_embedder(tmp_path, "one")
    file = made.adapters["one"] / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.extra.weight": torch.ones(2, 2)}, file)
    with pytest.raises(ModelLoadError, match=r"'extra.weight', which modules_to_save does not name"):
        describe(EngineConfig(model=str(made.adapters["one"])))


TIED = {  # what an adapter changes in a model with tied embeddings
    "table": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7]},
    "new table": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "new head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("name", TIED)
def test_changes_of_a_table_or_a_head_that_share_one_weight_are_refused(name: str, tmp_path: Path) -> None:
    """Applies to models that use the head, to generate or to score a token. An embedder does not use it."""
    base = write(tmp_path / "base", "Qwen3ForCausalLM", tie_word_embeddings=True)
    model: Any = transformers.Qwen3ForCausalLM.from_pretrained(base).eval()
    write_adapter(model, tmp_path / "adapter", **TIED[name])
    folder = tmp_path / "adapter"
    for options in (
        {"enable_generation": True},
        {"enable_generation": False, "overrides": QWEN3, "score_template": "{query} {document}"},
    ):
        with (
            pytest.raises(ModelLoadError, match=r"changes .*(embed_tokens|lm_head), but .* share one weight"),
            opened(folder, **options),
        ):
            pass
    with opened(folder, enable_generation=False, pooler_config=PoolerConfig(pooling_type="last")):
        pass


@pytest.mark.parametrize("changed", ["decoder", "word_embeddings"])
def test_sparse_weights_are_not_merged_with_a_head_of_the_adapters_own(changed: str, tmp_path: Path) -> None:
    base = Case("Bert").write(tmp_path / "base", "ForMaskedLM")
    write_adapter(base, tmp_path / "adapter", target_modules=["query", changed])
    _rewrite(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    with (
        pytest.raises(ModelLoadError, match=rf"changes .*{changed}, but .* share one weight"),
        opened(tmp_path / "adapter", pooler_config=PoolerConfig(pooling_type="splade")),
    ):
        pass


def test_quantised_bases_transposed_weights_and_other_runners_are_refused(tmp_path: Path) -> None:
    made = adapted_embedder(tmp_path, "one")
    model = str(made.adapters["one"])
    with pytest.raises(ModelLoadError, match="--model-impl transformers does not merge"):
        describe(EngineConfig(model=model, model_impl="transformers"))
    _rewrite(made.adapters["one"], fan_in_fan_out=True)
    with pytest.raises(ModelLoadError, match="fan_in_fan_out"):
        describe(EngineConfig(model=model))
    _rewrite(made.adapters["one"], fan_in_fan_out=False)
    config = json.loads((made.base / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (made.base / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    with pytest.raises(ModelLoadError, match="merged into plain weights only"):
        describe(EngineConfig(model=model))


def test_a_model_with_an_adapter_beside_its_weights_is_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_bert(tmp_path / "model")
    made = adapted_embedder(tmp_path / "more", "one")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(made.adapters["one"] / name, tmp_path / "model")
    assert not describe(EngineConfig(model=str(tmp_path / "model"))).merges_adapter
    assert "the weights are used, the adapter is not" in caplog.text


def _rewrite(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_base_in_the_names_of_the_first_qwen2_vl_files_takes_an_adapter_of_today(tmp_path: Path) -> None:
    model = make_model("qwen2_vl")
    write_model(tmp_path / "base", model)
    renamed = {"model.language_model.": "model.", "model.visual.": "visual."}
    as_published(tmp_path / "base", renamed, flat_config("qwen2_vl", tmp_path / "base"))
    targets = r".*language_model.*(q_proj|down_proj)$|.*visual.*fc1$"
    merged = _adapt(model, tmp_path / "adapter", tmp_path / "base", target_modules=targets)
    with Engine(str(tmp_path / "adapter"), device="cpu", dtype="float32", enable_generation=False) as engine:
        request = request_of("a", PAGES, PoolingParams(Task.TOKEN_EMBED, normalize=False))
        values = engine.local.engine.submit(request).result().values
    for row, own in zip(PAGES, split_rows(values, request.lengths), strict=True):
        assert np.abs(own - reference_states(merged, row)).max() < 1e-3
