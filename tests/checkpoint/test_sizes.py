"""Implausible numbers in config.json: each is refused by name before memory is allocated for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.describe import describe, read_spec
from penstock.checkpoint.families import find_architecture
from penstock.checkpoint.files import read_json, weight_files
from penstock.checkpoint.limits import max_positions
from penstock.checkpoint.sizes import check_memory, read_sizes
from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig
from penstock.errors import ConfigError, ModelLoadError
from penstock.runner import device_memory, load
from tests.checkpoints import BERT_CONFIG, wordpiece_tokenizer, write_bert, write_json
from tests.runner.small_models import CONV, EXPERTS, NAMED, SIZES

MEMORY = 256 << 20  # bytes of memory in the simulated machine
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = {"rope_theta": 1e4, "rotary_emb_base": 1e4, "global_rope_theta": 1e4, "local_rope_theta": 1e4}
EPS = {"layer_norm_eps": 1e-6, "norm_eps": 1e-6, "layer_norm_epsilon": 1e-5}
FAMILIES: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "RobertaForSequenceClassification": {"pad_token_id": 1},
    "DistilBertModel": {},
    "MPNetModel": {"pad_token_id": 1, "relative_attention_num_buckets": 32},
    "NomicBertModel": {},
    "GteModel": {},
    "JinaEmbeddingsV3Model": {"pad_token_id": 1, "position_embedding_type": "rotary"},
    "ModernBertModel": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "DebertaV2Model": CONV | {"max_relative_positions": -1, "conv_groups": 1},
    "GPT2Model": {},
    "LlamaModel": {"rope_scaling": LLAMA3},
    "MistralModel": {"sliding_window": 20},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeModel": EXPERTS | {"decoder_sparse_step": 1},
    "Gemma2Model": {"sliding_window": 20, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0},
}
ADDED = ("num_labels", "hidden_act", "layer_types", "rope_scaling", "id2label")  # in no base configuration
HOSTILE: tuple[Any, ...] = (
    0,
    -1,
    7,
    10**9,
    2**62,
    2**80,
    1.5,
    float("nan"),
    float("inf"),
    "12",
    True,
    None,
    [],
    [None],
    {},
    {"factor": 0},
)


def config_of(name: str) -> dict[str, Any]:
    has_names = name.startswith(("DistilBert", "GPT2"))
    sizes = NAMED | {"max_position_embeddings": 64, "vocab_size": 1000} if has_names else SIZES | ROPES
    return sizes | EPS | {"architectures": [name], "type_vocab_size": 2} | FAMILIES[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def start(folder: Path, overrides: dict[str, Any]) -> ModelSpec:
    """Load a model as an engine does, including its first steps."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        load_format="dummy",
        hf_overrides=overrides,
        threads=torch.get_num_threads(),
        max_num_seqs=2,
        kv_cache_gb=0.001,
    )
    spec = describe(config)
    load.load_runner(spec, load.settle(config, spec)).runner.close()
    return spec


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hostile_number_is_refused_or_harmless(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "total_memory_bytes", lambda: MEMORY)
    write_json(folder / "config.json", config_of(name))
    start(folder, {})
    wrong = []
    for key in (*config_of(name), *ADDED):
        for value in HOSTILE:
            try:
                start(folder, {key: value})
            except (ModelLoadError, ConfigError):
                continue
            except BaseException as error:
                wrong.append(f"{key} = {value!r}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("BertModel", {"num_attention_heads": 7}, "hidden_size = 32, which is no multiple of num_attention"),
        ("BertModel", {"num_hidden_layers": 0}, "num_hidden_layers = 0; it has to be an integer from 1"),
        ("BertModel", {"num_hidden_layers": "2"}, "num_hidden_layers = '2'; it has to be an integer"),
        ("BertModel", {"num_hidden_layers": True}, "num_hidden_layers = True; it has to be an integer"),
        ("BertModel", {"max_position_embeddings": 10**9}, "max_position_embeddings = 1000000000; it has to"),
        ("BertModel", {"max_position_embeddings": 64.0}, "max_position_embeddings = 64.0; it has to be an"),
        ("BertModel", {"vocab_size": 0}, "vocab_size = 0; it has to be an integer from 1"),
        (
            "BertModel",
            {"layer_norm_eps": float("nan")},
            "layer_norm_eps = nan; it has to be a number above 0",
        ),
        ("RobertaForSequenceClassification", {"pad_token_id": 300}, "pad_token_id = 300; positions are"),
        ("RobertaForSequenceClassification", {"pad_token_id": None}, "pad_token_id = None; positions are"),
        ("DistilBertModel", {"n_heads": 5}, "dim = 32, which is no multiple of n_heads = 5"),
        ("GPT2Model", {"n_head": 5}, "n_embd = 32, which is no multiple of n_head = 5"),
        ("ModernBertModel", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers = 0; it has"),
        ("LlamaModel", {"num_key_value_heads": 3}, "no multiple of num_key_value_heads = 3"),
        ("LlamaModel", {"head_dim": 10**9}, "head_dim = 1000000000; it has to be an integer from 1 to 1,024"),
        ("LlamaModel", {"head_dim": 7}, "heads of 7 numbers; rotary positions need an even number"),
        ("LlamaModel", {"rope_theta": 0}, "rope_theta = 0; it has to be a number above 1"),
        ("LlamaModel", {"rope_scaling": LLAMA3 | {"factor": 0}}, "rope_scaling.factor = 0; it has to be"),
        ("LlamaModel", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "above low_freq_factor = 1.0"),
        (
            "LlamaModel",
            {"rope_parameters": {"full_attention": {"rope_theta": -1}}},
            "full_attention.rope_theta",
        ),
        ("Qwen3MoeModel", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9; it has to be from 1 to"),
    ],
)
def test_a_refusal_names_the_file_the_key_and_what_is_accepted(
    name: str, change: dict[str, Any], words: str
) -> None:
    config = config_of(name) | change
    with pytest.raises(ModelLoadError) as raised:
        family = find_architecture(name, config).family
        read_sizes(Path("model/config.json"), family, config)
        max_positions(family, config, Path("model/config.json"))
    assert words in raised.value.message and "model/config.json" in raised.value.message


def test_a_model_beyond_all_memory_is_refused_with_the_sizes_that_decide(folder: Path) -> None:
    config = config_of("LlamaModel") | {"intermediate_size": 1 << 20, "num_hidden_layers": 1024}
    sizes = read_sizes(Path("config.json"), find_architecture("LlamaModel", config).family, config)
    with pytest.raises(ModelLoadError, match=r"need at least 384\.\d GiB.*intermediate_size = 1048576"):
        check_memory(sizes, 4, 64 << 30)


def test_position_tables_beyond_all_memory_are_refused_with_the_remedy(folder: Path) -> None:
    config = config_of("LlamaModel") | {"max_position_embeddings": 1 << 24}
    sizes = read_sizes(Path("config.json"), find_architecture("LlamaModel", config).family, config)
    with pytest.raises(ModelLoadError, match=r"max_position_embeddings = 16777216.*--hf-overrides"):
        check_memory(sizes, 4, MEMORY)
    check_memory(sizes, 4, 8 << 30)


def test_a_row_whose_kv_cache_exceeds_all_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "total_memory_bytes", lambda: MEMORY)
    long = {"max_position_embeddings": 500_000, "num_key_value_heads": 4, "num_hidden_layers": 8}
    write_json(folder / "config.json", config_of("Qwen3ForCausalLM") | long)
    with pytest.raises(ConfigError, match=r"max_model_len = 500000 tokens needs .* --max-model-len"):
        start(folder, {})


def test_sizes_beyond_the_weight_files_are_refused_before_memory_is_allocated(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "model")
    write_json(folder / "config.json", BERT_CONFIG | {"vocab_size": 1 << 22})
    config = EngineConfig(model=str(folder), device="cpu", threads=torch.get_num_threads())
    spec = describe(config)
    with pytest.raises(ModelLoadError, match=r"at least 134,2\d\d,\d+ parameters, but the weight files hold"):
        load.load_runner(spec, load.settle(config, spec))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "not valid JSON"),
        ('{"a":' * 100_000, "not valid JSON"),
        ("[]", "has to hold a JSON object, not list"),
        ("", "not valid JSON"),
        ('{"hidden_size": NaN}', "not valid JSON"),
        ('{"a": "\ud800"}', "not valid JSON"),
    ],
    ids=["nested lists", "nested objects", "list", "empty", "NaN", "lone surrogate"],
)
def test_a_file_that_is_no_plain_json_object_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ModelLoadError, match=words):
        read_json(file)


def test_a_huge_json_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)  # a sparse file
    with pytest.raises(ModelLoadError, match="1,099,511,627,776 bytes; at most"):
        read_json(file)


def test_a_folder_in_the_place_of_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelLoadError, match=r"it has no config\.json"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/../../b"])
def test_a_weight_index_cannot_name_files_outside_of_the_folder(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": name}})
    with pytest.raises(ModelLoadError, match="outside of the model's folder"):
        weight_files(tmp_path)


def test_a_module_cannot_be_read_from_outside_of_the_folder(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "model")
    modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "../1_Pooling"}]
    write_json(folder / "modules.json", modules)
    with pytest.raises(ModelLoadError, match="outside of the model's folder"):
        read_spec(folder, "m")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config_sentence_transformers.json", {"prompts": ["query: "]}),
        ("config_sentence_transformers.json", {"default_prompt_name": ["query"]}),
        ("config_sentence_transformers.json", {"similarity_fn_name": 3}),
        ("generation_config.json", {"eos_token_id": "two"}),
        ("generation_config.json", {"eos_token_id": [{}]}),
        ("sentence_bert_config.json", {"max_seq_length": 0}),
        ("tokenizer_config.json", {"model_max_length": -5}),
        ("1_Pooling/config.json", {"pooling_mode": 7}),
        ("1_Pooling/config.json", []),
        ("modules.json", {"type": "Transformer"}),
        ("modules.json", [1]),
    ],
)
def test_other_files_with_values_of_the_wrong_kind_are_refused(
    tmp_path: Path, file: str, content: Any
) -> None:
    folder = write_bert(tmp_path / "model")
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError):
        describe(EngineConfig(model=str(folder)))
