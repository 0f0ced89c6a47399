from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.describe import describe, read_spec
from penstock.checkpoint.families import CLASS_SUFFIXES, FAMILIES, find_architecture, text_tower
from penstock.checkpoint.pooling import POOLING_METHODS, PoolingSpec, default_pooling
from penstock.checkpoint.score import PROMPTS
from penstock.config import EngineConfig
from penstock.errors import ModelLoadError
from penstock.types import Task
from tests.checkpoints import BERT_CONFIG, write_json

DECODERS = [name for name, family in FAMILIES.items() if family.is_decoder]
ENCODERS = [name for name in FAMILIES if name not in DECODERS]


def test_no_class_name_belongs_to_two_families() -> None:
    classes = [f.class_prefix + suffix for f in FAMILIES.values() for suffix in CLASS_SUFFIXES]
    twice = [name for name, count in Counter([*classes, *FAMILIES]).items() if count > 1]
    assert twice == []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_found_by_its_name_and_by_each_of_its_classes(name: str) -> None:
    family = FAMILIES[name]
    assert find_architecture(name, {}).family is family
    for suffix, head in CLASS_SUFFIXES.items():
        if head is None or head in family.heads:
            found = find_architecture(family.class_prefix + suffix, {})
            assert found.family is family and found.head is head and found.suffix == suffix
        else:
            with pytest.raises(ModelLoadError, match="is not supported"):
                find_architecture(family.class_prefix + suffix, {})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_record_names_only_what_exists(name: str) -> None:
    family = FAMILIES[name]
    assert set(family.score_prompts) <= set(PROMPTS)
    assert {family.pooling, family.causal_pooling} <= set(POOLING_METHODS)
    assert family.is_decoder or not family.attends_both_ways


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_pooled_by_how_it_attends(name: str) -> None:
    architecture = find_architecture(name, {})
    causal = default_pooling(architecture, {"is_causal": True})
    method = "mean" if name == "JinaEmbeddingsV4" else "last"  # the published code uses the mean
    assert causal == PoolingSpec(methods=(method,), normalize=True)
    both_ways = default_pooling(architecture, {"is_causal": False})
    assert both_ways.methods == (architecture.family.pooling,) and both_ways.normalize
    expected = both_ways if architecture.family.attends_both_ways else causal
    assert default_pooling(architecture, {}) == expected


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_never_causal_and_is_mean_pooled_unless_it_has_two_towers(name: str) -> None:
    architecture = find_architecture(name, {})
    assert not architecture.family.is_causal({"is_causal": True})
    dual = architecture.family.is_dual  # pools the last token, and compares vectors
    wanted = PoolingSpec(methods=("last" if dual else "mean",), normalize=dual)
    assert default_pooling(architecture, {}) == wanted


def test_the_base_of_jina_embeddings_v5_decides_how_it_attends() -> None:
    family = FAMILIES["jina_embeddings_v5"]
    assert family.is_causal({"head_dim": 128})
    assert not family.is_causal({"mask_token_id": 128002})


def test_use_bidirectional_attention_turns_causal_attention_off() -> None:
    family = FAMILIES["gemma3_text"]
    assert family.is_causal({}) and not family.is_causal({"use_bidirectional_attention": True})
    assert family.is_causal({"use_bidirectional_attention": True, "is_causal": True})
    with pytest.raises(ModelLoadError, match="is_causal = 'no'; it has to be true or false"):
        family.is_causal({"is_causal": "no"})


OWN_CODE = {"AutoModel": "modeling_qwen.Qwen2Model", "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM"}


def test_an_embedder_whose_own_code_decides_which_tokens_see_which_has_to_say_it(tmp_path: Path) -> None:
    config = BERT_CONFIG | {"architectures": ["LlamaModel"], "auto_map": OWN_CODE}
    write_json(tmp_path / "config.json", config)
    with pytest.raises(ModelLoadError, match=r"modeling_qwen\.Qwen2Model.*set is_causal to true or false"):
        read_spec(tmp_path, "m")
    assert read_spec(tmp_path, "m", {"is_causal": True}).is_causal
    assert not read_spec(tmp_path, "m", {"is_causal": False}).is_causal


@pytest.mark.parametrize(
    "code",
    [
        {"AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM"},
        {"AutoModel": "modeling_qwen.Qwen2ForCausalLM"},
        {"AutoConfig": "configuration_qwen.Qwen2Config"},
    ],
)
def test_code_that_only_generates_does_not_matter(tmp_path: Path, code: dict[str, str]) -> None:
    write_json(tmp_path / "config.json", BERT_CONFIG | {"architectures": ["LlamaModel"], "auto_map": code})
    assert read_spec(tmp_path, "m").is_causal


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {"architectures": ["T5ForConditionalGeneration"], "d_model": 64},
    "WhisperForConditionalGeneration": {"architectures": ["WhisperForConditionalGeneration"]},
    "BlipModel": {"architectures": ["BlipModel"], "text_config": {}, "vision_config": {}},
    "BertForQuestionAnswering": BERT_CONFIG | {"architectures": ["BertForQuestionAnswering"]},
    "MambaModel": {"architectures": ["MambaModel"], "is_causal": "perhaps"},
    "GPT2ForRewardModel": {"architectures": ["GPT2ForRewardModel"], "model_type": "gpt2"},
    "whisper": {"architectures": [], "model_type": "whisper"},
    "mobilebert": {"model_type": "mobilebert", "hidden_size": "wide"},
    "HF_ColBERT on model_type 'bart'": {"architectures": ["HF_ColBERT"], "model_type": "bart"},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_architecture_is_refused_before_anything_else_is_read(
    tmp_path: Path, name: str
) -> None:
    write_json(tmp_path / "config.json", UNSUPPORTED[name])
    (tmp_path / "modules.json").write_text("not even JSON")
    with pytest.raises(ModelLoadError) as caught:
        describe(EngineConfig(model=str(tmp_path)))
    message = caught.value.message
    assert name in message and "is not supported" in message
    assert "Bert*" in message and "XLMRoberta*" in message and "ForSequenceClassification" in message
    assert "--model-impl transformers" in message
    assert caught.value.param == "model"


@pytest.mark.parametrize("names", ["BertModel", [7], [""], {"first": "BertModel"}])
def test_architectures_that_are_no_list_of_names_are_shown(tmp_path: Path, names: Any) -> None:
    write_json(tmp_path / "config.json", BERT_CONFIG | {"architectures": names})
    with pytest.raises(ModelLoadError, match="it has to be a list of class names") as caught:
        read_spec(tmp_path, "m")
    assert repr(names) in caught.value.message


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": None, "model_type": None}])
def test_a_config_that_names_no_architecture_says_how_to_name_one(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    write_json(tmp_path / "config.json", config)
    with pytest.raises(ModelLoadError, match=r"neither architectures nor model_type.*--hf-overrides"):
        read_spec(tmp_path, "m")


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "max_position_embeddings"])
def test_a_missing_key_of_a_supported_architecture_is_named_with_its_file(tmp_path: Path, key: str) -> None:
    write_json(tmp_path / "config.json", {name: BERT_CONFIG[name] for name in BERT_CONFIG if name != key})
    with pytest.raises(ModelLoadError, match=rf"config\.json has no integer {key}"):
        read_spec(tmp_path, "m")


def test_a_class_that_nests_its_text_model_is_refused_as_such(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma3Model"], "text_config": {"hidden_size": 8}}
    write_json(tmp_path / "config.json", config)
    with pytest.raises(ModelLoadError, match="has a text_config"):
        read_spec(tmp_path, "m")


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        ("ElectraModel", PoolingSpec(methods=("mean",), normalize=False)),
        ("Qwen2MoeForCausalLM", PoolingSpec(methods=("last",), normalize=True)),
        ("BertForQuestionAnswering", PoolingSpec(methods=("mean",), normalize=False)),
    ],
)
def test_transformers_runs_architectures_without_a_record(
    tmp_path: Path, name: str, pooling: PoolingSpec
) -> None:
    write_json(tmp_path / "config.json", BERT_CONFIG | {"architectures": [name]})
    spec = describe(EngineConfig(model=str(tmp_path), model_impl="transformers"))
    assert spec.architecture == name and spec.pooling == pooling
    scores = () if name.endswith("ForCausalLM") else (Task.SCORE,)  # nothing identifies it as an embedder
    assert spec.tasks == (Task.EMBED, Task.TOKEN_EMBED, *scores) and not spec.is_causal


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (
            {"architectures": ["DistilBertModel"], "dim": 24, "n_layers": 3, "n_heads": 4, "hidden_dim": 8},
            (24, 3, 64),
        ),
        (
            {"architectures": ["GPT2Model"], "n_embd": 40, "n_layer": 5, "n_head": 4, "n_positions": 20},
            (40, 5, 20),
        ),
        ({"architectures": ["NomicBertModel"], "n_positions": 30}, (32, 2, 30)),
        (
            {"architectures": ["NomicBertModel"], "rotary_scaling_factor": 2, "max_trained_positions": 50},
            (32, 2, 50),
        ),
        ({"architectures": ["HF_ColBERT"], "dim": 8}, (32, 2, 64)),
        ({"architectures": ["HF_ColBERT"], "dim": 8, "model_type": "xlm-roberta"}, (32, 2, 63)),
    ],
)
def test_sizes_are_read_under_the_familys_own_keys(
    tmp_path: Path, config: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    write_json(tmp_path / "config.json", BERT_CONFIG | config)
    spec = read_spec(tmp_path, "m")
    assert (spec.hidden_size, spec.num_layers, spec.max_positions) == sizes


def test_only_bert_has_segments_without_saying_so(tmp_path: Path) -> None:
    plain = {key: BERT_CONFIG[key] for key in BERT_CONFIG if key != "type_vocab_size"}
    counts = {}
    for name in ("BertModel", "bert", "RobertaModel", "ModernBertModel"):
        write_json(tmp_path / "config.json", plain | {"architectures": [name]})
        counts[name] = read_spec(tmp_path, "m").num_segments
    assert counts == {"BertModel": 2, "bert": 2, "RobertaModel": 0, "ModernBertModel": 0}


def test_rotary_options_beside_a_text_config_that_has_some_do_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 2, 2]}
    outer = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "rope_theta": 5e5,
    }
    architecture = find_architecture("Qwen2VLForConditionalGeneration", outer)
    nested = outer | {"text_config": {"rope_parameters": rope}}
    with caplog.at_level(logging.WARNING, "penstock"):
        assert "rope_theta" not in text_tower(architecture, tmp_path, nested)
        assert not caplog.records
        found = text_tower(architecture, tmp_path, nested | {"rope_scaling": {"type": "yarn", "factor": 2.0}})
        assert "rope_scaling" not in found and found["rope_parameters"] == rope
        assert "has rope_scaling beside its text_config" in caplog.text
    assert text_tower(architecture, tmp_path, outer | {"text_config": {}})["rope_theta"] == 5e5
