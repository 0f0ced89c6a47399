"""How the files of late-interaction models are read."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.dense import DenseSpec
from penstock.checkpoint.describe import describe, read_spec
from penstock.checkpoint.late import LateSpec
from penstock.config import EngineConfig
from penstock.errors import ModelLoadError
from penstock.types import Task
from tests.checkpoints import BERT_CONFIG, write_json, write_modules
from tests.published.models import MODELS, write

IDENTITY = "torch.nn.modules.linear.Identity"


def stanford(folder: Path, metadata: dict[str, Any] | None = None, **config: Any) -> Path:
    write_json(folder / "config.json", BERT_CONFIG | {"architectures": ["HF_ColBERT"], "dim": 16} | config)
    write_json(
        folder / "special_tokens_map.json", {"mask_token": {"content": "[MASK]"}, "unk_token": "[UNK]"}
    )
    if metadata is not None:
        write_json(folder / "artifact.metadata", metadata)
    return folder


def pylate(folder: Path, *more: tuple[str, str], **table: Any) -> Path:
    write_json(folder / "config.json", BERT_CONFIG)
    write_modules(folder, [("Transformer", ""), ("Dense", "1_Dense"), *more])
    values = {"in_features": 32, "out_features": 12, "bias": False, "activation_function": IDENTITY}
    write_json(folder / "1_Dense/config.json", values)
    write_json(folder / "config_sentence_transformers.json", table)
    return folder


def late_of(folder: Path, **overrides: Any) -> LateSpec:
    late = read_spec(folder, "m", overrides).late
    assert late is not None
    return late


def test_an_ordinary_model_is_not_late_interaction(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", BERT_CONFIG)
    assert read_spec(tmp_path, "m").late is None


def test_stanford_models_have_defaults(tmp_path: Path) -> None:
    spec = read_spec(stanford(tmp_path), "m")
    assert spec.late == LateSpec(
        dense=(DenseSpec("", 32, 16, False, "identity"),),
        dim=16,
        query_length=None,
        document_length=None,
        expand_to=32,
        attend=False,
        expansion_token="[MASK]",
        query_marker="[unused0]",
        document_marker="[unused1]",
        unknown_token="[UNK]",
        skip_words=tuple(string.punctuation),
    )
    assert (spec.token_dim, spec.embed_dim) == (16, 32)
    assert spec.tasks == (Task.TOKEN_EMBED, Task.SCORE)
    assert spec.width(Task.TOKEN_EMBED) == 16 and spec.width(Task.SCORE) == 1


def test_artifact_metadata_overrides_the_defaults(tmp_path: Path) -> None:
    metadata = {
        "query_maxlen": 48,
        "doc_maxlen": 300,
        "query_token_id": "[Q]",
        "doc_token_id": "[D]",
        "mask_punctuation": False,
        "attend_to_mask_tokens": True,
        "nbits": 2,
    }
    late = late_of(stanford(tmp_path, metadata))
    assert (late.query_length, late.document_length) == (48, 300)
    assert (late.query_marker, late.document_marker) == ("[Q]", "[D]")
    assert late.attend and late.skip_words == ()
    assert late_of(tmp_path, query_maxlen=8, do_query_expansion=False).query_length == 8
    assert late_of(tmp_path, do_query_expansion=False).expand_to is None


def test_xlm_r_uses_its_own_markers(tmp_path: Path) -> None:
    late = late_of(stanford(tmp_path, model_type="xlm-roberta"))
    assert (late.query_marker, late.document_marker) == ("[QueryMarker]", "[DocumentMarker]")


def test_pylate_modules_and_settings_are_read(tmp_path: Path) -> None:
    table = {
        "query_prefix": "[Q] ",
        "document_prefix": "",
        "query_length": 48,
        "document_length": 300,
        "attend_to_expansion_tokens": True,
        "skiplist_words": ["a", "b"],
        "do_query_expansion": True,
    }
    spec = read_spec(pylate(tmp_path, **table), "m")
    late = spec.late
    assert late is not None and late.dense == (DenseSpec("1_Dense", 32, 12, False, "identity"),)
    assert (late.query_length, late.document_length) == (48, 300)
    assert (late.query_marker, late.document_marker) == ("[Q] ", "")
    assert late.expand_to == 48 and late.attend and late.skip_words == ("a", "b")
    assert spec.token_dim == 12 and spec.pooling.modules == ()
    assert not late_of(tmp_path, do_query_expansion=False).attend


def test_pylate_models_have_defaults(tmp_path: Path) -> None:
    late = late_of(pylate(tmp_path))
    assert (late.query_length, late.document_length) == (32, 180)
    assert (late.query_marker, late.document_marker) == ("[Q] ", "[D] ")
    assert late.expand_to == 32 and not late.attend and late.skip_words == tuple(string.punctuation)


def test_a_pooling_module_adds_the_embed_task(tmp_path: Path) -> None:
    pylate(tmp_path, ("Pooling", "2_Pooling"), query_length=32)
    write_json(tmp_path / "2_Pooling/config.json", {"pooling_mode": "cls"})
    spec = read_spec(tmp_path, "m")
    assert spec.tasks == (Task.TOKEN_EMBED, Task.EMBED, Task.SCORE)
    assert (spec.embed_dim, spec.token_dim, spec.pooling.methods) == (32, 12, ("cls",))


def test_a_dense_module_after_the_pooling_is_no_late_interaction(tmp_path: Path) -> None:
    pylate(tmp_path)
    write_json(tmp_path / "2_Pooling/config.json", {"pooling_mode": "cls"})
    write_modules(tmp_path, [("Transformer", ""), ("Pooling", "2_Pooling"), ("Dense", "1_Dense")])
    spec = read_spec(tmp_path, "m")
    assert spec.late is None and len(spec.pooling.modules) == 1


def multi_vector(folder: Path, mask: dict[str, Any], **transformer: Any) -> Path:
    write_json(folder / "config.json", BERT_CONFIG)
    write_modules(folder, [("Transformer", ""), ("MultiVectorMask", "1_Mask"), ("Normalize", "2_Normalize")])
    write_json(folder / "1_Mask/config.json", mask)
    write_json(folder / "sentence_bert_config.json", transformer)
    write_json(folder / "tokenizer_config.json", {"mask_token": "[MASK]", "unk_token": "[UNK]"})
    table = {"model_type": "MultiVectorEncoder", "prompts": {"query": "[Q] ", "document": "[D] "}}
    write_json(folder / "config_sentence_transformers.json", table)
    return folder


def test_a_multi_vector_encoder_may_lack_a_projection_and_set_a_minimum_length(tmp_path: Path) -> None:
    expansion = {"strategy": "min", "length": 16, "attend": True}
    mask = {"skiplist_words": ["a"], "skiplist_tasks": ["query", "document"]}
    spec = read_spec(multi_vector(tmp_path, mask, query_expansion=expansion, query_length=40), "m")
    assert spec.late == LateSpec(
        dense=(),
        dim=32,
        query_length=40,
        document_length=None,
        expand_to=16,
        attend=True,
        expansion_token="[MASK]",
        skip_words=("a",),
        skip_queries=True,
        strip=False,
    )
    assert spec.token_dim == 32 and spec.prompts == {"query": "[Q] ", "document": "[D] "}
    fixed = {"strategy": "fixed", "length": 20, "token": "[PAD]"}
    late = late_of(tmp_path, query_expansion=fixed)
    assert (late.query_length, late.expand_to, late.attend, late.expansion_token) == (20, 20, False, "[PAD]")
    assert late_of(tmp_path, query_expansion=None).expand_to is None


PAGES = {
    "colpali-v1.2": ("Question: ", "<unused0>" * 5 + "\n", 1),
    "colpali-v1.3": ("Query: ", "<pad>" * 10 + "\n", 1),
    "my-colpali": ("", "<pad>" * 10, 2),
}


def page_retriever(folder: Path, name: str) -> Path:
    record = next(model for model in MODELS if model.id == "vidore/colpali-v1.2-merged")
    written = write(record, folder)
    return written.rename(folder / name)


def with_page_modules(folder: Path, **dense: Any) -> Path:
    kinds = [("Transformer", ""), ("Dense", "1_Dense"), ("MultiVectorMask", "2_Mask"), ("Normalize", "3")]
    write_modules(folder, kinds)
    values = {"in_features": 2048, "out_features": 128, "bias": True, "activation_function": IDENTITY}
    values |= {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    write_json(folder / "1_Dense/config.json", values | dense)
    write_json(folder / "2_Mask/config.json", {"skiplist_words": []})
    table = {"model_type": "MultiVectorEncoder", "prompts": {"query": "", "document": ""}}
    write_json(folder / "config_sentence_transformers.json", table)
    return folder


@pytest.mark.parametrize("name", PAGES)
def test_modules_of_sentence_transformers_do_not_change_how_a_retriever_of_pages_is_read(
    tmp_path: Path, name: str
) -> None:
    """vidore's repositories have them since sentence-transformers 6. Their chat template writes queries."""
    prompt, end, num_begins = PAGES[name]
    folder = page_retriever(tmp_path, name)
    plain = read_spec(folder, name)
    assert plain.late is not None and plain.image_prompt is not None and plain.image_prompt.page is not None
    assert (plain.late.query_end, plain.late.dim, plain.late.normalize) == (end, 128, True)
    assert plain.prompts == ({"query": prompt} if prompt else {})
    assert plain.image_prompt.page.count("<bos>") == num_begins
    spec = read_spec(with_page_modules(folder), name)
    assert (spec.late, spec.prompts, spec.token_dim) == (plain.late, plain.prompts, 128)
    assert spec.image_prompt == plain.image_prompt


def test_modules_that_a_retriever_of_pages_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = with_page_modules(page_retriever(tmp_path, "colpali-v1.3"), out_features=64)
    with pytest.raises(ModelLoadError, match="makes vectors of 64 numbers, but those of ColPali have 128"):
        read_spec(folder, "m")
    with_page_modules(folder)
    write_json(folder / "2_Mask/config.json", {"skiplist_words": ["!"]})
    with pytest.raises(ModelLoadError, match="skiplist_words or query_expansion, which are not supported"):
        read_spec(folder, "m")
    write_modules(folder, [("Transformer", ""), ("Pooling", "1_Pooling")])
    with pytest.raises(ModelLoadError, match="has Pooling, which ColPali does not have"):
        read_spec(folder, "m")


def test_vectors_of_tokens_of_messages_are_refused(tmp_path: Path) -> None:
    """Their chat template may write more than prompts do."""
    record = next(model for model in MODELS if model.id == "Qwen/Qwen3-VL-Embedding-2B")
    folder = write(record, tmp_path)
    write_modules(folder, [("Transformer", ""), ("MultiVectorMask", "1_Mask"), ("Normalize", "2_Normalize")])
    write_json(folder / "1_Mask/config.json", {})
    with pytest.raises(ModelLoadError, match="a vector for each token of messages, which is not supported"):
        read_spec(folder, "m")


def test_unsupported_options_of_a_multi_vector_encoder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="strategy = 'max', which is not supported"):
        read_spec(multi_vector(tmp_path, {}, query_expansion={"strategy": "max", "length": 8}), "m")
    with pytest.raises(ModelLoadError, match="keep_only_token_ids"):
        read_spec(multi_vector(tmp_path, {"keep_only_token_ids": [3]}), "m")


def test_transformers_runs_a_projection_only_if_it_is_a_module(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="stored with the backbone"):
        describe(EngineConfig(model=str(stanford(tmp_path)), model_impl="transformers"))
    spec = describe(EngineConfig(model=str(pylate(tmp_path)), model_impl="transformers"))
    assert spec.late is not None and spec.tasks[0] is Task.TOKEN_EMBED


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"query_maxlen": "32"}, "query_maxlen is '32'"),
        ({"doc_maxlen": 2}, "doc_maxlen is 2"),
        ({"attend_to_mask_tokens": 1}, "attend_to_mask_tokens is 1"),
        ({"query_token_id": 1}, "query_token_id is 1"),
    ],
)
def test_values_of_the_wrong_type_are_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_spec(stanford(tmp_path, metadata), "m")


def test_projections_whose_sizes_do_not_match_are_refused(tmp_path: Path) -> None:
    pylate(tmp_path, ("Dense", "2_Dense"))
    write_json(tmp_path / "2_Dense/config.json", {"in_features": 13, "out_features": 4, "bias": False})
    with pytest.raises(ModelLoadError, match="2_Dense has in_features = 13, but its input has 12"):
        read_spec(tmp_path, "m")


def test_a_causal_backbone_runs_rows_in_one_step(tmp_path: Path) -> None:
    stanford(tmp_path, architectures=["Qwen3Model"], model_type="qwen3")
    pylate_table = {"query_length": 32}
    write_modules(tmp_path, [("Transformer", ""), ("Dense", "1_Dense")])
    write_json(tmp_path / "1_Dense/config.json", {"in_features": 32, "out_features": 12, "bias": False})
    write_json(tmp_path / "config_sentence_transformers.json", pylate_table)
    spec = read_spec(tmp_path, "m")
    assert spec.is_causal and spec.late is not None
    assert spec.why_not_chunked == "late interaction needs the whole row in one step"
